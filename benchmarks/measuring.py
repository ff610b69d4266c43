"""How the benchmarks measure: taking turns, medians, memory and first call in a process of its own, results files."""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from machine import machine_facts
from torch import nn

from amp_compiler.files import write_atomically

RESULTS = Path(__file__).parent / "results"
TORCH_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CACHE = "TORCHINDUCTOR_CACHE_DIR"
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}  # freed tensors leave the process
_WARM_UPS = 3
_FEWEST = 5  # rounds that are timed, however long they take

Spread = tuple[float, float, float]


class Measured(Protocol):
    """What is measured: call it for one step. `idle` frees what a user's loop would free between steps."""

    def __call__(self) -> object: ...

    def idle(self) -> None: ...


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


def spread(values: Sequence[float]) -> Spread:
    """Median, 10% and 90% quantile."""
    tenths = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else [values[0]] * 9
    return statistics.median(values), tenths[0], tenths[-1]


class Gemm:
    """One large matrix product, which shows how fast the device multiplies.

    Args:
        dtype: a key of `TORCH_TYPES`. On a CPU FP16 is measured as FP32, which is what such a product runs in there.
        device: `cpu` or `cuda`.
    """

    def __init__(self, dtype: str, device: str) -> None:
        self.dtype = "fp32" if (dtype, device) == ("fp16", "cpu") else dtype
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


@dataclass(frozen=True)
class Memory:
    """What one variant needs, measured in a process of its own.

    Args:
        first_call_s: seconds of the first step, compilation included, without a cache of compiled code. What any
            first compilation in a process costs (imports, precompiled headers) is not in it.
        state_bytes: bytes of all tensors that are alive between two steps.
        growth_bytes: by how much a step exceeds that at its worst moment.
    """

    first_call_s: float
    state_bytes: int
    growth_bytes: int

    @property
    def peak_bytes(self) -> int:
        return self.state_bytes + self.growth_bytes


def apart(script: str, arguments: Sequence[str], cache: Path) -> Memory:
    """Run a script in a process of its own; its last line of output is the JSON of a `Memory`.

    Args:
        script: path of the script.
        arguments: of its command line.
        cache: empty folder for compiled code, so that nothing is taken over from another variant.

    Raises:
        SystemExit: where it fails, with the end of what it said.
    """
    environment = {**os.environ, **MALLOC, CACHE: str(cache)}
    command = [sys.executable, script, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)}: {done.stderr[-2000:]}")
    return Memory(**json.loads(done.stdout.splitlines()[-1]))


def start_compiler(device: str) -> None:
    """Compile something trivial, which pays what the first compilation costs whatever is compiled."""
    torch.compile(lambda x: torch.relu(x) + 1)(torch.ones(64, device=device))
    torch._dynamo.reset()


def measure_memory(step: Measured, device: str) -> Memory:
    """Run a few steps. On a CPU the growth is that of the process's resident pages (VmHWM), else of the allocator."""
    start = time.perf_counter()
    step()
    synchronize(device)
    first = time.perf_counter() - start
    for _ in range(3):
        step()
    step.idle()
    gc.collect()
    state = _live_bytes()
    if device == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        synchronize(device)
        return Memory(first, state, torch.cuda.max_memory_allocated() - before)
    return Memory(first, state, statistics.median_low([_resident_growth(step) for _ in range(3)]))


def _resident_growth(step: Measured) -> int:
    step.idle()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # sets VmHWM back to VmRSS
    before = _status("VmRSS")
    step()
    return _status("VmHWM") - before


def _status(key: str) -> int:
    found = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    return 1024 * int(found[1]) if found else 0


def _live_bytes() -> int:
    storages = {}
    for item in gc.get_objects():
        if type(item) in (torch.Tensor, nn.Parameter) and item.layout is torch.strided:
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def add_arguments(parser: argparse.ArgumentParser, models: Iterable[str], default: Iterable[str]) -> None:
    """The options that all of these benchmarks have, except `--dtype`."""
    parser.add_argument("--models", nargs="+", choices=list(models), default=list(default), metavar="NAME")
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
    settings = {key: getattr(options, key) for key in ("dtype", "device", "steps", "threads")}
    facts = {"benchmark": benchmark, **machine_facts(options.device), "settings": settings, "rows": rows}
    write_atomically(path, json.dumps(facts, indent=1) + "\n")


def coloured(ratio: float) -> str:
    """A ratio, green where it is at most 1."""
    return f"[{'green' if ratio <= 1.0 else 'red'}]{ratio:.2f}[/]"
