"""Noticing that a tensor was written: its address, its version counter and the optimizer steps of this process."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from operator import attrgetter

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

logger = logging.getLogger("amp_compiler")
VERSION = attrgetter("_version")  # of tensors, fast


class StepCounter:
    """Counts the steps that optimizers of torch make themselves: their fused updates move no version counter."""

    def __init__(self) -> None:
        self.count = 0
        self._watching = False

    def watch(self) -> None:
        """Start counting; later calls change nothing."""
        if not self._watching:
            self._watching = True
            register_optimizer_step_post_hook(self.note)

    def note(self, *_: object) -> None:
        """Count one."""
        self.count += 1


OPTIMIZER_STEPS = StepCounter()


def versions(tensors: Sequence[Tensor]) -> list[int | None]:
    """Their version counters; an inference tensor has none."""
    try:
        return [*map(VERSION, tensors)]
    except RuntimeError:
        return [None if one.is_inference() else one._version for one in tensors]


def writable(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Those of some tensors that have a version counter."""
    return [tensor for tensor in tensors if not tensor.is_inference()]


def tell_of_hidden_write(name: str) -> None:
    """Tell the user that a weight was written past its version counter.

    Args:
        name: its qualified name.
    """
    logger.warning(
        "'%s' was written past its version counter, such as by .data or numpy(): it counts, and is found by comparing"
        " values, of large weights some; a write under torch.no_grad() is always seen",
        name,
    )
