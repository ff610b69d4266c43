"""What a training step tells its callbacks: the numbers of every so many steps, by one copy to the host."""

from __future__ import annotations

import math
import re
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amp_compiler.errors import AmpError
from amp_compiler.ir.ranges import lost_in
from amp_compiler.ir.run_file import StepRecord
from amp_compiler.ops.exponents import BINS, INFINITE, LOWEST, NAN, ZERO, count_exponents
from amp_compiler.training.program import StepOutput

_PEAK = re.compile(rb"VmHWM:\s+(\d+) kB")  # the most that a process has held in memory
STEPS_KEY = "steps"  # of what a step's state_dict holds of its own
_HINT = "pass a list of them, such as callbacks=[amp.callbacks.JSONLines('run.jsonl', every=10)]"


class Callback(ABC):
    """Is told the numbers of every so many steps.

    Derive from it and write `on_step`. What that raises comes out of the call of the step, whose update is made by
    then, so that a callback can end a training. A callback must not call the step.

    Args:
        every: after how many updates of the weights it is told; skipped ones count. Steps between them are not read
            from, so that a GPU is waited for at these alone.

    Raises:
        AmpError: `every` is no whole number from 1 on.

    Example:
        >>> import torch, amp_compiler as amp
        >>> class Print(amp.callbacks.Callback):
        ...     def on_step(self, record):
        ...         print(f"{record.step}: {record.loss:.1f}")
        >>> model = torch.nn.Linear(4, 1)
        >>> step = amp.training_step(model, lambda m, x: 0 * m(x).mean(), torch.optim.SGD(model.parameters(), 0.1),
        ...                          dtype="bf16", backend="eager", callbacks=[Print(every=2)])
        >>> losses = [step(torch.ones(2, 4)) for _ in range(2)]
        2: 0.0
    """

    def __init__(self, every: int = 1) -> None:
        if type(every) is not int or every < 1:
            raise AmpError(f"every={every!r}", hint="pass a whole number of steps from 1 on")
        self.every = every

    @abstractmethod
    def on_step(self, record: StepRecord) -> None:
        """Take the numbers of a step.

        Args:
            record: plain numbers.
        """

    def close(self) -> None:  # noqa: B027  # there may be nothing to close
        """Let go of files. A callback that is told more afterwards opens them again."""


class StepLog:
    """Counts the steps of a training step, and reads the numbers of those that a callback wants.

    Args:
        callbacks: in the order in which they are told.
        dtype: short name of the low type.

    Attributes:
        steps: number of updates so far, skipped ones counted; 0 where nobody wants to know.

    Raises:
        AmpError: something else than callbacks is given.
    """

    def __init__(self, callbacks: Any, dtype: str) -> None:
        if isinstance(callbacks, (str, Mapping)) or not isinstance(callbacks, Sequence):
            raise AmpError(f"callbacks is a {type(callbacks).__name__}", hint=_HINT)
        wrong = [one for one in callbacks if not isinstance(one, Callback)]
        if wrong:
            shown = wrong[0].__name__ if isinstance(wrong[0], type) else f"a {type(wrong[0]).__name__}"
            raise AmpError(f"callbacks holds {shown}, which is no amp.callbacks.Callback", hint=_HINT)
        self._callbacks: tuple[Callback, ...] = tuple(callbacks)
        self._dtype = dtype
        self.steps = self._timed = 0
        self._since: float | None = None
        self._losses: list[Tensor] = []

    def note(
        self,
        output: StepOutput,
        updated: bool,
        scale: Callable[[], Tensor],
        skipped: Tensor,
        norm: Callable[[], Tensor],
        batch: bool = True,
    ) -> None:
        """Take notice of a call; nothing is read where no callback wants to know.

        Args:
            output: of the call.
            updated: whether the call ended an update, made or skipped, and did not only gather gradients.
            scale: gives the loss scale that it ran with, scalar on the device.
            skipped: number of skipped steps, scalar on the device.
            norm: gives the norm of the gradients, scalar on the device.
            batch: whether it ran one, and did not only use what was gathered.
        """
        if not self._callbacks:
            return
        due = [one for one in self._callbacks if (self.steps + 1) % one.every == 0]
        if due and batch:
            self._losses.append(output.loss)
        if not updated:
            return
        self.steps += 1
        self._timed += 1
        if due:
            record = self._read(output, scale(), skipped, norm())
            for one in due:
                one.on_step(record)
        elif self._since is None:  # the first call, which compiles
            self._since, self._timed = time.perf_counter(), 0

    def _read(self, output: StepOutput, scale: Tensor, skipped: Tensor, norm: Tensor) -> StepRecord:
        losses, self._losses = self._losses or [torch.full_like(output.norm, math.nan)], []
        single = _single(output.aux)
        on_device = {name: value for name, value in single.items() if isinstance(value, Tensor)}
        with torch.no_grad():
            parts = [torch.stack(losses).mean(), scale, skipped, norm, *on_device.values()]
            numbers = _together(parts, _exponents(output))
        now = time.perf_counter()
        milliseconds = None
        if self._since is not None and self._timed:
            milliseconds = 1000 * (now - self._since) / self._timed
        self._since, self._timed = now, 0
        loss, scaled, skips, length, *rest = numbers[:-BINS]
        zero, subnormal, infinite = shares(numbers[-BINS:], self._dtype)
        aux = single | dict(zip(on_device, rest, strict=True))
        return StepRecord(
            self.steps, time.time(), loss, scaled, int(skips), length, self._dtype, zero, subnormal, infinite,
            milliseconds, _memory(output.norm.device), aux,
        )  # fmt: skip

    def state_dict(self) -> dict[str, int]:
        """The number of steps, so that a run that is resumed goes on from it; nothing without callbacks."""
        return {STEPS_KEY: self.steps} if self._callbacks else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the number of steps of `state_dict`; one without it changes nothing.

        Raises:
            AmpError: it is no number.
        """
        steps = state.get(STEPS_KEY, self.steps)
        if type(steps) is not int or steps < 0:
            raise AmpError(f"the saved number of steps is {steps!r}", hint="save it with step.state_dict()")
        self.steps, self._losses = steps, []


def _exponents(output: StepOutput) -> Tensor:
    """The counts of the exponents of all gradients, as they stood in the step: [`BINS`] on their device."""
    gradients = [one if isinstance(one, Tensor) else one.tensor() for one in output.gradients]
    if not gradients:
        return torch.zeros(BINS, dtype=torch.int64, device=output.norm.device)
    return count_exponents([one.detach() for one in gradients]).sum(0)


def _together(scalars: Sequence[Tensor], behind: Tensor) -> list[float]:
    """All of them by one copy to the host."""
    exact = torch.float32 if behind.device.type == "mps" else torch.float64  # Metal has no FP64
    flat = [one.detach().reshape(1).to(behind.device, exact) for one in scalars]
    return torch.cat([*flat, behind.to(exact)]).cpu().tolist()  # type: ignore[no-any-return]


def _single(aux: Any) -> dict[str, Any]:
    """The single real numbers of a dict, by name."""
    if not isinstance(aux, Mapping):
        return {}
    numbers: dict[str, Any] = {}
    for name, value in aux.items():
        if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
            numbers[str(name)] = value
        elif isinstance(value, float) or (isinstance(value, int) and abs(value) <= sys.float_info.max):
            numbers[str(name)] = float(value)
    return numbers


def shares(counts: Sequence[float], dtype: str) -> tuple[float, float, float]:
    """Which fractions of all elements would be zero, subnormal, and infinite or NaN in a type.

    Args:
        counts: as `ops.exponents.count` counts.
        dtype: a key of `RANGES`.

    Example:
        >>> from amp_compiler.ops.exponents import count
        >>> shares(count(torch.tensor([0.0, 1e-9, 1e-6, 1.0])).tolist(), "fp16")
        (0.5, 0.25, 0.0)
    """
    total = sum(counts)
    if not total:
        return 0.0, 0.0, 0.0
    zero, subnormal, infinite = lost_in(dtype, counts[:ZERO], LOWEST)
    return (zero + counts[ZERO]) / total, subnormal / total, (infinite + counts[INFINITE] + counts[NAN]) / total


def _memory(device: torch.device) -> int | None:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    status = Path("/proc/self/status")  # of Linux
    peak = _PEAK.search(status.read_bytes()) if device.type == "cpu" and status.exists() else None
    return None if peak is None else 1024 * int(peak[1])
