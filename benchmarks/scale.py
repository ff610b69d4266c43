"""The step of one rank among thousands, built without them: its messages, bytes and memory. Needs no GPU and no memory.

    python benchmarks/scale.py                           # a Llama of 7 billion parameters on 8, 512 and 4,096 ranks
    python benchmarks/scale.py --layers 2 --ranks 8

The weights are torch's meta tensors, and the other ranks its fake process group, so the graph is that of rank 0 and
nothing runs. Build time is that of capture, planning and all passes of STEP, without a compiler. Bytes are counted in
the graph, as rings of ranks send them; memory is that of weights, masters and moments, without activations.

Beside it stands what the documentation of DistributedDataParallel (with FP32 and BF16 messages),
`ZeroRedundancyOptimizer` and FSDP2 says that they send and hold.
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


def counted(layers: int, ranks: int, shard: str, rules: str, tokens: int) -> dict[str, Any]:
    """One graph, with what it sends and holds."""
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
        built = step.graph_for(*batch)
        seconds = time.perf_counter() - begun
        traffic = built.traffic
        if traffic is None:
            raise SystemExit("--ranks takes numbers from 2 on")
        return {
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
        }
    finally:
        dist.destroy_process_group()


def others(elements: int, ranks: int) -> list[dict[str, Any]]:
    """What torch's ways to train the same model send and hold: bytes a parameter."""
    largest = 2 * 2 * (4 * WIDTH**2 + 3 * WIDTH * INNER + 2 * WIDTH) / elements  # two layers, in 16 bits
    ways = {  # sent, but for a rank's own share; weights; masters and moments
        "DDP": (8, 6, 8),
        "DDP, bf16_compress_hook": (4, 6, 8),
        "ZeroRedundancyOptimizer": (12, 6, 8 / ranks),
        "FSDP2": (6, largest, 12 / ranks),
    }
    return [
        {
            "system": system,
            "ranks": ranks,
            "sent_gb": round(sent * elements * (ranks - 1) / ranks / 1e9, 3),
            "weights_gb": round(weights * elements / 1e9, 3),
            "state_gb": round(state * elements / 1e9, 3),
        }
        for system, (sent, weights, state) in ways.items()
    ]


def line(row: dict[str, Any]) -> str:
    """A line of the table."""
    build = f"{row['seconds']:5.1f} s" if "seconds" in row else ""
    sizes = " ".join(f"{row[key]:8.2f}" for key in ("sent_gb", "weights_gb", "state_gb"))
    return f"{row['ranks']:6} {row['system']:24} {build:7} {row.get('messages', ''):9} {sizes}"


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
    print(f"{'ranks':>6} {'':24} {'build':7} {'messages':>9} {'sent GB':>8} {'weights':>8} {'state':>8}")
    for ranks in options.ranks:
        for rules, shard in [(options.rules[0], "none"), *((rules, "update") for rules in options.rules)]:
            rows.append(counted(options.layers, ranks, shard, rules, options.tokens))
            print(line(rows[-1]), flush=True)
        for row in others(rows[-1]["elements"], ranks):
            rows.append(row)
            print(line(row), flush=True)
    options.device, options.threads = "cpu", 1
    write_results(options.json, "scale", options, rows)


if __name__ == "__main__":
    main()
