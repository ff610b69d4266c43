"""A small GPT trained on text with its products in FP8, beside BF16 and beside a way that fails.

    python benchmarks/fp8.py                # 3 seeds, 200 steps each, under 8 minutes of one core
    python benchmarks/fp8.py --seeds 1 --steps 20 --rules bf16 fp8

The text is the source of Python's standard library, byte by byte; the model is that of `examples/train_gpt.py`, its
output layer in 16 bits. Every way sees the same batches. The loss on what is held back is that of the weights, in FP32.
`unscaled` has gradients in E4M3 with the scale 1: what delayed scaling does whose magnitudes are forgotten.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from measuring import RESULTS, write_results
from torch import Tensor

import amp_compiler as amp
from amp_compiler.fx.alias import AliasGroups
from amp_compiler.fx.meta import Key

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import train_gpt as gpt

HEAD = {"match": {"module": "head"}, "precision": "low"}
UNSCALED = {
    "match": {"op": "aten.linear"},
    "precision": "low",
    "math": "fp8",
    "backward": {"math": {"scaling": "delayed", "format": "e4m3"}},
}
RULES: dict[str, dict[str, Any]] = {
    "bf16": {"version": 1, "extends": "default"},
    **{
        name: {"version": 1, "extends": name, "rules": [HEAD]}
        for name in ("fp8", "fp8-delayed", "fp8-rowwise", "mxfp8")
    },
    "unscaled": {"version": 1, "extends": "default", "rules": [UNSCALED, HEAD]},
}
HELD_BACK = 32  # batches


def text() -> tuple[Tensor, Tensor]:
    """What is trained on, and what is held back: modules of the standard library, by the letters of ASCII."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    every = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)
    every = every.clamp(max=127).long()
    at = len(every) * 9 // 10
    return every[:at], every[at:]


def kept_bytes(step: amp.TrainingStep) -> int:
    """Bytes of what the forward makes and the backward reads."""
    graph = step.graph_module.graph
    groups, sizes = AliasGroups(graph), {}
    for node in graph.nodes:
        forward = node.op == "call_function" and node.meta.get(Key.PHASE) == "forward"
        if forward and any(user.meta.get(Key.PHASE) == "backward" for user in node.users):
            root = groups.root(node)
            if root.op == "call_function" and isinstance(root.meta["val"], Tensor):
                sizes[root] = root.meta["val"].numel() * root.meta["val"].dtype.itemsize
    return sum(sizes.values())


def trained(name: str, seed: int, steps: int, texts: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """One run: the last losses, that of what is held back, and what the step casts and keeps."""
    torch.manual_seed(seed)
    model = gpt.GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, 4e-4)
    step = amp.training_step(model, gpt.loss_fn, optimizer, rules=RULES[name], dtype="bf16", backend="eager")
    start, forgotten = time.process_time(), None
    for number in range(steps):
        step(*gpt.windows(texts[0], seed * steps + number))
        schedule.step()
        if name == "unscaled":
            forgotten = forgotten or _without_magnitudes(step)
            step.load_state_dict(forgotten)
    with torch.no_grad():
        held_back = [float(gpt.loss_fn(model, *gpt.windows(texts[1], -number))) for number in range(1, HELD_BACK + 1)]
    return {
        "rules": name,
        "seed": seed,
        "loss": statistics.mean(held_back),
        "seconds": time.process_time() - start,
        "cast_bytes": step.plan.cast_bytes,
        "kept_bytes": kept_bytes(step),
    }


def _without_magnitudes(step: amp.TrainingStep) -> dict[str, Any]:
    state = step.state_dict()
    magnitudes = state["amp_compiler"]["amaxes"]
    nothing = {key: [[1.0] + [0.0] * (len(row) - 1) for row in rows] for key, rows in magnitudes.items()}
    return {**state, "amp_compiler": {**state["amp_compiler"], "amaxes": nothing}}


def compared(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each rules the losses, their mean, and how many standard errors of BF16's mean that is off BF16's."""
    losses: dict[str, list[float]] = {}
    for run in runs:
        losses.setdefault(run["rules"], []).append(run["loss"])
    bf16 = losses["bf16"]
    error = statistics.stdev(bf16) / math.sqrt(len(bf16)) if len(bf16) > 1 else math.nan
    first = {run["rules"]: run for run in reversed(runs)}
    rows = []
    for name, of in losses.items():
        mean = statistics.mean(of)
        sizes = {key: first[name][key] for key in ("cast_bytes", "kept_bytes")}
        off = (mean - statistics.mean(bf16)) / error
        rows.append({"rules": name, "losses": of, "loss": mean, "error": error, "errors_off": off, **sizes})
    return rows


def main() -> None:
    """Train, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", nargs="+", default=list(RULES), choices=list(RULES), help="bf16 among them")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path, default=RESULTS / "fp8.json", help="where the numbers go")
    options = parser.parse_args()
    torch.set_num_threads(1)
    texts, runs = text(), []
    for seed in range(options.seeds):
        for name in options.rules:
            runs.append(trained(name, seed, options.steps, texts))
            print(f"{name:12} seed {seed} {runs[-1]['loss']:.4f} in {runs[-1]['seconds']:.0f} s", flush=True)
    rows = compared(runs)
    for row in rows:
        print(f"{row['rules']:12} {row['loss']:.4f} {row['errors_off']:+.2f} standard errors of {row['error']:.4f}")
    options.device, options.threads = "cpu", 1
    write_results(options.json, "fp8", options, rows)


if __name__ == "__main__":
    main()
