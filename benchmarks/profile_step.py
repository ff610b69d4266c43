"""Where the time of a training step on a CPU goes, by class of kernel, for `torch.compile` and for ours.

`python benchmarks/profile_step.py` prints one table and writes results/profile_cpu.json. Both sides run BF16 with fused
AdamW. What a profiler adds falls on both; `train_step.py` has the times that count.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import cases
import measuring
import torch
from comparison import COMPILED, OURS
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile
from train_step_runs import Variant

BOUNDS = ("gemm", "update")
_WARM_UPS, _PROFILED = 4, 5
# The first class with a part of an operator's name gets its time; own time, without what it calls.
CLASSES = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "_linear_pointwise", "aten::linear"),
    "convolutions": ("convolution",),
    "attention": ("scaled_dot_product", "flash_attention"),
    "LSTM": ("rnn_layer", "lstm_"),
    "check and update": ("_fused_adamw_", "amp_compiler::grad_check", "amp_compiler::adam_update"),
    "compiled loops": ("CompiledFxGraph",),
    "copies and fills": ("aten::copy_", "aten::fill_", "aten::zero_", "aten::clone"),
}
REST = "the rest"


def classify(name: str) -> str:
    """The class of an operator."""
    return next((kind for kind, parts in CLASSES.items() if any(part in name for part in parts)), REST)


def measure(name: str, bound: str, variant: str, steps: int) -> dict[str, Any]:
    """Milliseconds per step and class; the rest is what is left of the median step without a profiler."""
    step = Variant(variant, name, bound, "bf16", "cpu")
    for _ in range(_WARM_UPS):
        step()
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        times.append(1000 * (time.perf_counter() - start))
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        for _ in range(_PROFILED):
            step()
    classes = dict.fromkeys([*CLASSES, REST], 0.0)
    for event in recorded.key_averages():
        classes[classify(event.key)] += event.self_cpu_time_total / 1000 / _PROFILED
    median = statistics.median(times)
    classes[REST] = max(0.0, median - sum(time for kind, time in classes.items() if kind != REST))
    return {"model": name, "bound": bound, "variant": variant, "step_ms": median, "classes_ms": classes}


def table(rows: list[dict[str, Any]]) -> Table:
    """One row per model, batch and variant."""
    kinds = [*CLASSES, REST]
    printed = Table("model", "bound by", "variant", "step", *kinds, title="milliseconds of a step by class of kernel")
    for row in rows:
        parts = [f"{row['classes_ms'][kind]:.1f}" for kind in kinds]
        printed.add_row(row["model"], row["bound"], row["variant"], f"{row['step_ms']:.1f}", *parts)
    return printed


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    measuring.add_arguments(parser, cases.SHAPES, cases.NAMES)
    options = parser.parse_args(argv)
    options.dtype = "bf16"
    if options.device != "cpu":
        parser.error("this profile is for a CPU")
    warnings.filterwarnings("ignore")
    torch.set_num_threads(options.threads)
    path: Path | None = options.json
    if path is None and options.models == list(cases.NAMES):
        path = measuring.RESULTS / "profile_cpu.json"
    rows: list[dict[str, Any]] = []
    for name in options.models:
        for bound in BOUNDS:
            for variant in (COMPILED, OURS):
                torch._dynamo.reset()
                rows.append(measure(name, bound, variant, options.steps))
        measuring.write_results(path, "profile_step", options, rows)
    Console(width=170).print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
