"""What the benchmarks share: medians of calls or bursts in turn, the rate of a large product, options, results."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from machine import machine_facts

from amp_compiler.fx.torch_private.runtime import has_bf16_kernels
from amp_compiler.ir.files import write_atomically

RESULTS = Path(__file__).parent / "results"
TORCH_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_WARM_UPS = 3
_FEWEST = 5  # rounds that are timed, however long they take
_FEWEST_BURSTS = 3  # the same of bursts

Spread = tuple[float, float, float]


def synchronize(device: str) -> None:
    """Wait until the device has done all that it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def interleaved(
    variants: Mapping[str, Callable[[], object]], steps: int, device: str, seconds: float
) -> dict[str, Spread]:
    """Median, 10% and 90% quantile of the milliseconds of a step: one step of each variant in turn.

    Args:
        variants: what to call.
        steps: rounds that are timed; three more are not.
        device: `cpu` or `cuda`.
        seconds: after this time no new round begins, if at least five were timed.
    """
    times: dict[str, list[float]] = {variant: [] for variant in variants}
    end = time.perf_counter() + seconds
    for number in range(steps + _WARM_UPS):
        for variant, step in variants.items():
            synchronize(device)
            start = time.perf_counter()
            step()
            synchronize(device)
            if number >= _WARM_UPS:
                times[variant].append(1000 * (time.perf_counter() - start))
        if number + 1 >= _WARM_UPS + _FEWEST and time.perf_counter() > end:
            break
    return {variant: spread(values) for variant, values in times.items()}


def burst(step: Callable[[], object], count: int) -> float:
    """Milliseconds of one of `count` calls on a GPU, by its own clock: none of them waits for the one before."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(count):
        step()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / count


def interleaved_bursts(
    variants: Mapping[str, Callable[[], object]], bursts: int, length: int, seconds: float
) -> dict[str, Spread]:
    """Median, 10% and 90% quantile of the milliseconds of a step on a GPU, over bursts of each variant in turn.

    Args:
        variants: what to call.
        bursts: of each that are timed; one more, before them, is not.
        length: steps in a burst.
        seconds: after this time no new round begins, if at least three were timed.
    """
    times: dict[str, list[float]] = {variant: [] for variant in variants}
    end = time.perf_counter() + seconds
    for number in range(1 + bursts):
        for variant, step in variants.items():
            took = burst(step, length)
            times[variant] += [took] if number else []
        if number >= _FEWEST_BURSTS and time.perf_counter() > end:
            break
    return {variant: spread(values) for variant, values in times.items()}


def spread(values: Sequence[float]) -> Spread:
    """Median, 10% and 90% quantile."""
    tenths = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else [values[0]] * 9
    return statistics.median(values), tenths[0], tenths[-1]


class Gemm:
    """One large matrix product, which shows how fast the device multiplies.

    Args:
        dtype: a key of `TORCH_TYPES`. On a CPU FP16 is measured as FP32, which is what such a product runs in there,
            and so is BF16 where the CPU has no kernels for it.
        device: `cpu` or `cuda`.
    """

    def __init__(self, dtype: str, device: str) -> None:
        plain = device == "cpu" and (dtype == "fp16" or (dtype == "bf16" and not has_bf16_kernels()))
        self.dtype = "fp32" if plain else dtype
        size = self.side(device)
        self.sides = [torch.randn(size, size, device=device).to(TORCH_TYPES[self.dtype]) for _ in range(2)]

    @staticmethod
    def side(device: str) -> int:
        """Rows and columns of the matrices."""
        return 8192 if device == "cuda" else 2048

    @staticmethod
    def flops(device: str) -> int:
        """Floating-point operations of one product."""
        return 2 * Gemm.side(device) ** 3

    def __call__(self) -> torch.Tensor:
        return self.sides[0] @ self.sides[1]

    def idle(self) -> None:
        """Nothing is left over between two products."""


def add_arguments(parser: argparse.ArgumentParser, models: Iterable[str], default: Iterable[str] | None) -> None:
    """The options that all of these benchmarks have, except `--dtype`; without a default the models may be none."""
    chosen = None if default is None else list(default)
    parser.add_argument("--models", nargs="+", choices=list(models), default=chosen, metavar="NAME")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each variant")
    parser.add_argument("--seconds", type=float, default=40.0, help="no new round of steps begins after this time")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="where the numbers go; those of a default run go to results/")


def write_results(path: Path | None, benchmark: str, options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Write rows with the machine, the versions and the date; nothing is written where `path` is None."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    known = ("dtype", "device", "steps", "turn", "together", "least", "seconds", "threads")
    settings = {key: value for key in known if (value := getattr(options, key, None)) is not None}
    facts = {"benchmark": benchmark, **machine_facts(options.device), "settings": settings, "rows": rows}
    write_atomically(path, json.dumps(facts, indent=1) + "\n")


def coloured(ratio: float) -> str:
    """A ratio, green where it is at most 1."""
    return f"[{'green' if ratio <= 1.0 else 'red'}]{ratio:.2f}[/]"
