"""A `torch.optim` optimizer seen as groups of update nodes; its state and `param_groups` stay the single truth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from amp_compiler.errors import AmpError
from amp_compiler.fx.graph import LOW_TYPES
from amp_compiler.ops.cuda.update import new_stale
from amp_compiler.ops.layout import as_real
from amp_compiler.ops.update.fused import L1_DECAY, STEP, FusedOptimizer, l1_of
from amp_compiler.ops.update.operators import FUSED, FUSED_NAMES
from amp_compiler.ops.update.rounding import Storage
from amp_compiler.passes.step.update_group import UpdateGroup
from amp_compiler.ranks.parts import UNSPLIT, Parts
from amp_compiler.training.optimizers.state import laid_out, retyped, send_numbers
from amp_compiler.training.optimizers.traced import TracedGroup, bind_traced, check_traceable
from amp_compiler.training.weights import COMPENSATION

KINDS: dict[type[torch.optim.Optimizer], FusedOptimizer] = {cls: one for one in FUSED for cls in one.classes}


def _make_state(
    kind: FusedOptimizer,
    state: dict[str, Any],
    parameter: Tensor,
    group: Mapping[str, Any],
    zeros: Callable[[Tensor], Tensor],
) -> None:
    """Give a parameter what its optimizer keeps and has not made yet."""
    if kind.counts:
        step = state.get(STEP)
        if step is None:
            state[STEP] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        elif not isinstance(step, Tensor) or step.device != parameter.device or step.dtype != torch.float32:
            state[STEP] = torch.as_tensor(step, dtype=torch.float32).to(parameter.device)
    for one in kind.states:
        if one.used(group) and state.get(one.name) is None:
            state[one.name] = zeros(parameter)


def _has_begun(kind: FusedOptimizer, state: Mapping[str, Any]) -> bool:
    """Whether a parameter has its first state, which tells as for torch whether its first update was made."""
    return state.get(kind.states[0].name) is not None


def _zeros(parameter: Tensor) -> Tensor:
    """New state in the layout of a parameter, in FP32 where it is 16-bit."""
    dtype = torch.float32 if parameter.dtype in LOW_TYPES else parameter.dtype
    return torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format)


def _flags(kind: FusedOptimizer, optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> tuple[bool, ...]:
    return tuple(read(optimizer, group) for read in kind.flags.values())


def _columns(kind: FusedOptimizer, group: Mapping[str, Any], storage: int | None) -> tuple[tuple[str, bool], ...]:
    """State lists of the operator; without masters the list of 16-bit copies gives way to the compensations."""
    states = ((one.name, one.used(group)) for one in kind.states)
    beside = ("low_weights", True) if storage is None else (COMPENSATION, storage == Storage.KAHAN)
    return (*states, beside, *([(STEP, True)] if kind.counts else []))


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
        stale: UINT8 flag of each parameter on the device: whether an update found that it, or its 16-bit copy, was
            written past its version counter; on a GPU more, see `new_stale`.
        parts: makes this rank's part of a state, where each rank has one; `None` where the state is whole.
    """

    spec: UpdateGroup
    kind: FusedOptimizer
    optimizer: torch.optim.Optimizer
    index: int
    parameters: tuple[Tensor, ...]
    hyper: Tensor
    started: Tensor
    stale: Tensor
    parts: Parts | None = None
    _written: Sequence[Any] = field(default=(), repr=False)
    _begun: set[bool] = field(default_factory=set, repr=False)
    _waiting: dict[Tensor, dict[str, Any]] = field(default_factory=dict, repr=False)  # states, until the first update

    def refresh(self) -> None:
        """Read the hyperparameters; what schedulers changed since the last step goes to the device, without a sync."""
        group = self.optimizer.param_groups[self.index]
        values = tuple(read(group) for read in self.kind.hyper.values())
        self._written = send_numbers(self.hyper, values, self._written)
        if self.spec.started:
            self._find_started()

    def _find_started(self) -> None:
        """Whether the first update was made, where it is not like any other (SGD with dampened momentum).

        As for torch it was where there is a first state, whatever its values. One that is made here stands beside the
        optimizer's state until an update was applied, see `publish`.
        """
        if not self._asks():
            return
        if self.parts is not None:
            name = type(self.optimizer).__name__
            raise AmpError(f"{name} with dampening asks for a whole momentum, and it is split", hint=UNSPLIT)
        begun = {_has_begun(self.kind, self.optimizer.state.get(one, {})) for one in self.parameters}
        if len(begun) > 1:
            raise AmpError(
                f"optimizer.state holds '{self.kind.states[0].name}' for some parameters of a group and not for others",
                hint="make the training step anew, or give all of them one",
            )
        if begun == {True}:
            self._waiting.clear()
        if begun != self._begun:
            self.started.fill_(begun == {True})
            self._begun = begun

    def _asks(self) -> bool:
        started = self.kind.started
        return started is not None and started(self.optimizer.param_groups[self.index])

    def publish(self) -> bool:
        """Behind a call: give the optimizer the states that were made for its first update, if that was applied now."""
        if not self._waiting or not bool(self.started):
            return False
        for parameter, state in self._waiting.items():
            self.optimizer.state[parameter].update(state)
        self._waiting.clear()
        self._begun = {True}  # as the update has set the flag
        return True

    def flags_changed(self) -> bool:
        """True where a setting that is part of the graph (amsgrad, nesterov, …) is no longer what was compiled."""
        group = self.optimizer.param_groups[self.index]
        same = _flags(self.kind, self.optimizer, group) == self.spec.flags
        return not same or _columns(self.kind, group, self.spec.storage) != self.spec.columns

    def tensor(self, column: str, number: int) -> Tensor:
        """Today's state tensor of one parameter, real; made first where there is none yet."""
        if column in ("hyper", "started", "stale"):
            return getattr(self, column)  # type: ignore[no-any-return]
        return as_real(self._state_tensor(column, self.parameters[number]))

    def _state_tensor(self, column: str, parameter: Tensor) -> Tensor:
        waits = column == self.kind.states[0].name and self._asks()
        if waits and not _has_begun(self.kind, self.optimizer.state.get(parameter, {})):
            state = self._waiting.setdefault(parameter, {})
        else:
            state = self.optimizer.state[parameter]
        if column not in state or column == STEP:
            new = _zeros if self.parts is None else self.parts.zeros
            _make_state(self.kind, state, parameter, self.optimizer.param_groups[self.index], new)
        if column == COMPENSATION:
            if column not in state:
                state[column] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            retyped(state, column, parameter.dtype)
            return laid_out(state, column, parameter)
        if column == STEP:
            return state[column]  # type: ignore[no-any-return]
        if self.spec.moment is not None:
            retyped(
                state, column, self.spec.moment, wide=self.spec.storage is not None and not self.kind.state_as_weight
            )
        if self.parts is not None:
            return self.parts.held(state, column, parameter)
        return laid_out(state, column, parameter)


def check_optimizers(optimizer: Any) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers behind `optimizer=`, checked.

    Args:
        optimizer: a `torch.optim` object or a dict of them; what Accelerate or Lightning put around one is taken off.

    Raises:
        AmpError: for anything else, for an optimizer that can be neither fused nor traced, for a
            parameter in two optimizers, and for an L1 decay that is no number of at least 0.
    """
    optimizers = tuple(map(_innermost, optimizer.values() if isinstance(optimizer, Mapping) else [optimizer]))
    seen: set[int] = set()
    for one in optimizers:
        if not isinstance(one, torch.optim.Optimizer):
            raise AmpError(f"optimizer is a {type(one).__name__}", hint="pass a torch.optim object, or a dict of them")
        if type(one) not in KINDS:
            check_traceable(one)
        _check_l1(one)
        for parameter in (parameter for group in one.param_groups for parameter in group["params"]):
            if id(parameter) in seen:
                raise AmpError("a parameter stands in two optimizers or groups", hint="give each parameter one owner")
            seen.add(id(parameter))
    return optimizers


def _innermost(optimizer: Any) -> Any:
    """The optimizer behind wrappers, which keep it in `.optimizer`."""
    while isinstance(optimizer, torch.optim.Optimizer) and type(optimizer) not in KINDS:
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer) or inner is optimizer:
            break
        optimizer = inner
    return optimizer


def _check_l1(optimizer: torch.optim.Optimizer) -> None:
    """L1 decay is a number, and is given only to an optimizer whose update knows it."""
    kind = KINDS.get(type(optimizer))
    for decay in map(l1_of, optimizer.param_groups):
        if not isinstance(decay, Tensor) and (not isinstance(decay, (int, float)) or not decay >= 0):
            raise AmpError(f"{L1_DECAY} is {decay!r}", hint="give a number of at least 0")
        if (isinstance(decay, Tensor) or decay) and (kind is None or L1_DECAY not in kind.hyper):
            known = ", ".join(cls.__name__ for cls, one in KINDS.items() if L1_DECAY in one.hyper)
            raise AmpError(
                f"{type(optimizer).__name__} knows no {L1_DECAY}", hint=f"use {known}, or remove the key from the group"
            )


def check_updates(optimizers: Sequence[torch.optim.Optimizer], low: bool, shards: bool) -> None:
    """Refuse weights without FP32 masters, and updates part by part, where an optimizer's update has no such form.

    Args:
        optimizers: checked optimizers.
        low: whether the weights have no masters.
        shards: whether the update is split over the ranks.

    Raises:
        AmpError: names the first optimizer whose own code is traced, which may look at whole weights; there are no
            masters that could be split.
    """
    traced = next((type(one).__name__ for one in optimizers if type(one) not in KINDS), "")
    if low and traced:
        raise AmpError(
            f"{traced} updates FP32 masters only, and the rules say weights: {{master: low}}",
            hint=f"use {FUSED_NAMES}, or weights: {{master: fp32}}",
        )
    if shards and low:
        raise AmpError(
            "the rules say reduce: {shard: update} and weights: {master: low}, which has no masters to split",
            hint=f"write weights: {{master: fp32}}, or {UNSPLIT}",
        )
    if shards and traced:
        raise AmpError(
            f"the update of {traced} may need whole weights (its own code is traced), and the rules say"
            " reduce: {shard: update}",
            hint=f"use {FUSED_NAMES}, or {UNSPLIT}",
        )


def bind(
    optimizers: Sequence[torch.optim.Optimizer],
    masters: Mapping[int, str],
    low_weights: Mapping[int, str],
    stored: Mapping[int, Storage] | None = None,
    parts: Parts | None = None,
    buckets: Mapping[int, int] | None = None,
) -> list[BoundGroup | TracedGroup]:
    """Split the parameters that have gradients into update groups.

    Args:
        optimizers: checked optimizers.
        masters: placeholder name of each parameter that has a gradient, by `id`.
        low_weights: placeholder name of its 16-bit copy, by `id`, where it has one.
        stored: how a 16-bit parameter without a master is stored, by `id`.
        parts: those that are split over the ranks.
        buckets: number of the bucket that the gradient of such a one was sent in, by `id`.

    Returns:
        One group per optimizer group, device, type, presence of a 16-bit copy, storage, bucket and, with dampening,
        whether it has begun; one in all for an optimizer whose own code is traced.
    """
    stored, buckets = stored or {}, buckets or {}
    bound: list[BoundGroup | TracedGroup] = []
    for optimizer in optimizers:
        if type(optimizer) not in KINDS:
            bound += bind_traced(optimizer, masters, low_weights)
            continue
        kind = KINDS[type(optimizer)]
        for index, group in enumerate(optimizer.param_groups):
            asks = kind.started is not None and kind.started(group)
            alike: dict[tuple[Any, ...], list[Tensor]] = {}
            for parameter in group["params"]:
                number = id(parameter)
                if number in masters:
                    begun = not asks or _has_begun(kind, optimizer.state.get(parameter, {}))
                    place = stored.get(number), buckets.get(number), number in low_weights, begun
                    alike.setdefault((*place, parameter.device, parameter.dtype), []).append(parameter)
            for (storage, bucket, *_), some in alike.items():
                split = None if bucket is None else parts
                bound.append(_bind_part(optimizer, index, some, masters, low_weights, storage, split))
    return bound


def _bind_part(
    optimizer: torch.optim.Optimizer,
    index: int,
    part: list[Tensor],
    masters: Mapping[int, str],
    low_weights: Mapping[int, str],
    storage: Storage | None,
    parts: Parts | None,
) -> BoundGroup:
    kind, group = KINDS[type(optimizer)], optimizer.param_groups[index]
    size = len(kind.hyper)
    device, dtype = part[0].device, part[0].dtype
    moment = torch.float32 if dtype in LOW_TYPES else None
    if storage is not None and kind.state_as_weight:
        moment = dtype
    spec = UpdateGroup(
        kind.name if storage is None else f"{kind.name}_low",
        tuple(masters[id(parameter)] for parameter in part),
        tuple(low_weights[id(parameter)] for parameter in part if id(parameter) in low_weights),
        _columns(kind, group, storage),
        size,
        _flags(kind, optimizer, group),
        kind.started is not None,
        storage,
        moment,
        1 if parts is None else parts.count,
    )
    return BoundGroup(
        spec,
        kind,
        optimizer,
        index,
        tuple(part),
        torch.zeros(size, dtype=torch.float64, device=device),
        torch.ones((), device=device),
        new_stale([0 if spec.takes else one.numel() for one in part], device).to(device),
        parts,
    )
