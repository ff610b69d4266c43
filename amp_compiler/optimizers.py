"""A `torch.optim` optimizer seen as groups of update nodes; its state and `param_groups` stay the single truth."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from amp_compiler.errors import AmpError
from amp_compiler.passes.fuse_update import UpdateGroup

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
            state[column] = torch.zeros_like(parameter, memory_format=torch.preserve_format)


def _sgd_state(state: dict[str, Any], parameter: Tensor, group: Mapping[str, Any]) -> None:
    if group["momentum"] and state.get("momentum_buffer") is None:
        state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)


_ADAM = _Kind(
    "adam",
    lambda group: (("exp_avg", True), ("exp_avg_sq", True), ("max_exp_avg_sq", bool(group["amsgrad"])), ("lows", True),
                   ("step", True)),
    lambda optimizer, group: (bool(group["amsgrad"]), bool(group["maximize"]), _decoupled(optimizer, group)),
    lambda group: (group["lr"], *group["betas"], group["eps"], group["weight_decay"]),
    _adam_state,
)  # fmt: skip
_SGD = _Kind(
    "sgd",
    lambda group: (("momentum_buffer", bool(group["momentum"])), ("lows", True)),
    lambda optimizer, group: (bool(group["nesterov"]), bool(group["maximize"])),
    lambda group: (group["lr"], group["momentum"], group["dampening"], group["weight_decay"]),
    _sgd_state,
    started=True,
)
KINDS: dict[type[torch.optim.Optimizer], _Kind] = {
    torch.optim.AdamW: _ADAM,
    torch.optim.Adam: _ADAM,
    torch.optim.SGD: _SGD,
}


def _decoupled(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    return bool(group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)))


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
        return not same or self.kind.columns(group) != self.spec.columns

    def tensor(self, column: str, number: int) -> Tensor:
        """Today's state tensor of one parameter; made first where the optimizer has none yet."""
        if column == "hyper":
            return self.hyper
        if column == "started":
            return self.started
        parameter = self.parameters[number]
        state = self.optimizer.state[parameter]
        if column not in state or (column == "step" and state[column].device != parameter.device):
            self.kind.state(state, parameter, self.optimizer.param_groups[self.index])
        return state[column]  # type: ignore[no-any-return]


def check_optimizers(optimizer: Any) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers behind `optimizer=`, checked.

    Args:
        optimizer: a `torch.optim` object or a dict of them.

    Raises:
        AmpError: for anything else, for a kind without a fused update, and for a parameter in two optimizers.
    """
    given = tuple(optimizer.values()) if isinstance(optimizer, Mapping) else (optimizer,)
    seen: set[int] = set()
    for one in given:
        if not isinstance(one, torch.optim.Optimizer):
            raise AmpError(f"optimizer is a {type(one).__name__}", mend="pass a torch.optim object, or a dict of them")
        if type(one) not in KINDS:
            known = ", ".join(kind.__name__ for kind in KINDS)
            raise AmpError(f"there is no fused update for {type(one).__name__}", mend=f"use one of {known}")
        for parameter in _parameters(one):
            if id(parameter) in seen:
                raise AmpError("a parameter stands in two optimizers or groups", mend="give each parameter one owner")
            seen.add(id(parameter))
    return given


def _parameters(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def bind(
    optimizers: Sequence[torch.optim.Optimizer], masters: Mapping[int, str], lows: Mapping[int, str]
) -> list[BoundGroup]:
    """Split the parameters that have gradients into update groups.

    Args:
        optimizers: checked optimizers.
        masters: placeholder name of each parameter that has a gradient, by `id`.
        lows: placeholder name of its 16-bit copy, by `id`, where it has one.

    Returns:
        One group per optimizer group, device and presence and type of a 16-bit copy.
    """
    bound: list[BoundGroup] = []
    for optimizer in optimizers:
        for index, group in enumerate(optimizer.param_groups):
            parts: dict[tuple[torch.device, bool], list[Tensor]] = {}
            for parameter in group["params"]:
                if id(parameter) in masters:
                    parts.setdefault((parameter.device, id(parameter) in lows), []).append(parameter)
            bound += [_bind_part(optimizer, index, part, masters, lows) for part in parts.values()]
    return bound


def _bind_part(
    optimizer: torch.optim.Optimizer,
    index: int,
    part: list[Tensor],
    masters: Mapping[int, str],
    lows: Mapping[int, str],
) -> BoundGroup:
    kind, group = KINDS[type(optimizer)], optimizer.param_groups[index]
    hyper = kind.hyper(group)
    device = part[0].device
    spec = UpdateGroup(
        kind.operator,
        tuple(masters[id(parameter)] for parameter in part),
        tuple(lows[id(parameter)] for parameter in part if id(parameter) in lows),
        kind.columns(group),
        len(hyper),
        kind.flags(optimizer, group),
        kind.started,
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
