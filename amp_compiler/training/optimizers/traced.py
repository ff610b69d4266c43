"""Optimizers without a fused update: their own `step()` as a function of tensors, with their real state."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_compiler.errors import AmpError, OptimizerError
from amp_compiler.fx.graph import LOW_TYPES
from amp_compiler.ops.layout import as_real, from_real
from amp_compiler.passes.step.trace_update import OWN_STATE, StateTensor, TracedUpdate
from amp_compiler.training.optimizers.state import send_numbers
from amp_compiler.training.optimizers.traced_calls import StepCalls, compiling, selecting
from amp_compiler.training.optimizers.traced_state import State, initialise, needs_closure, own_step, view_of
from amp_compiler.training.weights import MASTER

# Keys of a group that no step reads: schedulers keep their notes there.
_NOTES = ("params", "lr", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr", "param_names")
# Its step reads `param.norm().item()` and its step count, only to compute with them.
_READS_VALUES = (torch.optim.Adafactor,)


def check_traceable(optimizer: Optimizer) -> None:
    """Refuse what no trace can express.

    Raises:
        AmpError: for an optimizer that needs a closure or sparse gradients, or has tensors for settings.
    """
    name = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise needs_closure(optimizer)
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise AmpError(f"{name} needs sparse gradients, and a training step makes dense ones", hint="use Adam or AdamW")
    for group in optimizer.param_groups:
        for key, value in group.items():
            if isinstance(value, Tensor) and key != "lr":
                raise AmpError(f"'{key}' of {name} is a tensor", hint="give it as a number")


@dataclass
class TracedGroup:
    """All parameters of one optimizer that have a gradient, with the way to their state.

    Args:
        spec: what the graph is told.
        optimizer: the optimizer.
        parameters: the weights, in the order of the groups.
        rates: FP64 vector of learning rates on the device, one for each group.
        baked: the hyperparameters that are part of the graph.
        stale: as of a `BoundGroup`.
    """

    spec: TracedUpdate
    optimizer: Optimizer
    parameters: tuple[Tensor, ...]
    rates: Tensor
    baked: list[dict[str, Any]]
    stale: Tensor
    _written: Sequence[Any] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        self.entries = {(entry.parameter, entry.key): entry for entry in self.spec.states}

    def refresh(self) -> None:
        """Read the learning rates; what schedulers changed since the last step goes to the device, without a sync."""
        values = tuple(group.get("lr", 0.0) for group in self.optimizer.param_groups)
        self._written = send_numbers(self.rates, values, self._written)

    def publish(self) -> bool:
        """As of a `BoundGroup`; all state is made before the first update."""
        return False

    def flags_changed(self) -> bool:
        """True where a hyperparameter other than the learning rate is no longer what was traced."""
        return _hyperparameters(self.optimizer) != self.baked

    def tensor(self, column: str, number: int) -> Tensor:
        """Today's state tensor of one parameter, real; made first where there is none yet."""
        if column == "lr":
            return self.rates
        if column == "stale":
            return self.stale
        parameter = self.parameters[number]
        state = self.optimizer.state[parameter]
        key = column.removeprefix(OWN_STATE)
        if set(state) <= {MASTER}:
            initialise(self.optimizer, [parameter])
        expected = self.entries[number, key]
        kept = state.get(key)
        held = as_real(kept) if isinstance(kept, Tensor) else None
        if held is None or (tuple(held.shape), held.dtype) != (expected.shape, expected.dtype):
            raise AmpError(
                f"the state of {self.spec.name} has no '{key}' of shape {list(expected.shape)} and type"
                f" {expected.dtype}",
                hint="load a state_dict of the same optimizer over the same parameters",
            )
        if held.device != parameter.device or held.stride() != expected.stride:  # loaded from elsewhere
            device, dtype = parameter.device, expected.dtype
            held = torch.empty_strided(expected.shape, expected.stride, dtype=dtype, device=device).copy_(held)
            state[key] = from_real(held, kept.dtype)
        return held


def bind_traced(optimizer: Optimizer, masters: Mapping[int, str], low_weights: Mapping[int, str]) -> list[TracedGroup]:
    """The parameters of an optimizer that have gradients, as one traced update.

    All groups stand in one trace, because an optimizer may compute something over all of its parameters.

    Args:
        optimizer: checked by `check_traceable`.
        masters: placeholder name of each parameter that has a gradient, by `id`.
        low_weights: placeholder name of its 16-bit copy, by `id`, where it has one.

    Returns:
        One group, or none where no parameter has a gradient.

    Raises:
        AmpError: the optimizer cannot be traced.
        OptimizerError: the state cannot be made before the first step.
    """
    check_traceable(optimizer)
    places = [(n, p) for n, group in enumerate(optimizer.param_groups) for p in group["params"] if id(p) in masters]
    parameters = [parameter for _, parameter in places]
    if not parameters:
        return []
    initialise(optimizer, parameters)
    states = tuple(
        StateTensor(key, number, tuple(as_real(value).shape), as_real(value).stride(), as_real(value).dtype)
        for number, parameter in enumerate(parameters)
        for key, value in optimizer.state[parameter].items()
        if isinstance(value, Tensor) and key != MASTER
    )
    odd = [entry.key for entry in states if not str(entry.key).isidentifier()]
    if odd:
        raise OptimizerError(f"{odd[0]!r} is a key of the optimizer's state", hint="use names as keys")
    spec = TracedUpdate(
        type(optimizer).__name__,
        tuple(masters[id(parameter)] for parameter in parameters),
        tuple(low_weights.get(id(parameter)) for parameter in parameters),
        states,
        len(optimizer.param_groups),
        _own_update(optimizer, places, states),
        tuple(parameter.dtype in LOW_TYPES for parameter in parameters),
    )
    device = parameters[0].device
    rates = torch.zeros(len(optimizer.param_groups), dtype=torch.float64, device=device)
    stale = torch.zeros(len(parameters), dtype=torch.uint8, device=device)
    return [TracedGroup(spec, optimizer, tuple(parameters), rates, _hyperparameters(optimizer), stale)]


def _copies(tensors: Sequence[Tensor], dtypes: list[torch.dtype]) -> list[Tensor]:
    """Copies of real tensors, complex where what they stand for is."""
    return [from_real(tensor.clone(), dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)]


def _hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key not in _NOTES} for group in optimizer.param_groups]


def _own_update(
    optimizer: Optimizer, places: list[tuple[int, Tensor]], states: tuple[StateTensor, ...]
) -> Callable[..., tuple[list[Tensor], list[Tensor]]]:
    """The optimizer's step as a function of parameters, gradients, state tensors and learning rates."""
    name, held = type(optimizer).__name__, [optimizer.state[parameter] for _, parameter in places]
    numbers: list[State] = [{k: v for k, v in state.items() if not isinstance(v, Tensor)} for state in held]
    groups_of, dtypes = [place for place, _ in places], [parameter.dtype for _, parameter in places]
    state_dtypes = [held[entry.parameter][entry.key].dtype for entry in states]

    def update(
        masters: Sequence[Tensor], grads: Sequence[Tensor], state_values: Sequence[Tensor], rates: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        own, grads = _copies(masters, dtypes), _copies(grads, dtypes)
        state: dict[Tensor, State] = defaultdict(dict)
        for parameter, kept in zip(own, numbers, strict=True):
            state[parameter] = dict(kept)
        for entry, value in zip(states, _copies(state_values, state_dtypes), strict=True):
            # Counters are computed with in fp64, as the Python numbers that they are elsewhere.
            counts = (
                value.dim() == 0 and value.is_floating_point() and (own[entry.parameter].dim() or entry.key == "step")
            )
            state[own[entry.parameter]][entry.key] = value.double() if counts else value
        groups = [
            {**group, "params": [p for p, place in zip(own, groups_of, strict=True) if place == number]}
            | ({"lr": rate} if "lr" in group else {})
            for number, (group, rate) in enumerate(zip(optimizer.param_groups, rates, strict=True))
        ]
        view = view_of(optimizer, groups, state)
        before = _numbers(view)
        reads = isinstance(optimizer, _READS_VALUES)
        calls = StepCalls(name, {id(p): g for p, g in zip(own, grads, strict=True)}, reads=reads)
        with torch.no_grad(), compiling(), selecting(type(optimizer).step) if reads else nullcontext(), calls:
            own_step(view)
        if _numbers(view) != before:
            raise _keeps_numbers(name, "an attribute or a hyperparameter")
        for number, (parameter, kept) in enumerate(zip(own, numbers, strict=True)):
            keys = {entry.key for entry in states if entry.parameter == number} | set(kept)
            if set(state[parameter]) != keys:
                extra = ", ".join(sorted(set(state[parameter]) ^ keys))
                raise OptimizerError(
                    f"step() of {name} adds or removes '{extra}' in its state",
                    hint="make all of the state before the first step, from zeros",
                )
            for key, value in kept.items():
                if state[parameter][key] != value:
                    raise _keeps_numbers(name, f"'{key}'")
        return list(map(as_real, own)), [as_real(state[own[entry.parameter]][entry.key]) for entry in states]

    return update


def _keeps_numbers(name: str, what: str) -> OptimizerError:
    return OptimizerError(
        f"step() of {name} changes {what}, which is a number and would stay as it is in a graph",
        hint="keep what changes as a tensor in the optimizer's state",
    )


def _numbers(view: Optimizer) -> list[dict[str, Any]]:
    """Plain values of an optimizer that its step might change."""
    attributes = {k: v for k, v in view.__dict__.items() if isinstance(v, (int, float, str)) and not k.startswith("_")}
    return [attributes, *_hyperparameters(view)]
