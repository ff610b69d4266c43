"""The last steps whose gradients were not finite: kept where the step runs, read when asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import compress
from typing import Any

import torch
from torch import Tensor

MOST = 16
_ROWS = MOST + 1

Run = Callable[..., Sequence[Any]]


@dataclass(frozen=True)
class NonfiniteEvent:
    """A step that was skipped.

    Args:
        step: the number of the update, from 1 on, those that were skipped counted.
        scale: the loss scale that it ran with.
        parameters: qualified names of the parameters whose gradient was not finite.
    """

    step: int
    scale: float
    parameters: tuple[str, ...]


class Events:
    """Keeps the last 16 of them, and never waits for the device.

    Every step is written into the row whose number is that of the steps skipped before it. As long as none is, the next
    step writes into the same row; one that is skipped moves the number, and its row stays. Where a look at the flags
    waits for nothing, on a CPU, only skipped steps are written.

    Args:
        device: where the flags are.

    Attributes:
        looks: whether only skipped steps are written.

    Example:
        >>> events, skipped = Events(torch.device("cpu")), torch.tensor(0)
        >>> def step(bad, skipped):
        ...     skipped.add_(bad[0])
        ...     return [bad]
        >>> run = events.watched(step, ("weight",), flags=0, skipped=1, scale=8.0)
        >>> for bad in (0, 1, 0):
        ...     _ = run(torch.tensor([bad], dtype=torch.uint8), skipped)
        >>> events.read()
        (NonfiniteEvent(step=2, scale=8.0, parameters=('weight',)),)
    """

    def __init__(self, device: torch.device) -> None:
        exact = torch.float32 if device.type == "mps" else torch.float64  # Metal has no FP64
        self._steps = torch.zeros(1, dtype=exact, device=device)
        self.looks = device.type == "cpu"
        self._tables: dict[tuple[str, ...], Tensor] = {}  # a row: number, loss scale, and a flag of each parameter

    def watched(self, run: Run, names: tuple[str, ...], *, flags: int, skipped: int, scale: int | float) -> Run:
        """The compiled graph of a step, with what takes note of each run: part of what a CUDA graph replays.

        Args:
            run: takes the placeholders' tensors; gives the results.
            names: of the parameters whose flags it gives.
            flags: which of its results are the flags, uint8 [number of parameters]: 1 where a gradient was not finite.
            skipped: which of its inputs is the number of steps skipped by now, INT64 scalar.
            scale: which of its results is the loss scale that it ran with, FP32 scalar; a number where that never
                changes.
        """
        new = self._steps.new_zeros(_ROWS, 2 + len(names))
        table = self._tables.setdefault(names, new)  # made before any capture

        @wraps(run, assigned=(), updated=())
        def noted(*inputs: Any) -> Sequence[Any]:
            results = run(*inputs)
            self._steps.add_(1)
            bad = results[flags]
            if not self.looks or bool(bad.any()):
                like = self._steps
                ran_with = results[scale].reshape(1).to(like) if isinstance(scale, int) else like.new_full((1,), scale)
                row = ((inputs[skipped] - bad.max()) % _ROWS).reshape(1)
                table.index_copy_(0, row, torch.cat([like, ran_with, bad.to(like)]).unsqueeze(0))
            return results

        return noted

    def go_on_from(self, steps: int) -> None:
        """Count the updates from another number on, that of a checkpoint.

        Args:
            steps: how many there were before the next one.
        """
        self._steps.fill_(steps)

    def read(self) -> tuple[NonfiniteEvent, ...]:
        """Those that were kept, the oldest first; this waits for the device."""
        events = [
            NonfiniteEvent(int(step), scale, tuple(compress(names, flags)))
            for names, table in self._tables.items()
            for step, scale, *flags in table.tolist()
            if any(flags)  # one row more than are kept: a step that was not skipped lies in one
        ]
        return tuple(sorted(events, key=lambda event: event.step)[-MOST:])
