"""The scale that grows while all is finite and backs off where it is not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from amp_compiler.errors import AmpError
from amp_compiler.ops.loss_scale.base import FACTORS, LARGEST, SMALLEST, LossScale, LossScaleState, count_step

_LOW = 1024.0  # twenty halvings from here down, and what is not finite then has other reasons than the scale


@dataclass(frozen=True)
class DynamicLossScale(LossScale):
    """The rule of `torch.amp.GradScaler`, with bounds and hysteresis.

    After a non-finite step `scale *= backoff_factor`; after `growth_interval` finite steps in a row
    `scale *= growth_factor`, where fp32 holds the product. Without `min`, `max` and `hysteresis` the scale and the
    tracker are GradScaler's bit for bit, except that the scale stops at fp32's smallest normal number instead of
    going on to 0, which has no inverse.

    With hysteresis the scale backs off at the `hysteresis`-th non-finite step and at each one after it, until the
    count starts anew. There are two ways to count. By `consecutive_hysteresis` a finite step starts the count anew, as
    in Apex's `update_scale_hysteresis` and in DeepSpeed with the option of that name. Without it only a growth of the
    scale does, as in DeepSpeed by default and in Megatron's `DynamicGradScaler`: overflows far apart add up.

    Where `init_scale` and both factors are powers of two, a bound that is none is moved inwards to the next one:
    unscaling rounds nothing as long as the scale is a power of two.

    Args:
        init_scale: scale of the first step, brought inside `min` and `max`.
        growth_factor: above 1.
        backoff_factor: between 0 and 1.
        growth_interval: finite steps in a row until the scale grows.
        min: the floor; `None` for fp32's smallest normal number. Steps count as run at the lowest scale
            (`patience`) from the floor on; where it is `None` from 1024 down, so that a run whose gradients stay
            non-finite ends after 26 steps from the first scale, not after 162.
        max: the ceiling; `None` for fp32's largest number.
        hysteresis: non-finite steps until the scale backs off.
        consecutive_hysteresis: whether they must be in a row.
        growth_delay: finite steps, at first and after each non-finite one, that do not count towards `growth_interval`.
            DeepSpeed's scalers have 1: with a `loss_scale_window` of 1000 the scale grows at the 1001st, 2001st, ….

    Source: `torch.amp.GradScaler`; Micikevicius et al., Mixed Precision Training, 2018, section 3.2.

    Example:
        >>> scaling = DynamicLossScale(init_scale=1024.0)
        >>> state = scaling.next(scaling.init("cpu"), torch.tensor(1.0))
        >>> float(state.scale)
        512.0
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min: float | None = None
    max: float | None = None
    hysteresis: int = 1
    consecutive_hysteresis: bool = True
    growth_delay: int = 0
    mode: ClassVar[str] = "dynamic"
    adapts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_scale("init_scale")
        self._check_real("growth_factor", math.nextafter(1.0, 2.0), LARGEST, "a finite number above 1", 2.0)
        self._check_real("backoff_factor", SMALLEST, math.nextafter(1.0, 0.0), "a number between 0 and 1", 0.5)
        self._check_count("growth_interval")
        self._check_count("hysteresis")
        self._check_count("growth_delay", least=0)
        setting = self.consecutive_hysteresis
        self._check("consecutive_hysteresis", isinstance(setting, bool), "True or False", True)
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
    def floor(self) -> float:
        """The lowest scale there is."""
        return self._bounds()[0]

    @property
    def ceiling(self) -> float:
        """The highest scale there is."""
        return self._bounds()[1]

    @property
    def low(self) -> float:
        """From this scale down, steps that are non-finite count as run at the lowest scale (`patience`)."""
        return self.floor if self.min is not None else max(self.floor, _LOW)

    def with_scale(self, scale: float) -> DynamicLossScale:
        """These settings, which take any scale from floor to ceiling; as in `LossScale.with_scale`."""
        self._check_settable(scale, self.floor, self.ceiling)
        return self

    def next(self, state: LossScaleState, nonfinite: Tensor, norm: Tensor | None = None) -> LossScaleState:
        """The state after a step, as in `LossScale.next`."""
        counted, backs_off, grows = self._events(state, nonfinite)
        scale = torch.where(grows, self._raised(state.scale), state.scale)
        return counted.changed(scale=torch.where(backs_off, self._lowered(state.scale), scale))

    def matching(self, saved: Mapping[str, Any]) -> DynamicLossScale:
        """This loss scale with the factors of `saved`, as `GradScaler.load_state_dict` takes them over."""
        if _is_of_constant(saved):
            return self
        return replace(self, **{key: saved[key] for key in FACTORS if key in saved})

    def _why_low(self, state: LossScaleState) -> str:
        return ", the lowest there is" if bool(state.scale <= self.floor) else f", down from {self.low:g}"

    def _bounds(self) -> tuple[float, float]:
        low = SMALLEST if self.min is None else self.min
        high = LARGEST if self.max is None else self.max
        if all(map(is_power_of_two, (self.init_scale, self.growth_factor, self.backoff_factor))):
            inner_low = low if is_power_of_two(low) else 2 * power_of_two(low)
            # The end of fp32 stays: such factors never lead to it, and a loaded scale may be any number up to it.
            inner_high = high if self.max is None else power_of_two(high)
            return (inner_low, inner_high) if inner_low <= inner_high else (low, high)
        return low, high

    def _inside(self, scale: float) -> float:
        low, high = self._bounds()
        return low if scale < low else high if scale > high else scale

    def _events(self, state: LossScaleState, nonfinite: Tensor) -> tuple[LossScaleState, Tensor, Tensor]:
        """The counted state, and two 0-dim bools: the scale backs off, the scale grows."""
        counted = count_step(state, nonfinite, at_floor=state.scale <= self.low)
        # "==" as in GradScaler, also past the interval
        grows = counted.growth_tracker == self.growth_interval + self.growth_delay
        if self.consecutive_hysteresis:
            backs_off = counted.bad_steps >= self.hysteresis
        else:
            bad = nonfinite != 0
            overflows = state.bad_steps + bad
            backs_off = bad & (overflows >= self.hysteresis)
            counted = counted.changed(bad_steps=overflows * ~grows)
        if self.hysteresis > 1:
            counted = counted.changed(floor_steps=counted.floor_steps * backs_off)
        tracker, delay = counted.growth_tracker, self.growth_delay  # a growth brings it back to where the first counted
        tracker = (tracker - delay) * ~grows + delay if delay else tracker * ~grows
        return counted.changed(growth_tracker=tracker), backs_off, grows

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
        constant = _is_of_constant(saved)
        if constant and (name == "limit" or value == 1.0):  # nothing was scaled there: it says nothing of this scale
            return self._limit if name == "limit" else self.first
        for key, mine in self._factors().items():
            if saved[key] != mine and not constant:
                what = f"the saved loss scale has {key}={saved[key]!r}, this one {mine!r}"
                raise AmpError(what, hint="use the loss scale that matching(saved) gives")
        if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise AmpError(f"the saved loss scale has {name}={value!r}", hint="it must be a finite number from 0")
        return self._inside(float(value))


def _is_of_constant(saved: Mapping[str, Any]) -> bool:
    """Whether a saved state is that of a scale that never changes, such as that of a step with `enabled=False`."""
    return saved.get("growth_factor") == 1.0 and saved.get("backoff_factor") == 1.0


def power_of_two(value: float) -> float:
    """The largest power of two that is no more than a positive `value`."""
    return math.ldexp(0.5, math.frexp(value)[1])


def is_power_of_two(value: float) -> bool:
    """Whether a positive `value` is one."""
    return math.frexp(value)[0] == 0.5
