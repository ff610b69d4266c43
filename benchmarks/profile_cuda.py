"""Where the time of a training step on a GPU goes: kernels, and the gaps between them, by class, over 20 steps.

Each side runs in a process of its own: ours, torch.compile with CUDA graphs, and ours once more for every setting that
is given. A step's time is that of bursts of 20 steps without a profiler. Under the profiler, a class's time is that in
which one of its kernels runs, and a gap is counted to the class of the kernel that ends it: before it nothing ran. All
sides share a cache of compiled code.

    python benchmarks/profile_cuda.py gpt2 combo_kernels=True coordinate_descent_tuning=True

A setting is one of `torch._inductor.config`, or behind `step.` an argument of `amp.training_step`.
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import cases
import measuring
import torch
from comparison import OURS, compiled_name
from processes import CACHE
from rich.console import Console
from rich.table import Table
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from train_step_runs import Variant

STEPS = 20
_WARM_UPS, _BURSTS = 12, 5
THEIRS = compiled_name("reduce-overhead")
# The first class with a part of a kernel's name gets it.
CLASSES = {
    "check and update": ("adam_kernel", "sgd_kernel", "_prepare_kernel", "advance_kernel", "check_kernel",
                         "check_finish_kernel", "commit_kernel", "multi_tensor_apply", "FusedAdam", "amp_non_finite"),
    "attention": ("flash", "fmha", "sdpa", "attention"),
    "convolutions": ("conv", "cudnn", "fprop", "dgrad", "wgrad", "implicit", "RNN_", "LSTM", "rnn_"),
    "matrix products": ("gemm", "nvjet", "cutlass", "cublas", "wgmma", "gemv", "splitK", "triton_tem"),
    "copies and fills": ("Memcpy", "Memset", "memcpy", "memset", "CatArray", "FillFunctor"),
    "reductions": ("triton_red", "triton_per", "triton_mix", "reduce", "softmax", "norm"),
    "loops": ("triton_poi", "triton_for", "elementwise", "index", "embedding", "scatter", "gather"),
}  # fmt: skip
REST = "the rest"


@dataclass(frozen=True)
class Kernel:
    """One kernel, copy or fill that ran: name, and when in microseconds."""

    name: str
    start: float
    end: float


@dataclass
class Share:
    """What a class has of a step: how many kernels, and microseconds in them and in the gaps before them."""

    kernels: float = 0.0
    busy_us: float = 0.0
    gap_us: float = 0.0


def classify(name: str) -> str:
    """The class of a kernel."""
    return next((kind for kind, parts in CLASSES.items() if any(part in name for part in parts)), REST)


def shares(kernels: Sequence[Kernel], steps: int) -> dict[str, Share]:
    """What each class has of a step; time in which several kernels run is the one's that began first.

    Args:
        kernels: of `steps` steps.
        steps: in a row.
    """
    found: dict[str, Share] = {}
    done = min((one.start for one in kernels), default=0.0)
    for one in sorted(kernels, key=lambda one: (one.start, one.end)):
        share = found.setdefault(classify(one.name), Share())
        share.kernels += 1 / steps
        share.gap_us += max(0.0, one.start - done) / steps
        share.busy_us += max(0.0, one.end - max(one.start, done)) / steps
        done = max(done, one.end)
    return found


def settings_of(given: str) -> tuple[str, Any]:
    """Name and value of a setting as it was given: `combo_kernels=True`."""
    name, _, value = given.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


def run(variant: str, name: str, bound: str, dtype: str, setting: str) -> dict[str, Any]:
    """One side, in the process that it is called in."""
    warnings.filterwarnings("ignore")
    arguments: dict[str, Any] = {}
    if setting:
        key, value = settings_of(setting)
        if key.startswith("step."):
            arguments[key.removeprefix("step.")] = value
        else:
            _set(key, value)
    step = Variant(variant, name, bound, dtype, "cuda", **arguments)
    for _ in range(_WARM_UPS):
        step()
    times = measuring.spread([measuring.burst(step, STEPS) for _ in range(_BURSTS)])
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    kernels = [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in recorded.events()
        if event.device_type == DeviceType.CUDA
    ]
    return {
        "step_ms": times[0],
        "step_ms_10": times[1],
        "step_ms_90": times[2],
        "classes": {kind: vars(share) for kind, share in shares(kernels, STEPS).items()},
    }


def _set(name: str, value: Any) -> None:
    from torch._inductor import config

    holder, _, last = name.rpartition(".")
    place = config
    for part in holder.split(".") if holder else ():
        place = getattr(place, part)
    if not hasattr(place, last):
        raise SystemExit(f"torch {torch.__version__} has no setting torch._inductor.config.{name}")
    setattr(place, last, value)


def side(name: str, bound: str, dtype: str, variant: str, setting: str) -> dict[str, Any]:
    """A row: one side in a process of its own."""
    pool = ProcessPoolExecutor(1, get_context("spawn"))
    try:
        found = pool.submit(run, variant, name, bound, dtype, setting).result()
    finally:
        pool.shutdown(wait=False)  # who interrupts gets the table, however long it compiles
    return {"model": name, "bound": bound, "variant": variant, "setting": setting} | found


def table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """One line per class, and for every side kernels, microseconds and gaps."""
    made = Table(title=title, title_justify="left")
    made.add_column("class", no_wrap=True)
    for row in rows:
        made.add_column(f"{row['setting'] or row['variant']}\nkernels", justify="right")
        made.add_column("\nµs", justify="right")
        made.add_column("gaps\nµs", justify="right")
    kinds = [kind for kind in (*CLASSES, REST) if any(kind in row["classes"] for row in rows)]
    empty = vars(Share())
    for kind in kinds:
        parts = [row["classes"].get(kind, empty) for row in rows]
        made.add_row(kind, *(text for part in parts for text in _texts(part)))
    totals = [{key: sum(part[key] for part in row["classes"].values()) for key in empty} for row in rows]
    made.add_section()
    made.add_row("all", *(text for part in totals for text in _texts(part)))
    made.add_row("a step, ms", *(text for row in rows for text in ("", f"{row['step_ms']:.2f}", "")))
    return made


def _texts(part: dict[str, float]) -> tuple[str, str, str]:
    return f"{part['kernels']:.0f}", f"{part['busy_us']:,.0f}", f"{part['gap_us']:,.0f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 where a side failed, or the profiler saw no kernels."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("given", nargs="*", metavar="MODEL | SETTING=VALUE", help="one model (gpt2) and any settings")
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--bound", choices=("gemm", "update"), default=cases.LARGE)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    options.device, options.steps, options.threads = "cuda", STEPS, torch.get_num_threads()
    names = [one for one in options.given if "=" not in one] or ["gpt2"]
    settings = [one for one in options.given if "=" in one]
    if len(names) > 1 or names[0] not in (*cases.names("cuda"), *cases.SHAPES):
        parser.error(f"one of the models {', '.join(cases.names('cuda'))}, and settings such as combo_kernels=True")
    sides = [(OURS, ""), (THEIRS, ""), *((OURS, setting) for setting in settings)]
    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    wanted = [setting or variant for variant, setting in sides]
    try:
        with tempfile.TemporaryDirectory() as cache:
            os.environ.setdefault(CACHE, cache)
            for variant, setting in sides:
                try:
                    rows.append(side(names[0], options.bound, options.dtype, variant, setting))
                except Exception as cause:  # noqa: BLE001 - whatever it is, the other sides are measured
                    failed.append(f"{setting or variant}: {type(cause).__name__}: {str(cause).splitlines()[0]}")
                measuring.write_results(options.json, "profile_cuda", options, rows)
                del wanted[0]
    finally:
        failed += [f"{one}: not measured, or not to its end" for one in wanted]
        title = f"{names[0]}, {options.bound}, {options.dtype}: a step by class of kernel"
        Console(width=60 + 40 * len(rows)).print(table(rows, title))
        print(*failed, sep="\n", end="\n" if failed else "")
    silent = [row["setting"] or row["variant"] for row in rows if not row["classes"]]
    if silent:
        print(f"the profiler saw no kernels of {', '.join(silent)}")
    return 1 if failed or silent else 0


if __name__ == "__main__":
    sys.exit(main())
