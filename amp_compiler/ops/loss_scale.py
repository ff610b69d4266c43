"""The loss scales: none, static, dynamic and norm-adaptive, all with the interface of `LossScale`.

`next` is made of tensor functions only, so it is traced into the step's graph and never waits for the device:

    scaling = make_loss_scale("dynamic")
    state = scaling.init("cuda")
    state = scaling.next(state, nonfinite, norm)    # once per step
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from amp_compiler.errors import AmpError
from amp_compiler.ops.loss_scale_base import (
    FACTORS,
    LARGEST,
    SMALLEST,
    LossScale,
    LossScaleState,
    NoLossScale,
    StaticLossScale,
    count_step,
)

__all__ = [
    "DynamicLossScale",
    "LossScale",
    "LossScaleState",
    "NoLossScale",
    "NormAdaptiveLossScale",
    "StaticLossScale",
    "make_loss_scale",
]


@dataclass(frozen=True)
class DynamicLossScale(LossScale):
    """The rule of `torch.amp.GradScaler`, with bounds and hysteresis.

    After a non-finite step `scale *= backoff_factor`; after `growth_interval` finite steps in a row
    `scale *= growth_factor`, where fp32 holds the product. Without `min`, `max` and `hysteresis` the scale and the
    tracker are GradScaler's bit for bit, except that the scale stops at fp32's smallest normal number instead of
    going on to 0, which has no inverse.

    Hysteresis is that of Apex's `update_scale_hysteresis` (DeepSpeed: `consecutive_hysteresis`): the scale backs off
    at the `hysteresis`-th non-finite step in a row and at each one after it; a finite step starts the count anew.
    Megatron's `DynamicGradScaler` starts it anew only when the scale grows, so that overflows far apart add up.

    Where `init_scale` and both factors are powers of two, a bound that is none is moved inwards to the next one:
    unscaling rounds nothing as long as the scale is a power of two.

    Args:
        init_scale: scale of the first step, brought inside `min` and `max`.
        growth_factor: above 1.
        backoff_factor: between 0 and 1.
        growth_interval: finite steps in a row until the scale grows.
        min: the floor; `None` for fp32's smallest normal number.
        max: the ceiling; `None` for fp32's largest number.
        hysteresis: non-finite steps in a row until the scale backs off.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min: float | None = None
    max: float | None = None
    hysteresis: int = 1
    mode: ClassVar[str] = "dynamic"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_scale("init_scale")
        self._check_real("growth_factor", math.nextafter(1.0, 2.0), LARGEST, "a finite number above 1", 2.0)
        self._check_real("backoff_factor", SMALLEST, math.nextafter(1.0, 0.0), "a number between 0 and 1", 0.5)
        self._check_count("growth_interval")
        self._check_count("hysteresis")
        for name in ("min", "max"):
            if getattr(self, name) is not None:
                self._check_scale(name)
        if self.min is not None and self.max is not None:
            self._check("min", self.min <= self.max, f"no more than max={self.max!r}", self.max)

    @property
    def first(self) -> float:
        """The scale of the first step."""
        return self._inside(self.init_scale)

    @property
    def constant(self) -> None:
        """`None`: the scale is read from the state."""
        return None

    @property
    def floor(self) -> float:
        """The lowest scale there is."""
        return self._bounds()[0]

    @property
    def ceiling(self) -> float:
        """The highest scale there is."""
        return self._bounds()[1]

    def next(self, state: LossScaleState, nonfinite: Tensor, norm: Tensor | None = None) -> LossScaleState:
        """The state after a step, as in `LossScale.next`."""
        counted, backs_off, grows = self._events(state, nonfinite)
        scale = torch.where(grows, self._raised(state.scale), state.scale)
        return counted._replace(scale=torch.where(backs_off, self._lowered(state.scale), scale))

    def matching(self, saved: Mapping[str, Any]) -> DynamicLossScale:
        """This loss scale with the factors of `saved`, as `GradScaler.load_state_dict` takes them over."""
        return replace(self, **{key: saved[key] for key in FACTORS if key in saved})

    def _bounds(self) -> tuple[float, float]:
        low = SMALLEST if self.min is None else self.min
        high = LARGEST if self.max is None else self.max
        if all(map(_is_power_of_two, (self.init_scale, self.growth_factor, self.backoff_factor))):
            inner_low = low if _is_power_of_two(low) else 2 * _power_of_two(low)
            # The end of fp32 stays: such factors never lead to it, and a loaded scale may be any number up to it.
            inner_high = high if self.max is None else _power_of_two(high)
            return (inner_low, inner_high) if inner_low <= inner_high else (low, high)
        return low, high

    def _inside(self, scale: float) -> float:
        low, high = self._bounds()
        return low if scale < low else high if scale > high else scale

    def _events(self, state: LossScaleState, nonfinite: Tensor) -> tuple[LossScaleState, Tensor, Tensor]:
        """The counted state, and two 0-dim bools: the scale backs off, the scale grows."""
        counted = count_step(state, nonfinite, at_floor=state.scale <= self.floor)
        grows = counted.growth_tracker == self.growth_interval  # "==" as in GradScaler, also past the interval
        backs_off = counted.bad_steps >= self.hysteresis
        return counted._replace(growth_tracker=counted.growth_tracker * ~grows), backs_off, grows

    # GradScaler multiplies in fp64 and rounds once: a factor rounded to fp32 first would give other last bits.
    def _lowered(self, scale: Tensor) -> Tensor:
        return (scale.double() * self.backoff_factor).float().clamp(min=self.floor)

    def _raised(self, scale: Tensor) -> Tensor:
        grown = (scale.double() * self.growth_factor).float()
        return torch.where(torch.isfinite(grown), grown.clamp(max=self.ceiling), scale)

    @property
    def _limit(self) -> float:
        return self.ceiling

    def _factors(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in FACTORS}

    def _admit(self, saved: Mapping[str, Any], name: str, value: Any) -> float:
        for key, mine in self._factors().items():
            if saved[key] != mine:
                what = f"the saved loss scale has {key}={saved[key]!r}, this one {mine!r}"
                raise AmpError(what, mend="use the loss scale that matching(saved) gives")
        if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise AmpError(f"the saved loss scale has {name}={value!r}", mend="it must be a finite number from 0")
        return self._inside(float(value))


@dataclass(frozen=True)
class NormAdaptiveLossScale(DynamicLossScale):
    """NVCaffe's adaptive gradient scale: the norm of a step's gradients sets the scale of the next step.

    NVCaffe 0.17.4 takes `K * 4 / max|g|` of the last step's unscaled gradients g. Here the norm is the L2 norm that the
    update computes anyway and that is never below `max|g|`: `scale = target_norm / norm`, rounded down to a power of
    two so that unscaling is exact. At 4096 the scaled gradients of parameters stay 15 times below fp16's largest
    number as long as the norm does not jump by as much in one step. (NVCaffe 0.16 took `K * norm`, which lowers the
    scale as gradients get smaller; that was given up there and is not offered here.)

    The norm says nothing of the gradients of activations. Hence a `limit` on the scale that learns from overflows as a
    `DynamicLossScale` does: one lowers it to `scale * backoff_factor`, `growth_interval` finite steps raise it. After
    a step with a norm of 0 the scale stays.

    Args:
        target_norm: L2 norm that the scaled gradients of all parameters are brought to, or to at least half of it.
    """

    target_norm: float = field(default=4096.0, kw_only=True)
    mode: ClassVar[str] = "norm_adaptive"
    needs_norm: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_scale("target_norm")
        for name in ("init_scale", "growth_factor", "backoff_factor"):
            value = getattr(self, name)
            self._check(name, _is_power_of_two(value), "a power of two", _power_of_two(value))
        good = all(map(_is_power_of_two, self._bounds()))
        self._check("max", good, f"such that there is a power of two from min={self.min!r} to it", 2.0**24)

    def next(self, state: LossScaleState, nonfinite: Tensor, norm: Tensor | None = None) -> LossScaleState:
        """The state after a step, as in `LossScale.next`; `norm` is needed.

        Raises:
            AmpError: where there is no norm.
        """
        if norm is None:
            raise AmpError("a norm-adaptive loss scale needs the norm of the gradients", mend="pass norm=")
        counted, backs_off, grows = self._events(state, nonfinite)
        limit = torch.where(grows, self._raised(state.limit), state.limit)
        limit = torch.where(backs_off, self._lowered(state.scale), limit)
        wanted = (self.target_norm / norm.double()).clamp(self.floor, self.ceiling).float()
        # Clearing the 23 bits of the mantissa rounds down to a power of two exactly, which log2 does not promise.
        wanted = (wanted.view(torch.int32) & 0x7F800000).view(torch.float32)
        known = (nonfinite == 0) & torch.isfinite(norm) & (norm > 0)
        scale = torch.minimum(torch.where(known, wanted, state.scale), limit)
        return counted._replace(scale=scale, limit=limit)

    def _bounds(self) -> tuple[float, float]:
        low, high = super()._bounds()
        return low, (_power_of_two(high) if self.max is None else high)

    def _admit(self, saved: Mapping[str, Any], name: str, value: Any) -> float:
        return _power_of_two(super()._admit(saved, name, value))


def _power_of_two(value: float) -> float:
    """The largest power of two that is no more than a positive `value`."""
    return math.ldexp(0.5, math.frexp(value)[1])


def _is_power_of_two(value: float) -> bool:
    return math.frexp(value)[0] == 0.5


_KINDS: dict[str, type[LossScale]] = {
    kind.mode: kind for kind in (NoLossScale, StaticLossScale, DynamicLossScale, NormAdaptiveLossScale)
}
_RULE_KEY = {"scale": "init", "init_scale": "init"}  # what a rule file calls these fields


def make_loss_scale(value: object, section: Mapping[str, Any] | None = None) -> LossScale:
    """The loss scale that a user's argument or a rule file asks for.

    Args:
        value: a mode (`"dynamic"`, `"norm_adaptive"`, `"none"`, `"static"`), a number for a static scale, `None` for no
            scaling, a `LossScale`, or a mapping such as the `loss_scale` section of a rule file.
        section: the `loss_scale` section of a rule file; gives the settings where `value` is the section's mode.

    Raises:
        AmpError: for anything else, an unknown key or a number out of range.

    Example:
        >>> make_loss_scale("dynamic", {"mode": "dynamic", "max": 2.0**24}).ceiling
        16777216.0
        >>> make_loss_scale(1024)
        StaticLossScale(patience=20, scale=1024.0)
    """
    if isinstance(value, LossScale):
        return value
    if value is None:
        return NoLossScale()
    if isinstance(value, Real) and not isinstance(value, bool):
        return StaticLossScale(cast(float, value))
    if isinstance(value, str):
        given = section if section and section.get("mode", "dynamic") == value else {}
        return _from_section({**given, "mode": value})
    if isinstance(value, Mapping):
        return _from_section(value)
    mend = "pass 'dynamic', a number, None, a LossScale, or the loss_scale section of a rule file"
    raise AmpError(f"loss_scale={value!r} is not known", mend=mend)


def _from_section(section: Mapping[str, Any]) -> LossScale:
    """The loss scale of a rule file's section, a null counting as not given."""
    given = {key: setting for key, setting in section.items() if setting is not None}
    mode = given.pop("mode", "dynamic")
    kind = _KINDS.get(mode) if isinstance(mode, str) else None
    if kind is None:
        raise AmpError(f"loss_scale mode {mode!r} is not known", mend=f"use one of {', '.join(map(repr, _KINDS))}")
    known = {_RULE_KEY.get(each.name, each.name): each.name for each in fields(kind)}
    for key in given:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            mend = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(map(repr, known))}"
            raise AmpError(f"a loss scale of mode {mode!r} has no {key!r}", mend=mend)
    if mode == "static" and "init" not in given:
        raise AmpError("a static loss scale has no scale", mend="give 'init', or pass the number itself")
    return kind(**{known[key]: setting for key, setting in given.items()})
