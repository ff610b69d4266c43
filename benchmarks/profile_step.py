"""Where the time of a training step on a CPU goes, by class of kernel, for `torch.compile` and for ours.

Both sides run BF16 with fused AdamW, one after the other, each in a process of its own. A class's time is that of its
operators alone, under a profiler; the step's is the median without one, and what is left of it is `the rest`. Page
faults are those of a step without a profiler. `train_step.py` has the times that count.

    python benchmarks/profile_step.py --models gpt2 --steps 10
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
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
    "convolutions": ("convolution", "amp_compiler::patches", "amp_compiler::fold_patches"),
    "pooling": ("max_pool", "aten::scatter_reduce"),
    "attention": ("scaled_dot_product", "flash_attention", "attention_backward"),
    "LSTM": ("rnn_layer", "lstm_"),
    "check and update": ("_fused_adamw_", "amp_compiler::grad_check", "amp_compiler::adam_update"),
    "compiled loops": ("CompiledFxGraph",),
    "copies and fills": ("aten::copy_", "aten::fill_", "aten::zero_", "aten::clone", "_foreach_copy_"),
}
REST = "the rest"


def classify(name: str) -> str:
    """The class of an operator."""
    return next((kind for kind, parts in CLASSES.items() if any(part in name for part in parts)), REST)


def measure(name: str, bound: str, variant: str, steps: int, threads: int) -> dict[str, Any]:
    """Milliseconds per step and class."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(threads)
    step = Variant(variant, name, bound, "bf16", "cpu")
    for _ in range(_WARM_UPS):
        step()
    times = []
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(steps):
        start = time.perf_counter()
        step()
        times.append(1000 * (time.perf_counter() - start))
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        for _ in range(_PROFILED):
            step()
    classes = dict.fromkeys([*CLASSES, REST], 0.0)
    for event in recorded.key_averages():
        classes[classify(event.key)] += event.self_cpu_time_total / 1000 / _PROFILED
    median = statistics.median(times)
    classes[REST] = max(0.0, median - sum(time for kind, time in classes.items() if kind != REST))
    facts = {"model": name, "bound": bound, "variant": variant}
    return facts | {"step_ms": median, "page_faults": round(faults / steps), "classes_ms": classes}


def table(rows: list[dict[str, Any]]) -> Table:
    """One row per model, batch and variant."""
    kinds = [*CLASSES, REST]
    printed = Table(
        "model",
        "bound by",
        "variant",
        "step",
        "page\nfaults",
        *kinds,
        title="milliseconds of a step by class of kernel",
    )
    for row in rows:
        parts = [f"{time:.1f}" for time in (row["step_ms"], *[row["classes_ms"][kind] for kind in kinds])]
        printed.add_row(
            row["model"], row["bound"], row["variant"], f"{row['step_ms']:.1f}", f"{row['page_faults']:,}", *parts
        )
    return printed


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    measuring.add_arguments(parser, cases.SHAPES, cases.NAMES)
    options = parser.parse_args(argv)
    options.dtype = "bf16"
    if options.device != "cpu":
        parser.error("this profile is for a CPU")
    path: Path | None = options.json
    if path is None and options.models == list(cases.NAMES):
        path = measuring.RESULTS / "profile_cpu.json"
    rows: list[dict[str, Any]] = []
    for name in options.models:
        for bound in BOUNDS:
            for variant in (COMPILED, OURS):
                with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as apart:
                    rows.append(apart.submit(measure, name, bound, variant, options.steps, options.threads).result())
        measuring.write_results(path, "profile_step", options, rows)
    Console(width=170).print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
