"""The step of one rank among thousands, built without them: its messages, bytes and memory. Needs no GPU and no memory.

    python benchmarks/scale.py                           # a Llama of 7 billion parameters on 8, 512 and 4,096 ranks
    python benchmarks/scale.py --layers 2 --ranks 8

The weights are torch's meta tensors, and the other ranks its fake process group, so the graph is that of rank 0 and
nothing runs. Build time is that of capture, planning and all passes of STEP, without a compiler. Bytes are counted in
the graph, as rings of ranks send them; memory is that of weights, masters and moments, without activations.

How long a step takes on H200s, and how long it stands still for messages, is predicted by the model of `overlap.py`,
from the events in the graph; for DistributedDataParallel (with FP32 and BF16 messages), `ZeroRedundancyOptimizer` and
FSDP2 from the events that their documentation tells, with the same products. Nothing of it is measured.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measuring import RESULTS, write_results
from overlap import Compute, Events, Prediction, Unit, data_parallel, events_of, fully_sharded, predict, units_of
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import amp_compiler as amp

WORDS, WIDTH, INNER, HEADS = 32000, 4096, 11008, 32


class Block(nn.Module):
    """Attention and a gated MLP behind RMS norms, as Llama has them, without the rotation of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_mlp = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Of `[batch, tokens, WIDTH]`."""
        y = self.norm(x)
        q, k, v = (one(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.norm_mlp(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def llama(layers: int) -> nn.Module:
    """Of 6.7 billion parameters at 32 layers, on torch's meta device."""
    with torch.device("meta"):
        blocks = [Block() for _ in range(layers)]
        return nn.Sequential(
            nn.Embedding(WORDS, WIDTH), *blocks, nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        )


def next_word(model: nn.Module, ids: Tensor) -> Tensor:
    """The loss: the cross entropy, written out because torch's has no gradient on the meta device."""
    return -F.log_softmax(model(ids[:, :-1]), -1).gather(-1, ids[:, 1:, None]).mean()


def measured(layers: int, ranks: int, shard: str, rules: str, tokens: int) -> tuple[dict[str, Any], list[Unit]]:
    """One graph, with what it sends and holds and when; and its layers."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        model = llama(layers)
        batch = (torch.zeros(1, tokens + 1, dtype=torch.int64, device="meta"),)
        step = amp.training_step(
            model,
            next_word,
            torch.optim.AdamW(model.parameters(), 1e-4),
            dtype="bf16",
            clip_norm=1.0,
            dynamic_shapes=None,
            backend="eager",
            rules={"version": 1, "extends": rules, "reduce": {"shard": shard}},
            process_group=dist.group.WORLD,
        )
        begun = time.perf_counter()
        found = step.graph_for(*batch)
        seconds = time.perf_counter() - begun
        traffic, events = found.traffic, events_of(found.graph_module.graph, ranks)
        if traffic is None:
            raise SystemExit("--ranks takes numbers from 2 on")
        row = {
            "system": f"{rules}, {'whole update' if shard == 'none' else 'shard: update'}",
            "ranks": ranks,
            "rules": rules,
            "shard": shard,
            "layers": layers,
            "elements": traffic.elements,
            "seconds": round(seconds, 1),
            "messages": traffic.messages,
            "sent_gb": round(traffic.sent / 1e9, 3),
            "weights_gb": round(traffic.weights / 1e9, 3),
            "state_gb": round(traffic.state / 1e9, 3),
            **predicted(predict(events, ranks)),
        }
        return row, units_of(model, products(events) / 3)
    finally:
        dist.destroy_process_group()


def products(events: Events) -> float:
    """Seconds of all products, which stand in front of the updates."""
    return sum(event.seconds for event in events if isinstance(event, Compute) and not event.updates)


def predicted(found: Prediction) -> dict[str, float]:
    """In milliseconds."""
    return {
        "step_ms": round(found.seconds * 1e3, 1),
        "computing_ms": round(found.computing * 1e3, 1),
        "sending_ms": round(found.sending * 1e3, 1),
    }


def others(units: list[Unit], ranks: int) -> list[dict[str, Any]]:
    """torch's ways to train the same layers, by the same model."""
    total, largest = sum(unit.elements for unit in units), 2 * max(unit.elements for unit in units)
    ways: dict[str, tuple[Events, float, float]] = {  # events, bytes of weights, bytes of masters and moments
        "DDP": (data_parallel(units, ranks), 6 * total, 8 * total),
        "DDP, bf16_compress_hook": (data_parallel(units, ranks, 2), 6 * total, 8 * total),
        "ZeroRedundancyOptimizer": (data_parallel(units, ranks, zero=True), 6 * total, 8 * total / ranks),
        "FSDP2": (fully_sharded(units, ranks), 2 * largest, 12 * total / ranks),
    }
    rows = []
    for system, (events, weights, state) in ways.items():
        found = predict(events, ranks)
        row = {"system": system, "ranks": ranks, "messages": found.messages, "sent_gb": round(found.sent / 1e9, 3)}
        row |= {"weights_gb": round(weights / 1e9, 3), "state_gb": round(state / 1e9, 3), **predicted(found)}
        rows.append(row)
    return rows


def told(row: dict[str, Any]) -> str:
    """A line of the table."""
    build = f"{row['seconds']:5.1f} s" if "seconds" in row else ""
    sizes = " ".join(f"{row[key]:8.2f}" for key in ("sent_gb", "weights_gb", "state_gb"))
    times = " ".join(f"{ms:9.1f}" for ms in (row["step_ms"], row["step_ms"] - row["computing_ms"], row["sending_ms"]))
    return f"{row['ranks']:6} {row['system']:24} {build:7} {row['messages']:9} {sizes} {times}"


def main() -> None:
    """Build, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 512, 4096])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=4096, help="of each rank")
    parser.add_argument("--rules", nargs="+", default=["default", "fast"], help="presets")
    parser.add_argument("--json", type=Path, default=RESULTS / "scale.json", help="where the numbers go")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    print(
        f"{'ranks':>6} {'':24} {'build':7} {'messages':>9} {'sent GB':>8} {'weights':>8} {'state':>8} {'step ms':>9}"
        f" {'waiting':>9} {'sending':>9}"
    )
    for ranks in options.ranks:
        units: list[Unit] = []
        for rules, shard in [(options.rules[0], "none"), *((rules, "update") for rules in options.rules)]:
            row, units = measured(options.layers, ranks, shard, rules, options.tokens)
            rows.append(row)
            print(told(row), flush=True)
        for row in others(units, ranks):
            rows.append(row)
            print(told(row), flush=True)
    options.device, options.threads = "cpu", 1
    write_results(options.json, "scale", options, rows)


if __name__ == "__main__":
    main()
