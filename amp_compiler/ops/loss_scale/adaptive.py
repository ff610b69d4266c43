"""Scales that the norm of the gradients sets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from amp_compiler.errors import AmpError
from amp_compiler.ops.loss_scale.base import LARGEST, SMALLEST, LossScale, LossScaleState
from amp_compiler.ops.loss_scale.dynamic import DynamicLossScale, is_power_of_two, power_of_two


@dataclass(frozen=True)
class NormAdaptiveLossScale(DynamicLossScale):
    """The L2 norm of a step's gradients sets the scale of the next step.

    `scale = target_norm / norm`, rounded down to a power of two so that unscaling is exact. At 4096 the scaled
    gradients of parameters stay 15 times below fp16's largest number as long as the norm does not jump by as much in
    one step: the L2 norm, which the update computes anyway, is never below `max|g|`. NVCaffe's own formulas are in
    `NvcaffeLossScale`; their scales are no powers of two.

    The norm says nothing of the gradients of activations. Hence a `limit` on the scale that learns from overflows as a
    `DynamicLossScale` does: one lowers it to `scale * backoff_factor`, `growth_interval` finite steps raise it. After
    a step with a norm of 0 the scale stays.

    Args:
        target_norm: L2 norm that the scaled gradients of all parameters are brought to, or to at least half of it.

    Example:
        >>> scaling = NormAdaptiveLossScale(target_norm=4096.0)
        >>> state = scaling.next(scaling.init("cpu"), torch.tensor(0.0), norm=torch.tensor(3.0))
        >>> float(state.scale)
        1024.0
    """

    target_norm: float = field(default=4096.0, kw_only=True)
    mode: ClassVar[str] = "norm_adaptive"
    needs_norm: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_scale("target_norm")
        for name in ("init_scale", "growth_factor", "backoff_factor"):
            value = getattr(self, name)
            self._check(name, is_power_of_two(value), "a power of two", power_of_two(value))
        good = all(map(is_power_of_two, self._bounds()))
        self._check("max", good, f"such that there is a power of two from min={self.min!r} to it", 2.0**24)

    def next(self, state: LossScaleState, nonfinite: Tensor, norm: Tensor | None = None) -> LossScaleState:
        """The state after a step, as in `LossScale.next`; `norm` is needed.

        Raises:
            AmpError: where there is no norm.
        """
        norm = _given(norm)
        counted, backs_off, grows = self._events(state, nonfinite)
        limit = torch.where(grows, self._raised(state.limit), state.limit)
        limit = torch.where(backs_off, self._lowered(state.scale), limit)
        wanted = (self.target_norm / norm.double()).clamp(self.floor, self.ceiling).float()
        # Clearing the 23 bits of the mantissa rounds down to a power of two exactly, which log2 does not promise.
        wanted = (wanted.view(torch.int32) & 0x7F800000).view(torch.float32)
        known = (nonfinite == 0) & torch.isfinite(norm) & (norm > 0)
        scale = torch.minimum(torch.where(known, wanted, state.scale), limit)
        return counted.changed(scale=scale, limit=limit)

    def with_scale(self, scale: float) -> NormAdaptiveLossScale:
        """These settings, which take a power of two from floor to ceiling; as in `LossScale.with_scale`."""
        super().with_scale(scale)
        if not is_power_of_two(scale):
            near = power_of_two(scale)
            raise AmpError(f"loss_scale={scale!r} is no power of two", where=type(self).__name__, hint=f"assign {near}")
        return self

    def _bounds(self) -> tuple[float, float]:
        low, high = super()._bounds()
        return low, (power_of_two(high) if self.max is None else high)

    def _admit(self, saved: Mapping[str, Any], name: str, value: Any) -> float:
        return power_of_two(super()._admit(saved, name, value))


@dataclass(frozen=True)
class NvcaffeLossScale(LossScale):
    """`global_grad_scale_adaptive` of NVCaffe, with K of `global_grad_scale`, by the formulas of its versions.

    - `"max"`, NVCaffe 0.17.1 to 0.17.4: `K * (4 / max|g|)`, or K where all gradients are 0. A parameter whose
      gradient holds an inf or a NaN does not count.
    - `"l2"`, NVCaffe 0.16.5 to 0.17.0: `K * sqrt(sum(g * g))`, or K where that is 0 or not finite. It lowers the
      scale as gradients get smaller, and was given up for the other.

    g are the unscaled gradients of the step before, of all parameters. The first step runs with a scale of 1, since
    NVCaffe computes the scale at the end of each iteration. The numbers are computed in fp32 as there, and are no
    powers of two: unscaling rounds. What differs: a step with gradients that are not finite is skipped, which NVCaffe
    does not do, and a scale beyond fp32's normal numbers is brought to the nearest of them. NVCaffe leaves out the
    gradients of parameters whose layers run in FP32 (`"max"`), and adds up squares in steps of 1e-6 (`"l2"`).

    Source: `Net::update_grad_scale` in `src/caffe/net.cpp` of NVIDIA/caffe.

    Args:
        coefficient: K, `global_grad_scale`.
        formula: `"max"` or `"l2"`.

    Example:
        >>> scaling = NvcaffeLossScale(coefficient=100.0)
        >>> state = scaling.next(scaling.init("cpu"), torch.tensor(0.0), torch.tensor(0.5))
        >>> float(state.scale)
        800.0
    """

    coefficient: float = 1.0
    formula: str = "max"
    mode: ClassVar[str] = "nvcaffe"
    adapts: ClassVar[bool] = True
    needs_norm: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_scale("coefficient")
        known = isinstance(self.formula, str) and self.formula in ("max", "l2")
        self._check("formula", known, "'max' or 'l2'", "'max'")

    @property
    def first(self) -> float:
        """The scale of the first step: 1."""
        return 1.0

    @property
    def norm_order(self) -> float:
        """Which norm `next` is given: infinity for the largest magnitude, or 2."""
        return math.inf if self.formula == "max" else 2.0

    def next(self, state: LossScaleState, nonfinite: Tensor, norm: Tensor | None = None) -> LossScaleState:
        """The state after a step, as in `LossScale.next`; `norm` is needed.

        Raises:
            AmpError: where there is no norm.
        """
        counted = super().next(state, nonfinite)
        norm = _given(norm)
        # By way of fp64, which gives the quotient of two fp32 numbers as fp32 rounds it on every device.
        factor = (4.0 / norm.double()).float() if self.formula == "max" else norm
        known = torch.isfinite(norm) & (norm > 0)
        scale = torch.where(known, factor, torch.ones_like(factor)) * self.coefficient
        return counted.changed(scale=scale.clamp(SMALLEST, LARGEST))

    def _admit(self, saved: Mapping[str, Any], name: str, value: Any) -> float:
        if not isinstance(value, (int, float)) or not SMALLEST <= value <= LARGEST:
            what = f"the saved loss scale has {name}={value!r}"
            raise AmpError(what, hint="it must be a positive number within fp32's normal range")
        return float(value)


def _given(norm: Tensor | None) -> Tensor:
    if norm is None:
        raise AmpError("an adaptive loss scale needs the norm of the gradients", hint="pass norm=")
    return norm
