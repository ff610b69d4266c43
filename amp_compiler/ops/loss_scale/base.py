"""What every loss scale is: settings, and a state of tensors beside them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from amp_compiler.errors import AmpError, LossScaleError

SMALLEST = 2.0**-126  # of fp32's normal numbers: the inverse of every scale from here to 2**126 is normal too
LARGEST = float(torch.finfo(torch.float32).max)
_OWN = "amp_compiler"  # GradScaler.load_state_dict reads its five keys by name and passes over any other
FACTORS = ("growth_factor", "backoff_factor", "growth_interval")
HELD = "_held"  # what a training step keeps with the object it was given; no field, so that it is in no comparison


class LossScaleState(NamedTuple):
    """What changes from step to step: 0-dim tensors on one device.

    Args:
        scale: fp32, what the loss of the next step is multiplied by.
        growth_tracker: int32, finite steps since the scale last changed or a step was last skipped.
        bad_steps: int32, the non-finite steps that hysteresis counts: those in a row up to now, or all since the scale
            last grew.
        skipped_steps: int64, non-finite steps in all.
        floor_steps: int32, non-finite steps in a row at the lowest scale there is, which would have lowered it.
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
    needs_norm: ClassVar[bool] = False  # whether `next` reads its `norm`
    adapts: ClassVar[bool] = False  # whether `next` changes the scale

    def __post_init__(self) -> None:
        self._check_count("patience")

    @property
    @abstractmethod
    def first(self) -> float:
        """The scale of the first step."""

    @property
    def constant(self) -> float | None:
        """The scale where it never changes, so that a pass may fold it; `None` where it is read from the state."""
        return None if self.adapts else self.first

    @property
    def checks_finite(self) -> bool:
        """False where a step need not look for inf and NaN in its gradients, because none is ever skipped."""
        return True

    @property
    def norm_order(self) -> float:
        """Which norm `next` is given: 2, or infinity for the largest magnitude."""
        return 2.0

    def init(self, device: torch.device | str) -> LossScaleState:
        """A new state on `device`, filled there without a copy from the host."""
        return self._state(device, self.first)

    def next(self, state: LossScaleState, nonfinite: Tensor, norm: Tensor | None = None) -> LossScaleState:
        """The state after a step; `state` itself is not changed.

        Args:
            state: the state that the step ran with.
            nonfinite: fp32, 0-dim: 1 where a gradient held an inf or a NaN and the step was skipped, else 0.
            norm: fp32, 0-dim: norm of all unscaled gradients before clipping; read where `needs_norm`. The L2 norm;
                where `norm_order` is infinite the largest magnitude, tensors that hold an inf or a NaN not counted.
        """
        counted = count_step(state, nonfinite, at_floor=True)
        return counted.changed(growth_tracker=state.growth_tracker)

    def inverse(self, state: LossScaleState) -> Tensor:
        """1 / scale of a `state`: fp32, 0-dim, and exact for powers of two."""
        # By way of fp64, as GradScaler does it: compiled fp32 division on a GPU may be off in the last bit.
        return state.scale.double().reciprocal().float()

    def stuck(self, state: LossScaleState) -> Tensor:
        """Bool, 0-dim, on the device: true where by `state` the gradients stay non-finite at the lowest scale."""
        return state.floor_steps >= self.patience

    def with_scale(self, scale: float) -> LossScale:
        """These settings for a run that goes on with another scale, as `step.loss_scale = scale` asks for.

        Args:
            scale: a number above 0.

        Raises:
            AmpError: this loss scale cannot have it.
        """
        if self.constant is not None:
            raise AmpError(
                f"loss_scale={scale!r} cannot be set on a loss scale of mode {self.mode!r}",
                hint="make the step with loss_scale='dynamic' or a number",
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
                hint="look for inf or NaN in data and weights, lower the learning rate, or run these nodes in fp32",
            )

    def state_dict(self, state: LossScaleState) -> dict[str, Any]:
        """Plain numbers under the keys of `torch.amp.GradScaler.state_dict()`, for which it waits for the device.

        What GradScaler has no key for is under the one key `amp_compiler`, which `GradScaler.load_state_dict` ignores.

        Args:
            state: the state to save.
        """
        own: dict[str, Any] = {name: int(getattr(state, name)) for name in _INTEGERS}
        head = {"scale": float(state.scale), **self._factors(), "_growth_tracker": int(state.growth_tracker)}
        return {**head, _OWN: {**own, "limit": float(state.limit)}}

    def load_state_dict(self, saved: Mapping[str, Any], device: torch.device | str) -> LossScaleState:
        """The state that a `state_dict` of this class or of `torch.amp.GradScaler` describes.

        A constant loss scale keeps its own value. A scale outside `min` and `max` is brought inside.

        Args:
            saved: that dict.
            device: where the tensors of the state are made.

        Raises:
            AmpError: where a key is missing or wrong, or the saved factors are not those of this loss scale.
        """
        if not saved and self.constant is not None:  # what a disabled GradScaler writes
            return self.init(device)
        missing = [key for key in ("scale", *FACTORS, "_growth_tracker") if key not in saved]
        if missing:
            hint = "save the state of an enabled torch.amp.GradScaler or of a loss scale"
            raise AmpError(f"the saved loss scale has no {missing[0]!r}", hint=hint)
        own = saved.get(_OWN, {})
        state = self._state(device, self._admit(saved, "scale", saved["scale"]), _whole(saved, "_growth_tracker"))
        counters = {key: full(_whole(own, key), kind, device) for key, kind in _INTEGERS.items()}
        limit = self._admit(saved, "limit", own["limit"]) if "limit" in own else self._limit
        return state.changed(limit=full(limit, torch.float32, device), **counters)

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
            raise AmpError(what, where=type(self).__name__, hint="assign a number inside, or set min= and max= wider")

    def __getstate__(self) -> dict[str, Any]:
        """The settings alone: a copy of a loss scale is another one, with a state of its own."""
        return {name: value for name, value in self.__dict__.items() if name != HELD}

    def _state(self, device: torch.device | str, scale: float, tracker: int = 0) -> LossScaleState:
        zeros = {key: full(0, kind, device) for key, kind in _INTEGERS.items()}
        first, limit = full(scale, torch.float32, device), full(self._limit, torch.float32, device)
        return LossScaleState(scale=first, growth_tracker=full(tracker, torch.int32, device), limit=limit, **zeros)

    def _check(self, name: str, good: bool, must: str, example: object) -> None:
        """Refuses the value of a field."""
        if not good:
            what = f"{name} must be {must}, not {getattr(self, name)!r}"
            raise AmpError(what, where=type(self).__name__, hint=f"for example {name}={example}")

    def _check_real(self, name: str, low: float, high: float, must: str, example: object) -> None:
        """Takes a real number between two bounds, kept as a Python float."""
        value = getattr(self, name)
        self._check(name, isinstance(value, Real) and not isinstance(value, bool), must, example)
        self._check(name, low <= value <= high, must, example)  # false for a NaN
        object.__setattr__(self, name, float(value))

    def _check_count(self, name: str, least: int = 1) -> None:
        """Takes a whole number from `least` on that int32 holds."""
        value = getattr(self, name)
        whole = isinstance(value, Integral) and not isinstance(value, bool)
        self._check(name, whole and least <= value < 2**31, f"a whole number from {least}", 1)
        object.__setattr__(self, name, int(value))

    def _check_scale(self, name: str) -> None:
        self._check_real(name, SMALLEST, LARGEST, "a positive number within fp32's normal range", 1024.0)


def _whole(saved: Mapping[str, Any], key: str) -> int:
    """A saved counter; 0 where a GradScaler's state does not have it."""
    value = saved.get(key, 0)
    if isinstance(value, Integral) and not isinstance(value, bool) and 0 <= int(value) < 2**31:
        return int(value)
    raise AmpError(f"the saved loss scale has {key}={value!r}", hint="it must be a whole number from 0")


def full(value: float, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A 0-dim tensor."""
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
