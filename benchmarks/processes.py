"""A process of its own for every variant of a benchmark: first call, times of steps in turns with the others, memory.

Variants in one process would not be measured as their users have them: what one leaves in the heap spares the next its
page faults, and no two of them find the same room in the caches.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import math
import os
import re
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from measuring import Spread, burst, spread, synchronize
from torch import nn

CACHE = "TORCHINDUCTOR_CACHE_DIR"
_TRITON_CACHE = "TRITON_CACHE_DIR"
_SETTLING = 8  # steps on a GPU until all graphs are recorded: ours at the fifth, torch.compile's before
_FEWEST = 2  # rounds that are timed, however long they take, if so many are asked for
# With these a freed tensor leaves the process, so that resident pages are tensors.
FREEING = {f"MALLOC_{name}_": "65536" for name in ("MMAP_THRESHOLD", "MMAP_MAX", "TRIM_THRESHOLD")}


class Measured(Protocol):
    """What is measured: call it for one step. `idle` frees what a user's loop would free between steps."""

    def __call__(self) -> object: ...

    def idle(self) -> None: ...


@dataclass(frozen=True)
class Memory:
    """What one variant needs.

    Args:
        state_bytes: bytes of all tensors that are alive between two steps.
        growth_bytes: by how much a step exceeds that at its worst moment.
    """

    state_bytes: int
    growth_bytes: int

    @property
    def peak_bytes(self) -> int:
        return self.state_bytes + self.growth_bytes


class Process:
    """One variant in a process of its own, made and called once there. A context manager: it ends with its block.

    Several that are started without waiting make their first calls at the same time, until `wait` is called.

    Args:
        make: makes the variant from `arguments`; the process must be able to import it.
        arguments: for `make`, without the device, which comes last.
        device: `cpu` or `cuda`.
        prepare: called with the device before the variant is made, for what its first call is not to pay.
        cache: folder for compiled code, empty where nothing shall be taken over.
        settings: environment variables of the process.
        wait: whether to wait for the first call here.

    Raises:
        SystemExit: where the variant fails; its process has then said why.
    """

    def __init__(
        self,
        make: Callable[..., Measured],
        arguments: Sequence[str],
        device: str,
        prepare: Callable[[str], object] | None,
        cache: Path,
        settings: Mapping[str, str] | None = None,
        wait: bool = True,
    ) -> None:
        self._name = " ".join(arguments)
        context = get_context("spawn")
        self._connection, other = context.Pipe()
        how = (device, prepare, torch.get_num_threads())
        self._process = context.Process(target=_serve, args=(other, make, tuple(arguments), *how))
        with _environment({CACHE: str(cache), _TRITON_CACHE: str(cache / "triton"), **(settings or {})}):
            self._process.start()
        other.close()
        self.first_call_s: float = self.wait() if wait else math.nan

    def wait(self, until: float = math.inf) -> float:
        """Seconds of the first call, which is waited for until `time.perf_counter()` says `until`.

        Raises:
            SystemExit: where it fails, or is not done by then.
        """
        if not self._connection.poll(None if until == math.inf else max(0.0, until - time.perf_counter())):
            self._process.terminate()
            self._process.join()
            raise SystemExit(f"{self._name}: its first call was not done in time")
        self.first_call_s = self._answer()
        return self.first_call_s

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()
        self._end(0.0 if isinstance(error, KeyboardInterrupt) else 20.0)

    def _end(self, patience: float = 20.0) -> None:
        self._process.join(timeout=patience)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join()

    def times(self, steps: int) -> list[float]:
        """Milliseconds of that many steps in a row."""
        return self._answer("times", steps)  # type: ignore[no-any-return]

    def computing(self, steps: int) -> list[tuple[float, float]]:
        """Of each of that many steps in a row the milliseconds, and those that its threads computed together."""
        return self._answer("computing", steps)  # type: ignore[no-any-return]

    def burst(self, steps: int) -> float:
        """Milliseconds of a step in a row of them, the host running ahead: the time of a GPU between its two ends."""
        return self._answer("burst", steps)  # type: ignore[no-any-return]

    def memory(self) -> Memory:
        """Run a few steps for it; on a CPU in a process with the settings `FREEING`."""
        return self._answer("memory", 0)  # type: ignore[no-any-return]

    def _answer(self, *order: Any) -> Any:
        try:
            if order:
                self._connection.send(order)
            return self._connection.recv()
        except (EOFError, ConnectionError):
            self._end()
            raise SystemExit(f"{self._name}: its process ended with code {self._process.exitcode}") from None


def taking_turns(
    processes: Mapping[str, Process], steps: int, turn: int, seconds: float, least: float = 0.0
) -> dict[str, Spread]:
    """Median, 10% and 90% quantile of the milliseconds of a step, the processes taking turns.

    Args:
        processes: whose steps are timed.
        steps: of each that are timed, or more where they take less than `least` seconds.
        turn: steps in a row that are timed. One before them is not: it finds the caches full of another's data, which
            a run by itself does only once. Nor is the first round.
        seconds: after this time no new round begins, if at least two were timed.
        least: rounds go on this long, in seconds: a shared machine is fast and slow by turns, for some seconds each.
    """
    times: dict[str, list[float]] = {name: [] for name in processes}
    begin = time.perf_counter()
    for number in itertools.count():
        for name, process in processes.items():
            measured = process.times(1 + turn)[1:]
            times[name] += measured if number else []
        passed = time.perf_counter() - begin
        if (number * turn >= steps and passed >= least) or (number >= _FEWEST and passed > seconds):
            break
    return {name: spread(values) for name, values in times.items()}


@contextlib.contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for a process that is started meanwhile."""
    before = dict(os.environ)
    os.environ.update(settings)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _serve(
    connection: Connection,
    make: Callable[..., Measured],
    arguments: Sequence[str],
    device: str,
    prepare: Callable[[str], object] | None,
    threads: int,
) -> None:
    """What the process runs: answers orders until the other end is closed."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(threads)
    if prepare is not None:
        prepare(device)
    step = make(*arguments, device)
    connection.send(_timed(step, device) / 1000)
    with contextlib.suppress(EOFError):
        while True:
            order, count = connection.recv()
            connection.send(_ORDERS[order](step, device, count))


def _timed(step: Measured, device: str) -> float:
    synchronize(device)
    start = time.perf_counter()
    step()
    synchronize(device)
    return 1000 * (time.perf_counter() - start)


def _times(step: Measured, device: str, count: int) -> list[float]:
    return [_timed(step, device) for _ in range(count)]


def _computing(step: Measured, device: str, count: int) -> list[tuple[float, float]]:
    times = []
    for _ in range(count):
        before = time.process_time()
        times.append((_timed(step, device), 1000 * (time.process_time() - before)))
    return times


def _burst(step: Measured, device: str, count: int) -> float:
    return burst(step, count) if device == "cuda" else sum(_times(step, device, count)) / count


def _reserved(step: Measured) -> Memory:
    """What the allocator takes from a GPU, with what CUDA graphs keep; not what compiling needed before."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(_SETTLING):
        step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_reserved()
    step.idle()
    gc.collect()
    state = _live_bytes()
    return Memory(state, peak - state)


def _memory(step: Measured, device: str, _: int = 0) -> Memory:
    """On a CPU the growth is that of the process's resident pages (VmHWM), on a GPU that of what the allocator took."""
    if device == "cuda":
        return _reserved(step)
    for _ in range(3):
        step()
    step.idle()
    gc.collect()
    state = _live_bytes()
    return Memory(state, statistics.median_low([_resident_growth(step) for _ in range(3)]))


def _resident_growth(step: Measured) -> int:
    step.idle()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # sets VmHWM back to VmRSS
    before = _status("VmRSS")
    step()
    return _status("VmHWM") - before


def _status(key: str) -> int:
    match = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    return 1024 * int(match[1]) if match else 0


def _live_bytes() -> int:
    storages = {}
    for item in gc.get_objects():
        if type(item) in (torch.Tensor, nn.Parameter) and item.layout is torch.strided:
            with contextlib.suppress(NotImplementedError):  # what a transform of torch.func has left behind has none
                storage = item.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


_ORDERS: dict[str, Callable[[Measured, str, int], Any]] = {
    "times": _times,
    "computing": _computing,
    "memory": _memory,
    "burst": _burst,
}
