"""A `torch.optim` optimizer seen as groups of update nodes; its state and `param_groups` stay the single truth."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from amp_compiler.errors import AmpError
from amp_compiler.fx.graph import LOW_TYPES
from amp_compiler.ops.update.rounding import Storage
from amp_compiler.passes.step.update_group import UpdateGroup
from amp_compiler.training.optimizer_state import laid_out, retyped
from amp_compiler.training.traced_optimizers import L1_DECAY, TracedGroup, bind_traced, check_hooks, check_traceable
from amp_compiler.training.weights import COMPENSATION

_ADAM_COLUMNS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


@dataclass(frozen=True)
class _Kind:
    """How one class of optimizer maps to an update operator."""

    operator: str
    columns: Callable[[Mapping[str, Any]], tuple[tuple[str, bool], ...]]
    flags: Callable[[torch.optim.Optimizer, Mapping[str, Any]], tuple[bool, ...]]
    hyper: Callable[[Mapping[str, Any]], tuple[Any, ...]]
    state: Callable[[dict[str, Any], Tensor, Mapping[str, Any]], None]
    started: bool = False


def _adam_state(state: dict[str, Any], parameter: Tensor, group: Mapping[str, Any]) -> None:
    step = state.get("step")
    if step is None:
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
    elif not isinstance(step, Tensor) or step.device != parameter.device or step.dtype != torch.float32:
        state["step"] = torch.as_tensor(step, dtype=torch.float32).to(parameter.device)
    for column in _ADAM_COLUMNS[: 3 if group["amsgrad"] else 2]:
        if column not in state:
            state[column] = _zeros(parameter)


def _zeros(parameter: Tensor) -> Tensor:
    """New state in the layout of a parameter, in FP32 where it is 16-bit."""
    dtype = torch.float32 if parameter.dtype in LOW_TYPES else parameter.dtype
    return torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format)


def _sgd_state(state: dict[str, Any], parameter: Tensor, group: Mapping[str, Any]) -> None:
    if group["momentum"] and state.get("momentum_buffer") is None:
        state["momentum_buffer"] = _zeros(parameter)


_ADAM = _Kind(
    "adam",
    lambda group: (("exp_avg", True), ("exp_avg_sq", True), ("max_exp_avg_sq", bool(group["amsgrad"])), ("lows", True),
                   ("step", True)),
    lambda optimizer, group: (bool(group["amsgrad"]), bool(group["maximize"]), _decoupled(optimizer, group)),
    lambda group: (group["lr"], *group["betas"], group["eps"], group["weight_decay"], _l1(group)),
    _adam_state,
)  # fmt: skip
_SGD = _Kind(
    "sgd",
    lambda group: (("momentum_buffer", bool(group["momentum"])), ("lows", True)),
    lambda optimizer, group: (bool(group["nesterov"]), bool(group["maximize"])),
    lambda group: (group["lr"], group["momentum"], group["dampening"], group["weight_decay"], _l1(group)),
    _sgd_state,
    started=True,
)
KINDS: dict[type[torch.optim.Optimizer], _Kind] = {
    torch.optim.AdamW: _ADAM,
    torch.optim.Adam: _ADAM,
    torch.optim.SGD: _SGD,
}


def _l1(group: Mapping[str, Any]) -> Any:
    """The L1 decay of a group, an extra key that torch keeps and does not read; it is 0 where there is none."""
    return group.get(L1_DECAY, 0.0)


def _decoupled(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    return bool(group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)))


def _columns(kind: _Kind, group: Mapping[str, Any], storage: int | None) -> tuple[tuple[str, bool], ...]:
    """State lists of the operator; without masters the list of 16-bit copies gives way to the compensations."""
    columns = kind.columns(group)
    if storage is None:
        return columns
    kahan = (COMPENSATION, storage == Storage.KAHAN)
    return tuple(kahan if column == "lows" else (column, used) for column, used in columns)


@dataclass
class BoundGroup:
    """One update node's parameters, with the way to their optimizer state.

    Args:
        spec: what the graph is told.
        kind: how the optimizer maps to the operator.
        optimizer: the optimizer.
        index: which of its `param_groups`.
        parameters: the masters, in order.
        hyper: FP64 vector of hyperparameters on the device.
        started: FP32 flag on the device: whether an update was applied before.
    """

    spec: UpdateGroup
    kind: _Kind
    optimizer: torch.optim.Optimizer
    index: int
    parameters: tuple[Tensor, ...]
    hyper: Tensor
    started: Tensor
    _written: tuple[Any, ...] = field(default=(), repr=False)
    _checked: dict[tuple[str, int], tuple[weakref.ref[Tensor], Any]] = field(default_factory=dict, repr=False)

    def refresh(self) -> None:
        """Read the hyperparameters; what schedulers changed since the last step goes to the device, without a sync."""
        values = self.kind.hyper(self.optimizer.param_groups[self.index])
        if any(isinstance(value, Tensor) for value in values):
            for place, value in enumerate(values):
                if isinstance(value, Tensor):
                    self.hyper[place].copy_(value, non_blocking=True)
                else:
                    self.hyper[place].fill_(value)
        elif values != self._written:
            self.hyper.copy_(torch.tensor(values, dtype=torch.float64), non_blocking=True)
            self._written = values
        if self.spec.started:
            self._find_started()

    def _find_started(self) -> None:
        """Whether SGD's momentum has begun; without dampening its first step is like any other.

        It is read off the buffers, which are zeros until a step is applied, so that the optimizer's state is all there
        is: it holds across batch shapes, skipped steps and checkpoints.
        """
        group = self.optimizer.param_groups[self.index]
        if group["momentum"] and group["dampening"]:
            begun = [self.tensor("momentum_buffer", number).any() for number in range(len(self.parameters))]
            self.started.copy_(torch.stack(begun).any())

    def flags_changed(self) -> bool:
        """True where a setting that is part of the graph (amsgrad, nesterov, …) is no longer what was compiled."""
        group = self.optimizer.param_groups[self.index]
        same = self.kind.flags(self.optimizer, group) == self.spec.flags
        return not same or _columns(self.kind, group, self.spec.storage) != self.spec.columns

    def tensor(self, column: str, number: int) -> Tensor:
        """Today's state tensor of one parameter; made first where the optimizer has none yet."""
        if column == "hyper":
            return self.hyper
        if column == "started":
            return self.started
        parameter = self.parameters[number]
        state = self.optimizer.state[parameter]
        place = parameter.data_ptr(), parameter.stride()
        known = self._checked.get((column, number))
        found: Tensor | None = state.get(column)
        if known is not None and found is not None and found is known[0]() and place == known[1]:
            return found
        made = self._state_tensor(column, parameter, state)
        self._checked[column, number] = weakref.ref(made), place
        return made

    def _state_tensor(self, column: str, parameter: Tensor, state: dict[str, Any]) -> Tensor:
        if column not in state or (column == "step" and state[column].device != parameter.device):
            self.kind.state(state, parameter, self.optimizer.param_groups[self.index])
        if column == COMPENSATION:
            zeros = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state.setdefault(COMPENSATION, zeros)
            retyped(state, column, parameter.dtype, low=True)
            return laid_out(state, column, parameter)
        if column == "step":
            return state[column]  # type: ignore[no-any-return]
        if self.spec.moment is not None:
            retyped(state, column, self.spec.moment, low=self.spec.storage is not None)
        return laid_out(state, column, parameter)


def check_optimizers(optimizer: Any) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers behind `optimizer=`, checked.

    Args:
        optimizer: a `torch.optim` object or a dict of them.

    Raises:
        AmpError: for anything else, for an optimizer that can be neither fused nor traced or has step hooks, for a
            parameter in two optimizers, and for an L1 decay that is no number of at least 0.
    """
    given = tuple(optimizer.values()) if isinstance(optimizer, Mapping) else (optimizer,)
    seen: set[int] = set()
    for one in given:
        if not isinstance(one, torch.optim.Optimizer):
            raise AmpError(f"optimizer is a {type(one).__name__}", mend="pass a torch.optim object, or a dict of them")
        check_hooks(one)
        if type(one) not in KINDS:
            check_traceable(one)
        for group in one.param_groups:
            decay = _l1(group)
            if not isinstance(decay, Tensor) and (not isinstance(decay, (int, float)) or not decay >= 0):
                raise AmpError(f"{L1_DECAY} is {decay!r}", mend="give a number of at least 0")
        for parameter in _parameters(one):
            if id(parameter) in seen:
                raise AmpError("a parameter stands in two optimizers or groups", mend="give each parameter one owner")
            seen.add(id(parameter))
    return given


def check_storage(optimizers: Sequence[torch.optim.Optimizer], low: bool) -> None:
    """Refuse weights without FP32 masters for optimizers whose update cannot store them.

    Args:
        optimizers: checked optimizers.
        low: whether the weights have no masters.

    Raises:
        AmpError: names the first optimizer without such an update.
    """
    for one in optimizers if low else ():
        if type(one) not in KINDS:
            known = ", ".join(kind.__name__ for kind in KINDS)
            raise AmpError(
                f"{type(one).__name__} updates FP32 masters only, and the rules say weights: {{master: low}}",
                mend=f"use one of {known}, or weights: {{master: fp32}}",
            )


def _parameters(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def bind(
    optimizers: Sequence[torch.optim.Optimizer],
    masters: Mapping[int, str],
    lows: Mapping[int, str],
    stored: Mapping[int, Storage] | None = None,
) -> list[BoundGroup | TracedGroup]:
    """Split the parameters that have gradients into update groups.

    Args:
        optimizers: checked optimizers.
        masters: placeholder name of each parameter that has a gradient, by `id`.
        lows: placeholder name of its 16-bit copy, by `id`, where it has one.
        stored: how a 16-bit parameter without a master is stored, by `id`.

    Returns:
        One group per optimizer group, device, type, presence of a 16-bit copy and storage; one in all for an
        optimizer whose own code is traced.
    """
    stored = stored or {}
    bound: list[BoundGroup | TracedGroup] = []
    for optimizer in optimizers:
        if type(optimizer) not in KINDS:
            bound += bind_traced(optimizer, masters, lows, stored)
            continue
        for index, group in enumerate(optimizer.param_groups):
            parts: dict[tuple[Any, ...], list[Tensor]] = {}
            for parameter in group["params"]:
                if id(parameter) in masters:
                    key = (parameter.device, parameter.dtype, id(parameter) in lows, stored.get(id(parameter)))
                    parts.setdefault(key, []).append(parameter)
            bound += [
                _bind_part(optimizer, index, part, masters, lows, stored.get(id(part[0]))) for part in parts.values()
            ]
    return bound


def _bind_part(
    optimizer: torch.optim.Optimizer,
    index: int,
    part: list[Tensor],
    masters: Mapping[int, str],
    lows: Mapping[int, str],
    storage: Storage | None,
) -> BoundGroup:
    kind, group = KINDS[type(optimizer)], optimizer.param_groups[index]
    hyper = kind.hyper(group)
    device, dtype = part[0].device, part[0].dtype
    moment = torch.float32 if dtype in LOW_TYPES else None
    if storage is not None and kind.operator == "sgd":
        moment = dtype  # as NVCaffe; Adam's second moment would stagnate in 16 bits, where 0.999 * v rounds to v
    spec = UpdateGroup(
        kind.operator if storage is None else f"{kind.operator}_low",
        tuple(masters[id(parameter)] for parameter in part),
        tuple(lows[id(parameter)] for parameter in part if id(parameter) in lows),
        _columns(kind, group, storage),
        len(hyper),
        kind.flags(optimizer, group),
        kind.started,
        storage,
        moment,
    )
    return BoundGroup(
        spec,
        kind,
        optimizer,
        index,
        tuple(part),
        torch.zeros(len(hyper), dtype=torch.float64, device=device),
        torch.ones((), device=device),
    )
