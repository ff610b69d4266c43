"""Scales that never change."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from amp_compiler.ops.loss_scale.base import LossScale, LossScaleState


@dataclass(frozen=True)
class NoLossScale(LossScale):
    """No scaling: the scale is 1.

    Args:
        check_finite: skip steps with non-finite gradients all the same; with False nothing is skipped or counted.

    Example:
        >>> NoLossScale().first
        1.0
    """

    check_finite: bool = True
    mode: ClassVar[str] = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("check_finite", isinstance(self.check_finite, bool), "True or False", True)

    @property
    def first(self) -> float:
        """The scale of every step: 1."""
        return 1.0

    @property
    def checks_finite(self) -> bool:
        """False where a step need not look for inf and NaN in its gradients, because none is ever skipped."""
        return self.check_finite

    def next(self, state: LossScaleState, nonfinite: Tensor, norm: Tensor | None = None) -> LossScaleState:
        """The state after a step, as in `LossScale.next`."""
        return super().next(state, nonfinite) if self.check_finite else state


@dataclass(frozen=True)
class StaticLossScale(LossScale):
    """A scale that never changes; steps with non-finite gradients are skipped.

    Args:
        scale: a number above 0. Powers of two are unscaled without rounding.

    Example:
        >>> import torch
        >>> scaling = StaticLossScale(1024.0)
        >>> state = scaling.next(scaling.init("cpu"), torch.tensor(1.0))
        >>> float(state.scale), int(state.skipped_steps)
        (1024.0, 1)
    """

    scale: float
    mode: ClassVar[str] = "static"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_scale("scale")

    @property
    def first(self) -> float:
        """The scale of every step."""
        return self.scale

    def with_scale(self, scale: float) -> StaticLossScale:
        """The same with another scale, as in `LossScale.with_scale`."""
        return replace(self, scale=scale)
