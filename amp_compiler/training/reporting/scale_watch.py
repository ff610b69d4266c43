"""Noticing, without waiting for the device, that gradients stay non-finite at the lowest loss scale."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from amp_compiler.ops.loss_scale import LossScale, LossScaleState

_EVERY = 8  # steps: what looks at the flag runs beside the graph, and a run that is stuck stays so


class PinnedCopy:
    """A copy of one flag from a CUDA device, under way or done: to pinned memory, with an event behind it."""

    def __init__(self) -> None:
        self._host = torch.empty((), dtype=torch.bool, pin_memory=True)
        self._event = torch.cuda.Event()

    def start(self, flag: Tensor) -> None:
        """Begin to copy a bool scalar; the call returns at once."""
        with torch.cuda.device(flag.device):
            self._host.copy_(flag, non_blocking=True)
            self._event.record()

    def done(self) -> bool:
        """Whether the copy has arrived; never waits."""
        return self._event.query()  # type: ignore[no-any-return,no-untyped-call]

    def value(self) -> bool:
        """The flag, once it has arrived."""
        return bool(self._host)


class LateFlag:
    """A flag on a CUDA device, of which a copy is started after every eighth step; nothing ever waits for it.

    Args:
        copy: how a flag reaches the host; by default to pinned memory, from the first one on.
    """

    def __init__(self, copy: PinnedCopy | None = None) -> None:
        self._copy, self._pending = copy, False
        self._every, self._steps = 1 if copy else _EVERY, 0

    def note(self, flag: Callable[[], Tensor]) -> None:
        """Behind a step.

        Args:
            flag: makes it, a bool scalar.
        """
        self._steps += 1
        # One at a time, and not after every step: what is set still is so when the next copy starts.
        if not self._pending and self._steps % self._every == 0:
            self._copy = self._copy or PinnedCopy()
            self._copy.start(flag())
            self._pending = True

    def arrived(self) -> bool:
        """Whether a flag that was under way has arrived and is set. It is reported once."""
        if self._copy is None or not self._pending or not self._copy.done():
            return False
        self._pending = False
        return self._copy.value()

    def forget(self) -> None:
        """Pass over what is under way, because the state was replaced."""
        self._pending = False


class StuckWatch(LateFlag):
    """Says whether a loss scale is stuck (`LossScale.stuck`).

    On a CPU the flag is read right after the step, on a CUDA device some steps late, see `LateFlag`. On other devices
    nothing is read.

    Args:
        device: where the loss scale's state is.
        copy: how a flag reaches the host; by default what fits the device.

    Example:
        >>> from amp_compiler.ops.loss_scale import StaticLossScale
        >>> scaling = StaticLossScale(8.0, patience=1)
        >>> state = scaling.next(scaling.init("cpu"), torch.ones(()))
        >>> StuckWatch(torch.device("cpu")).see(scaling, state)
        True
    """

    def __init__(self, device: torch.device, copy: PinnedCopy | None = None) -> None:
        super().__init__(copy)
        self._is_cpu = copy is None and device.type == "cpu"
        self._is_late = copy is not None or device.type == "cuda"

    def see(self, scaling: LossScale, state: LossScaleState) -> bool:
        """Look at the state after a step.

        Args:
            scaling: the loss scale.
            state: its state.

        Returns:
            True where it is known at once that the loss scale is stuck.
        """
        if not scaling.checks_finite:
            return False
        if self._is_late:
            self.note(lambda: scaling.stuck(state))
        return self._is_cpu and bool(scaling.stuck(state))
