"""The loss scales: none, static, dynamic and norm-adaptive, all with the interface of `LossScale`.

A loss scale is frozen settings without tensors, and a state of 0-dim device tensors beside them. The state goes into a
training step and comes out of it; the settings are Python numbers that the trace bakes in.

`next` is made of tensor functions only, so it is traced into the step's graph and never waits for the device:

    scaling = make_loss_scale("dynamic")
    state = scaling.init("cuda")
    state = scaling.next(state, nonfinite, norm)    # once per step
"""

from __future__ import annotations

import difflib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from amp_compiler.errors import AmpError, LossScaleError

SMALLEST = 2.0**-126  # of fp32's normal numbers: the inverse of every scale from here to 2**126 is normal too
LARGEST = float(torch.finfo(torch.float32).max)
_OWN = "amp_compiler"  # GradScaler.load_state_dict reads its five keys by name and passes over any other
FACTORS = ("growth_factor", "backoff_factor", "growth_interval")
HELD = "_held"  # what a training step keeps with the object it was given; no field, so that it is in no comparison
_LOW = 1024.0  # twenty halvings from here down, and what is not finite then has other reasons than the scale


class LossScaleState(NamedTuple):
    """What changes from step to step: 0-dim tensors on one device.

    Args:
        scale: fp32, what the loss of the next step is multiplied by.
        growth_tracker: int32, finite steps since the scale last changed or a step was last skipped.
        bad_steps: int32, consecutive non-finite steps up to now.
        skipped_steps: int64, non-finite steps in all.
        floor_steps: int32, those of `bad_steps` that ran at the lowest scale there is.
        limit: fp32, the largest scale that a norm-adaptive scale may choose.
    """

    scale: Tensor
    growth_tracker: Tensor
    bad_steps: Tensor
    skipped_steps: Tensor
    floor_steps: Tensor
    limit: Tensor

    def changed(self, **new: Tensor) -> LossScaleState:
        """The same with other values in these fields. Dynamo of torch 2.11 makes an empty tuple of `_replace`."""
        return LossScaleState(**{**dict(zip(self._fields, self, strict=True)), **new})


_INTEGERS = {"bad_steps": torch.int32, "skipped_steps": torch.int64, "floor_steps": torch.int32}


@dataclass(frozen=True)
class LossScale(ABC):
    """Settings of a loss scale: hashable, comparable, free of tensors.

    Args:
        patience: consecutive non-finite steps at the lowest scale after which `stuck` is true.
    """

    patience: int = field(default=20, kw_only=True)
    mode: ClassVar[str]
    needs_norm: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._check_count("patience")

    @property
    @abstractmethod
    def first(self) -> float:
        """The scale of the first step."""

    @property
    def constant(self) -> float | None:
        """The scale where it never changes, so that a pass may fold it; `None` where it is read from the state."""
        return self.first

    @property
    def checks_finite(self) -> bool:
        """False where a step need not look for inf and NaN in its gradients, because none is ever skipped."""
        return True

    def init(self, device: torch.device | str) -> LossScaleState:
        """A new state on `device`, filled there without a copy from the host."""
        return self._state(device, self.first)

    def next(self, state: LossScaleState, nonfinite: Tensor, norm: Tensor | None = None) -> LossScaleState:
        """The state after a step; `state` itself is not changed.

        Args:
            state: the state that the step ran with.
            nonfinite: fp32, 0-dim: 1 where a gradient held an inf or a NaN and the step was skipped, else 0.
            norm: fp32, 0-dim: L2 norm of all unscaled gradients before clipping; read where `needs_norm`.
        """
        counted = count_step(state, nonfinite, at_floor=True)
        return counted.changed(growth_tracker=state.growth_tracker)

    def inverse(self, state: LossScaleState) -> Tensor:
        """1 / scale: fp32, 0-dim, and exact for powers of two."""
        # By way of fp64, as GradScaler does it: compiled fp32 division on a GPU may be off in the last bit.
        return state.scale.double().reciprocal().float()

    def stuck(self, state: LossScaleState) -> Tensor:
        """Bool, 0-dim, on the device: true where the gradients stay non-finite at the lowest scale."""
        return state.floor_steps >= self.patience

    def with_scale(self, scale: float) -> LossScale:
        """These settings for a run that goes on with another scale, as `step.loss_scale = scale` asks for.

        Raises:
            AmpError: this loss scale cannot have it.
        """
        if self.constant is not None:
            raise AmpError(
                f"loss_scale={scale!r} cannot be set on a loss scale of mode {self.mode!r}",
                mend="make the step with loss_scale='dynamic' or a number",
            )
        self._check_settable(scale, SMALLEST, LARGEST)
        return self

    def check(self, state: LossScaleState, *, parameters: Iterable[str] = (), nodes: Iterable[str] = ()) -> None:
        """Reads `stuck`, for which it waits for the device.

        Args:
            state: the state to look at.
            parameters: names of the parameters with non-finite gradients, for the error's text.
            nodes: names of the graph nodes with non-finite values, likewise.

        Raises:
            LossScaleError: where the gradients stay non-finite.
        """
        if bool(self.stuck(state)):
            raise LossScaleError(
                f"the gradients were not finite in {int(state.floor_steps)} steps in a row at the loss scale "
                f"{float(state.scale):g}{self._why_low(state)}",
                parameters=parameters,
                nodes=nodes,
                mend="look for inf or NaN in data and weights, lower the learning rate, or run these nodes in fp32",
            )

    def state_dict(self, state: LossScaleState) -> dict[str, Any]:
        """Plain numbers under the keys of `torch.amp.GradScaler.state_dict()`, for which it waits for the device.

        What GradScaler has no key for is under the one key `amp_compiler`, which `GradScaler.load_state_dict` ignores.
        """
        own: dict[str, Any] = {name: int(getattr(state, name)) for name in _INTEGERS}
        head = {"scale": float(state.scale), **self._factors(), "_growth_tracker": int(state.growth_tracker)}
        return {**head, _OWN: {**own, "limit": float(state.limit)}}

    def load_state_dict(self, saved: Mapping[str, Any], device: torch.device | str) -> LossScaleState:
        """The state that a `state_dict` of this class or of `torch.amp.GradScaler` describes.

        A constant loss scale keeps its own value. A scale outside `min` and `max` is brought inside.

        Raises:
            AmpError: where a key is missing or wrong, or the saved factors are not those of this loss scale.
        """
        if not saved and self.constant is not None:  # what a disabled GradScaler writes
            return self.init(device)
        missing = [key for key in ("scale", *FACTORS, "_growth_tracker") if key not in saved]
        if missing:
            mend = "save the state of an enabled torch.amp.GradScaler or of a loss scale"
            raise AmpError(f"the saved loss scale has no {missing[0]!r}", mend=mend)
        own = saved.get(_OWN, {})
        state = self._state(device, self._admit(saved, "scale", saved["scale"]), _whole(saved, "_growth_tracker"))
        counters = {key: _full(_whole(own, key), kind, device) for key, kind in _INTEGERS.items()}
        limit = self._admit(saved, "limit", own["limit"]) if "limit" in own else self._limit
        return state.changed(limit=_full(limit, torch.float32, device), **counters)

    def matching(self, saved: Mapping[str, Any]) -> LossScale:
        """This loss scale with the factors of `saved`, as `GradScaler.load_state_dict` takes them over."""
        return self

    def _why_low(self, state: LossScaleState) -> str:
        """Ends the sentence that says at which scale the gradients were not finite."""
        return ", the lowest there is"

    @property
    def _limit(self) -> float:
        """The first value of the state's `limit`."""
        return self.first

    def _factors(self) -> dict[str, Any]:
        """GradScaler's settings: with factors of one its scale stays where it is, as it does here."""
        return {"growth_factor": 1.0, "backoff_factor": 1.0, "growth_interval": 2000}

    def _admit(self, saved: Mapping[str, Any], name: str, value: Any) -> float:
        """The value that a saved scale is loaded as."""
        return self.first

    def _check_settable(self, scale: float, low: float, high: float) -> None:
        if not low <= scale <= high:  # true for a NaN
            what = f"loss_scale={scale!r} is outside of {low:g} to {high:g}"
            raise AmpError(what, where=type(self).__name__, mend="assign a number inside, or set min= and max= wider")

    def __getstate__(self) -> dict[str, Any]:
        """The settings alone: a copy of a loss scale is another one, with a state of its own."""
        return {name: value for name, value in self.__dict__.items() if name != HELD}

    def _state(self, device: torch.device | str, scale: float, tracker: int = 0) -> LossScaleState:
        zeros = {key: _full(0, kind, device) for key, kind in _INTEGERS.items()}
        first, limit = _full(scale, torch.float32, device), _full(self._limit, torch.float32, device)
        return LossScaleState(scale=first, growth_tracker=_full(tracker, torch.int32, device), limit=limit, **zeros)

    def _check(self, name: str, good: bool, must: str, example: object) -> None:
        """Refuses the value of a field."""
        if not good:
            what = f"{name} must be {must}, not {getattr(self, name)!r}"
            raise AmpError(what, where=type(self).__name__, mend=f"for example {name}={example}")

    def _check_real(self, name: str, low: float, high: float, must: str, example: object) -> None:
        """Takes a real number between two bounds, kept as a Python float."""
        value = getattr(self, name)
        self._check(name, isinstance(value, Real) and not isinstance(value, bool), must, example)
        self._check(name, low <= value <= high, must, example)  # false for a NaN
        object.__setattr__(self, name, float(value))

    def _check_count(self, name: str) -> None:
        """Takes a whole number from 1 that int32 holds."""
        value = getattr(self, name)
        whole = isinstance(value, Integral) and not isinstance(value, bool)
        self._check(name, whole and 1 <= value < 2**31, "a whole number from 1", 1)
        object.__setattr__(self, name, int(value))

    def _check_scale(self, name: str) -> None:
        self._check_real(name, SMALLEST, LARGEST, "a positive number within fp32's normal range", 1024.0)


@dataclass(frozen=True)
class NoLossScale(LossScale):
    """No scaling: the scale is 1.

    Args:
        check_finite: skip steps with non-finite gradients all the same; with False nothing is skipped or counted.
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
        scale: the scale. Powers of two are unscaled without rounding.
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


def _whole(saved: Mapping[str, Any], key: str) -> int:
    """A saved counter; 0 where a GradScaler's state does not have it."""
    value = saved.get(key, 0)
    if isinstance(value, Integral) and not isinstance(value, bool) and 0 <= int(value) < 2**31:
        return int(value)
    raise AmpError(f"the saved loss scale has {key}={value!r}", mend="it must be a whole number from 0")


def _full(value: float, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    return torch.full((), value, dtype=dtype, device=device)


def count_step(state: LossScaleState, nonfinite: Tensor, at_floor: Tensor | bool) -> LossScaleState:
    """The state with its counters after one step; `growth_tracker` not yet brought back to 0 by a growth."""
    bad = (nonfinite != 0).to(torch.int32)
    return state.changed(
        growth_tracker=(state.growth_tracker + 1) * (1 - bad),
        bad_steps=(state.bad_steps + 1) * bad,
        skipped_steps=state.skipped_steps + bad,
        floor_steps=(state.floor_steps + 1) * bad * at_floor,
    )


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
        min: the floor; `None` for fp32's smallest normal number. Steps count as run at the lowest scale
            (`patience`) from the floor on; where it is `None` from 1024 down, so that a run whose gradients stay
            non-finite ends after 26 steps from the first scale, not after 162.
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
        counted = count_step(state, nonfinite, at_floor=state.scale <= self.low)
        grows = counted.growth_tracker == self.growth_interval  # "==" as in GradScaler, also past the interval
        backs_off = counted.bad_steps >= self.hysteresis
        return counted.changed(growth_tracker=counted.growth_tracker * ~grows), backs_off, grows

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
        return counted.changed(scale=scale, limit=limit)

    def with_scale(self, scale: float) -> NormAdaptiveLossScale:
        """These settings, which take a power of two from floor to ceiling; as in `LossScale.with_scale`."""
        super().with_scale(scale)
        if not _is_power_of_two(scale):
            near = _power_of_two(scale)
            raise AmpError(f"loss_scale={scale!r} is no power of two", where=type(self).__name__, mend=f"assign {near}")
        return self

    def _bounds(self) -> tuple[float, float]:
        low, high = super()._bounds()
        return low, (_power_of_two(high) if self.max is None else high)

    def _admit(self, saved: Mapping[str, Any], name: str, value: Any) -> float:
        return _power_of_two(super()._admit(saved, name, value))


def _is_of_constant(saved: Mapping[str, Any]) -> bool:
    """Whether a saved state is that of a scale that never changes, such as that of a step with `enabled=False`."""
    return saved.get("growth_factor") == 1.0 and saved.get("backoff_factor") == 1.0


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
