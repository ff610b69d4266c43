"""The state of an optimizer that is traced: made before the first step, by the optimizer's own code."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_compiler.errors import OptimizerError
from amp_compiler.fx.graph import LOW_TYPES
from amp_compiler.ops.update.operators import FUSED_NAMES
from amp_compiler.training.optimizers.state import narrowed
from amp_compiler.training.weights import MASTER

# Switches of how torch computes an update, with what a traced one needs.
_FORCED = {"capturable": True, "foreach": False, "fused": False, "differentiable": False}
State = dict[str, Any]


def view_of(optimizer: Optimizer, groups: list[dict[str, Any]], state: Any) -> Optimizer:
    """An optimizer of the same class over other tensors; the real one stays as it is.

    Args:
        optimizer: gives the class, and every attribute but these.
        groups: the view's `param_groups`; switches of how torch computes are set for a trace.
        state: the view's `state`.
    """
    view: Optimizer = type(optimizer).__new__(type(optimizer))
    view.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
    view.param_groups = [
        {**group, **{key: value for key, value in _FORCED.items() if key in group}} for group in groups
    ]
    view.defaults = {**optimizer.defaults, "differentiable": False}
    view.state = state
    return view


def own_step(view: Optimizer) -> None:
    """Run the step of a view's class, without the layer that torch puts around it for hooks and the profiler.

    Args:
        view: as `view_of` gives it.
    """
    step: Callable[..., Any] = type(view).step
    step = step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]
    try:
        step(view)
    except Exception as cause:
        if _needs_closure(step, view, cause):
            raise needs_closure(view) from cause
        raise


def _needs_closure(step: Callable[..., Any], view: Optimizer, failure: Exception) -> bool:
    """Whether a step that fails without a closure calls the one that it is given, and then fails otherwise or not."""
    calls: list[None] = []

    def closure() -> Tensor:
        calls.append(None)
        return torch.zeros(())

    try:
        step(view, closure)
    except Exception as second:  # noqa: BLE001  # of the user's own code
        return bool(calls) and (type(second), str(second)) != (type(failure), str(failure))
    return bool(calls)


def needs_closure(optimizer: Optimizer) -> OptimizerError:
    """The error of an optimizer that runs forward and backward itself, as LBFGS and sharpness-aware ones (SAM) do."""
    return OptimizerError(
        f"{type(optimizer).__name__} needs a closure that computes the loss again,"
        " and a training step computes it once",
        hint="compile the model alone, model = amp.compile(model), and call optimizer.step(closure) in your own loop",
    )


def initialise(optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
    """Make the state that an optimizer makes at its first step, on the devices of the parameters.

    Args:
        optimizer: its `state` is filled; what is there stays.
        parameters: the parameters in question.

    Raises:
        OptimizerError: the state begins from the gradient, or its code fails.
        AmpError: state of a 16-bit parameter has been narrowed.
    """
    for parameter in parameters:
        _widen(parameter, optimizer.state.get(parameter, {}))
    wanted = set(map(id, parameters))
    groups = [{**group, "params": [p for p in group["params"] if id(p) in wanted]} for group in optimizer.param_groups]
    make = _init_groups if hasattr(type(optimizer), "_init_group") else _record_first_step
    try:
        first_values = make(optimizer, groups)
    except OptimizerError:
        raise
    except Exception as cause:
        raise OptimizerError(
            f"{type(optimizer).__name__} cannot make its state: {type(cause).__name__}: {cause}",
            hint="use one that makes its state in step(), of plain tensors (torchao's has others), or train"
            " amp.compile(model) with it in a loop of your own",
        ) from cause
    ordered = [parameter for group in groups for parameter in group["params"]]
    for parameter, entries in zip(ordered, first_values, strict=True):
        state = optimizer.state[parameter]
        for key, value in entries.items():
            state.setdefault(key, value.to(parameter.device) if isinstance(value, Tensor) else value)


def _widen(parameter: Tensor, state: State) -> None:
    """Make FP32 what the optimizer's constructor made in the type of a 16-bit parameter, as Adagrad does its sum."""
    begun = state.get("step", 0)
    for key, value in state.items():
        if parameter.dtype in LOW_TYPES and isinstance(value, Tensor) and value.dtype in LOW_TYPES:
            if begun:
                raise narrowed(key, value)
            state[key] = value.float()


def _present(optimizer: Optimizer, parameter: Tensor) -> State:
    """What is there of the state; the master stands for the weight and is no part of it."""
    return {key: value for key, value in optimizer.state.get(parameter, {}).items() if key != MASTER}


def _wide(parameter: Tensor) -> Tensor:
    value = parameter.detach()
    return value.float() if value.dtype in LOW_TYPES else value


def _init_groups(optimizer: Optimizer, groups: list[dict[str, Any]]) -> list[State]:
    """By torch's `_init_group`, which asks for the gradients' shapes and types only."""
    state: dict[Tensor, State] = defaultdict(dict)
    stand_ins = []
    for group in groups:
        own = [_wide(parameter) for parameter in group["params"]]
        for stand_in, parameter in zip(own, group["params"], strict=True):
            stand_in.grad = torch.empty_like(stand_in)
            state[stand_in] = _present(optimizer, parameter)
        stand_ins.append({**group, "params": own})
    view = view_of(optimizer, stand_ins, state)
    lists = len(inspect.signature(type(optimizer)._init_group).parameters) - 2  # type: ignore[attr-defined]
    for group in view.param_groups:
        view._init_group(group, *([] for _ in range(lists)))  # type: ignore[attr-defined]
    return [state[stand_in] for group in stand_ins for stand_in in group["params"]]


class _FirstValues(dict[str, Any]):
    """A parameter's state that notes the first value of every key that is not present."""

    setdefault, update = MutableMapping.setdefault, MutableMapping.update  # which set keys one by one

    def __init__(self, present: State | None = None) -> None:
        super().__init__(present or {})
        self.first: State = {}

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self and key not in self.first:
            self.first[key] = value.clone() if isinstance(value, Tensor) else value
        super().__setitem__(key, value)


def _record_first_step(optimizer: Optimizer, groups: list[dict[str, Any]]) -> list[State]:
    """By a step on copies; a second one with other gradients shows that the first values do not depend on them."""
    runs: list[list[State]] = []
    for fill in (0.0, 1.0):
        state: dict[Tensor, _FirstValues] = defaultdict(_FirstValues)
        copies = []
        for group in groups:
            own = [_wide(parameter).clone() for parameter in group["params"]]
            for copy, parameter in zip(own, group["params"], strict=True):
                copy.grad = torch.full_like(copy, fill)
                present = _present(optimizer, parameter)
                state[copy] = _FirstValues({k: v.clone() if isinstance(v, Tensor) else v for k, v in present.items()})
            copies.append({**group, "params": own})
        with torch.no_grad():
            own_step(view_of(optimizer, copies, state))
        runs.append([state[copy].first for group in copies for copy in group["params"]])
    for first, second in zip(*runs, strict=True):
        for key, value in first.items():
            other = second.get(key)
            tensors = isinstance(value, Tensor) and isinstance(other, Tensor)
            if not (torch.equal(value, other) if tensors else value == other):  # type: ignore[arg-type]
                raise OptimizerError(
                    f"'{key}' in the state of {type(optimizer).__name__} begins from the first gradient",
                    hint=f"let it begin as zeros, or use {FUSED_NAMES}",
                )
    return runs[0]
