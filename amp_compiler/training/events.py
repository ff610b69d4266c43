"""The last steps whose gradients were not finite: kept where the step runs, read when asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

MOST = 16


@dataclass(frozen=True)
class NonfiniteEvent:
    """A step that was skipped.

    Args:
        step: the number of the call, from 1 on.
        scale: the loss scale that it ran with.
        parameters: qualified names of the parameters whose gradient was not finite.
    """

    step: int
    scale: float
    parameters: tuple[str, ...]


class Events(Protocol):
    """Keeps the last 16 of them."""

    def note(self, step: int, names: tuple[str, ...], flags: Tensor, scale: Tensor | float, skipped: Tensor) -> None:
        """Take note of a step, finite or not.

        Args:
            step: number of the call.
            names: of the parameters.
            flags: uint8 [number of parameters]: 1 where the gradient was not finite.
            scale: the loss scale that it ran with.
            skipped: INT64 scalar: how many steps have been skipped by now.
        """

    def read(self) -> tuple[NonfiniteEvent, ...]:
        """Those that were kept, the oldest first."""


def events_on(device: torch.device) -> Events:
    """What keeps them for steps on a device."""
    return HostEvents() if device.type == "cpu" else DeviceEvents(device)


class HostEvents:
    """`Events` where looking at a flag waits for nothing: on a CPU."""

    def __init__(self) -> None:
        self._kept: deque[NonfiniteEvent] = deque(maxlen=MOST)

    def note(self, step: int, names: tuple[str, ...], flags: Tensor, scale: Tensor | float, skipped: Tensor) -> None:
        """As in `Events`."""
        if bool(flags.any()):
            self._kept.append(NonfiniteEvent(step, float(scale), _named(names, flags.tolist())))

    def read(self) -> tuple[NonfiniteEvent, ...]:
        """As in `Events`."""
        return tuple(self._kept)


class DeviceEvents:
    """`Events` that never waits for the device.

    Every step is written into the row whose number is that of the steps skipped before it. As long as none is, the next
    step writes into the same row; one that is skipped moves the number, and its row stays.

    Args:
        device: where the flags are.

    Example:
        >>> events, skipped = DeviceEvents(torch.device("cpu")), torch.tensor(0)
        >>> for step, bad in enumerate((0, 1, 0), 1):
        ...     skipped = skipped + bad
        ...     events.note(step, ("weight",), torch.tensor([bad], dtype=torch.uint8), 8.0, skipped)
        >>> events.read()
        (NonfiniteEvent(step=2, scale=8.0, parameters=('weight',)),)
    """

    def __init__(self, device: torch.device) -> None:
        self._row = torch.zeros(1, dtype=torch.int64, device=device)
        self._tables: dict[tuple[str, ...], _Table] = {}

    def note(self, step: int, names: tuple[str, ...], flags: Tensor, scale: Tensor | float, skipped: Tensor) -> None:
        """As in `Events`."""
        table = self._tables.get(names)
        if table is None:
            table = self._tables[names] = _Table.on(flags.device, len(names))
        table.flags.index_copy_(0, self._row, flags.unsqueeze(0))
        table.steps.index_fill_(0, self._row, step)
        if isinstance(scale, Tensor):
            table.scales.index_copy_(0, self._row, scale.reshape(1))
        else:
            table.scales.index_fill_(0, self._row, scale)
        self._row = (skipped % MOST).reshape(1)

    def read(self) -> tuple[NonfiniteEvent, ...]:
        """As in `Events`; this waits for the device."""
        found = [event for names, table in self._tables.items() for event in table.read(names)]
        return tuple(sorted(found, key=lambda event: event.step)[-MOST:])


@dataclass(frozen=True)
class _Table:
    """Steps of one set of parameters.

    Args:
        flags: uint8 [16, number of parameters].
        steps: int64 [16].
        scales: FP32 [16].
    """

    flags: Tensor
    steps: Tensor
    scales: Tensor

    @classmethod
    def on(cls, device: torch.device, parameters: int) -> _Table:
        return cls(
            torch.zeros(MOST, parameters, dtype=torch.uint8, device=device),
            torch.zeros(MOST, dtype=torch.int64, device=device),
            torch.zeros(MOST, dtype=torch.float32, device=device),
        )

    def read(self, names: tuple[str, ...]) -> list[NonfiniteEvent]:
        rows = zip(self.steps.tolist(), self.scales.tolist(), self.flags.tolist(), strict=True)
        return [NonfiniteEvent(step, scale, _named(names, flags)) for step, scale, flags in rows if any(flags)]


def _named(names: Sequence[str], flags: Sequence[int]) -> tuple[str, ...]:
    return tuple(name for name, flag in zip(names, flags, strict=True) if flag)
