"""Where the time of a training step on a CPU goes, by class of kernel, for `torch.compile` and for ours.

Both sides run BF16 with fused AdamW, each in a process of its own, and take turns of a few steps, of which the first
does not count. A class's time is that of its operators alone, under a profiler, in a few more steps of every turn; the
step's is without one; both are medians, and what is left of the step is `the rest`. Page faults are those of a step
without a profiler. `train_step.py` has more steps, and the times that count.

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
_WARM_UPS, _TURN, _PROFILED = 4, 5, 2
# The first class with a part of an operator's name gets its time; own time, without what it calls.
CLASSES = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "_linear_pointwise", "aten::linear"),
    "convolutions": ("convolution", "amp_compiler::patches", "amp_compiler::fold_patches"),
    "pooling": ("max_pool", "aten::scatter_reduce"),
    "attention": ("scaled_dot_product", "flash_attention", "attention_backward"),
    "LSTM": ("rnn_layer", "lstm_", "amp_compiler::recurrent_"),
    "check and update": ("_fused_adamw_", "amp_compiler::grad_check", "amp_compiler::adam_update"),
    "compiled loops": ("CompiledFxGraph",),
    "copies and fills": ("aten::copy_", "aten::fill_", "aten::zero_", "aten::clone", "_foreach_copy_"),
}
REST = "the rest"
Turn = tuple[list[float], int, dict[str, float]]  # milliseconds of steps, their page faults, milliseconds by class


def classify(name: str) -> str:
    """The class of an operator."""
    return next((kind for kind, parts in CLASSES.items() if any(part in name for part in parts)), REST)


class Apart:
    """A variant in a process of its own, made there. A context manager: the process ends with its block."""

    def __init__(self, name: str, bound: str, variant: str, threads: int) -> None:
        context = get_context("spawn")
        self._pool = ProcessPoolExecutor(1, context, _begin, (variant, name, bound, threads))

    def __enter__(self) -> Apart:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()

    def times(self, steps: int) -> tuple[list[float], int]:
        """Milliseconds of that many steps in a row, and their page faults; of one step before them neither."""
        return self._pool.submit(_times, steps).result()

    def classes(self) -> dict[str, float]:
        """Milliseconds of a step by class, of a few steps in a row."""
        return self._pool.submit(_classes, _PROFILED).result()


_steps: list[Variant] = []  # of such a process: its variant


def _begin(variant: str, name: str, bound: str, threads: int) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(threads)
    _steps.append(Variant(variant, name, bound, "bf16", "cpu"))
    for _ in range(_WARM_UPS):
        _steps[0]()


def _times(steps: int) -> tuple[list[float], int]:
    _steps[0]()
    times = []
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(steps):
        start = time.perf_counter()
        _steps[0]()
        times.append(1000 * (time.perf_counter() - start))
    return times, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults


def _classes(steps: int) -> dict[str, float]:
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        for _ in range(steps):
            _steps[0]()
    classes = dict.fromkeys(CLASSES, 0.0)
    for event in recorded.key_averages():
        kind = classify(event.key)
        if kind in classes:
            classes[kind] += event.self_cpu_time_total / 1000 / steps
    return classes


def measure(name: str, bound: str, steps: int, threads: int) -> list[dict[str, Any]]:
    """A row for each side, with milliseconds per step and class.

    Args:
        name: a key of `cases.SHAPES`.
        bound: one of `BOUNDS`.
        steps: that are timed, in turns.
        threads: of each side.
    """
    with Apart(name, bound, COMPILED, threads) as theirs, Apart(name, bound, OURS, threads) as ours:
        sides = {COMPILED: theirs, OURS: ours}
        turns: dict[str, list[Turn]] = {variant: [] for variant in sides}
        for _ in range(-(-steps // _TURN)):
            for variant, side in sides.items():
                turns[variant].append((*side.times(_TURN), side.classes()))
    facts = {"model": name, "bound": bound}
    return [facts | {"variant": variant} | _medians(taken) for variant, taken in turns.items()]


def _medians(turns: list[Turn]) -> dict[str, Any]:
    times = [one for turn, _, _ in turns for one in turn]
    step = statistics.median(times)
    classes = {kind: statistics.median(by_class[kind] for _, _, by_class in turns) for kind in turns[0][2]}
    classes[REST] = max(0.0, step - sum(classes.values()))
    faults = sum(faults for _, faults, _ in turns) / len(times)
    return {"step_ms": step, "page_faults": round(faults), "classes_ms": classes}


def table(rows: list[dict[str, Any]]) -> Table:
    """One row per model, batch and variant."""
    kinds = [*CLASSES, REST]
    heads = ("model", "bound by", "variant", "step", "page\nfaults", *kinds)
    printed = Table(*heads, title="milliseconds of a step by class of kernel")
    for row in rows:
        parts = [f"{row['classes_ms'][kind]:.1f}" for kind in kinds]
        faults = f"{row['page_faults']:,}"
        printed.add_row(row["model"], row["bound"], row["variant"], f"{row['step_ms']:.1f}", faults, *parts)
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
            rows += measure(name, bound, options.steps, options.threads)
        measuring.write_results(path, "profile_step", options, rows)
    Console(width=170).print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
