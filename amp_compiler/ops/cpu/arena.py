"""Memory for the intermediate values of a compiled step on a CPU, laid out once and used by every call.

A compiled graph asks for the same buffers in the same order at each call. From the system's allocator they come as
pages that were given back after the last call, and that the kernel maps and clears again one by one. Here the first
call is watched; from the second on each buffer is a tensor at a fixed place in one block of memory. All programs of a
training step share it, because they run one after another.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Sizes = tuple[int, ...]
Allocate = Callable[[Sizes, Sizes, torch.dtype], Tensor]
_ALIGNMENT = 64  # bytes, as torch's own CPU allocations
LEAST = 1 << 20  # bytes
_CURRENT = threading.local()


@dataclass(frozen=True)
class Span:
    """How long a buffer is in use.

    Args:
        size: bytes.
        born: number of the request that it answers.
        died: number of the first request after its last use.
    """

    size: int
    born: int
    died: int


def lay_out(spans: Sequence[Span]) -> tuple[list[int], int]:
    """Offsets at which buffers that are in use at the same time do not overlap, and the bytes needed in all.

    The largest buffer is placed first, each in the smallest gap that it fits into (Pisarchyk and Lee, "Efficient Memory
    Management for Deep Neural Net Inference", 2020, greedy by size).

    Example:
        >>> lay_out([Span(64, 0, 2), Span(128, 1, 3), Span(64, 2, 3)])
        ([128, 0, 128], 192)
    """
    offsets = [0] * len(spans)
    placed: list[int] = []
    for number in sorted(range(len(spans)), key=lambda one: (-spans[one].size, one)):
        span = spans[number]
        taken = sorted(
            (offsets[other], offsets[other] + spans[other].size)
            for other in placed
            if spans[other].born < span.died and span.born < spans[other].died
        )
        best, tightest, end = None, None, 0
        for start, stop in taken:
            if span.size <= start - end and (tightest is None or start - end < tightest):
                best, tightest = end, start - end
            end = max(end, stop)
        offsets[number] = end if best is None else best
        placed.append(number)
    return offsets, max((offsets[n] + span.size for n, span in enumerate(spans)), default=0)


class ArenaMemory:
    """One block of memory, as large as the largest program that has asked for it."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._plans: weakref.WeakSet[_Plan] = weakref.WeakSet()

    def at_least(self, size: int, plan: _Plan) -> Tensor:
        """The block, for a plan; a new one where the old one is too small, which no plan holds on to then."""
        self._plans.add(plan)
        if self._block.numel() < size:
            for one in self._plans:
                one.forget()
            self._block = torch.empty(0, dtype=torch.uint8)  # gone before the next one comes
            self._block = torch.empty(size, dtype=torch.uint8)
        return self._block


class ArenaRun:
    """Runs a compiled step with its buffers in an arena.

    Args:
        run: the compiled step; its graph asks `allocator` for memory.
        kept: number of leading outputs that outlive the next call. The other outputs are overwritten by it.
        memory: where the buffers lie. Calls that share it must come one after another, as those of a training step do.
        least: bytes from which on an arena is made. The system serves fewer as fast, and lets others have them between.
    """

    def __init__(self, run: Callable[..., Sequence[Any]], kept: int, memory: ArenaMemory, least: int = LEAST) -> None:
        self._run, self._kept, self._memory, self._least = run, kept, memory, least
        self._plan: _Plan | None = None
        self._needless = False

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        """The outputs of the step. Within another such call it runs on ordinary memory."""
        if getattr(_CURRENT, "serve", None) is not None:
            return self._run(*inputs)
        if self._plan is not None:
            with _serving(self._plan.server(self._memory)):
                return self._run(*inputs)
        if self._needless:
            return self._run(*inputs)
        watch = _Watch()
        with _serving(watch):
            outputs = self._run(*inputs)
        plan = _Plan(watch, outputs[: self._kept])
        self._needless = plan.size < self._least
        self._plan = None if self._needless else plan
        return outputs


def allocator(fallback: Allocate) -> Allocate:
    """An allocator for compiled graphs: by the arena of the call that is running in this thread, else by `fallback`."""

    def allocate(size: Sizes, stride: Sizes, dtype: torch.dtype) -> Tensor:
        serve = getattr(_CURRENT, "serve", None)
        return fallback(size, stride, dtype) if serve is None else serve.take(fallback, size, stride, dtype)

    return allocate


@contextmanager
def _serving(source: Any) -> Iterator[None]:
    """Makes something the source of buffers in this thread."""
    before, _CURRENT.serve = getattr(_CURRENT, "serve", None), source
    try:
        yield
    finally:
        _CURRENT.serve = before


class _Watch:
    """Hands out ordinary tensors and notes how long their memory lives."""

    def __init__(self) -> None:
        self.requests: list[tuple[Sizes, Sizes, torch.dtype]] = []
        self.places: list[tuple[int, int]] = []  # address and bytes
        self.died: dict[int, int] = {}

    def take(self, fallback: Allocate, size: Sizes, stride: Sizes, dtype: torch.dtype) -> Tensor:
        number, tensor = len(self.requests), fallback(size, stride, dtype)
        storage = tensor.untyped_storage()
        self.requests.append((tuple(size), tuple(stride), dtype))
        self.places.append((storage.data_ptr(), storage.nbytes()))
        weakref.finalize(storage, self._ends, number).atexit = False
        return tensor

    def _ends(self, number: int) -> None:
        self.died[number] = len(self.requests)


class _Plan:
    """Where each buffer of a call lies."""

    def __init__(self, watch: _Watch, kept: Iterable[Any]) -> None:
        outlive = {value.untyped_storage().data_ptr() for value in kept if isinstance(value, Tensor)}
        end = len(watch.requests)
        self.requests = watch.requests
        self.managed = [
            number
            for number, (address, size) in enumerate(watch.places)
            if size > 0 and (number in watch.died or address not in outlive)
        ]
        spans = [
            Span(-(-watch.places[number][1] // _ALIGNMENT) * _ALIGNMENT, number, watch.died.get(number, end))
            for number in self.managed
        ]
        offsets, self.size = lay_out(spans)
        self.offsets = dict(zip(self.managed, offsets, strict=True))
        self._tensors: list[Tensor | None] = []
        self._block: Tensor | None = None

    def forget(self) -> None:
        """Let go of the block."""
        self._tensors, self._block = [], None

    def server(self, memory: ArenaMemory) -> _Server:
        """What hands out the buffers of one call."""
        block = memory.at_least(self.size, self)
        if block is not self._block:
            self._block = block
            self._tensors = [
                _tensor_at(block, self.offsets[number], *request) if number in self.offsets else None
                for number, request in enumerate(self.requests)
            ]
        return _Server(self.requests, self._tensors)


def _tensor_at(block: Tensor, offset: int, size: Sizes, stride: Sizes, dtype: torch.dtype) -> Tensor:
    tensor = torch.empty(0, dtype=dtype)
    return tensor.set_(block.untyped_storage(), offset // dtype.itemsize, size, stride)  # type: ignore[call-overload, no-any-return]


class _Server:
    """Hands out the buffers of one call, as long as it asks as the watched one did."""

    def __init__(self, requests: Sequence[tuple[Sizes, Sizes, torch.dtype]], tensors: Sequence[Tensor | None]) -> None:
        self._requests, self._tensors, self._next = requests, tensors, 0

    def take(self, fallback: Allocate, size: Sizes, stride: Sizes, dtype: torch.dtype) -> Tensor:
        number = self._next
        self._next += 1
        if number >= len(self._requests) or self._requests[number] != (size, stride, dtype):
            self._next = len(self._requests)  # another way through the graph: from here on nothing is known
            return fallback(size, stride, dtype)
        tensor = self._tensors[number]
        if tensor is None:
            return fallback(size, stride, dtype)
        return tensor.detach()  # its own tensor, whose shape a graph may change
