"""`FusedOptimizer`: all that is to be known of an optimizer with update operators, but for its loops; said once.

From it come the signatures of the operators (`operators`), the update in traceable torch calls (`reference`), the
tables of addresses that the loops walk over (`ops.cpu.update`, `ops.cuda.update`), and the way from a `torch.optim`
optimizer to the operator (`training.optimizers.fused`).
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp_compiler.errors import LoweringError
from amp_compiler.ops.update.rounding import Storage

Tensors = Sequence[Tensor]
Group = Mapping[str, Any]  # one of an optimizer's `param_groups`
L1_DECAY = "l1_decay"  # a key of a group that torch keeps and does not read
STEP = "step"  # the optimizer state that counts a parameter's steps
MOST_STATES = 3  # as many columns as the loops walk over beside weight, gradient and copy
_RESERVED = frozenset({"weight", "master", "grad", "low", "compensation", STEP, "started", "rng", "hyper", "scale"})
_LISTS, _NUMBER = "Tensor[]", "Tensor"


class Update(NamedTuple):
    """The arguments of an update operator.

    Args:
        weights: n tensors: fp32 masters, or weights of any float type that have no master.
        grads: n tensors of any float type, shaped as the weights.
        states: per `FusedOptimizer.states` n tensors shaped as the weights, or none where that state is not kept: fp32
            beside masters; else of any float type, rounded to nearest when stored.
        low_weights: n tensors fp16 or bf16 that are given the new masters' values rounded to nearest, or none. Where
            the step is skipped, the traced form writes the old masters' values into them.
        compensations: n tensors typed as the weights where `mode` is `Storage.KAHAN`, else none.
        steps: n tensors fp32 [], raised by one; none for an optimizer that does not count.
        started: fp32 []: 0 before the first step that is not skipped, 1 after; `None` for an optimizer without it.
        rng: int64 [2]: key, and number of updates, raised by one where `mode` is `Storage.STOCHASTIC`; no other mode
            needs it.
        hyper: fp64 [h]: the hyperparameters, in the order of `FusedOptimizer.hyper`.
        coef: fp32 []: what every gradient is multiplied with: inverse loss scale times clipping factor.
        skip: fp32 []: where it is not zero nothing changes, whatever the gradients hold.
        mode: a `Storage`.
        flags: by name; among them always `maximize`: whether the objective is to grow.
        stale: uint8 [n]: set to 1 where a tensor of `low_weights` was not its master rounded, because one of the two
            was written since the last step; for CUDA kernels see `new_stale`; `None` where nobody looks.
        takes: whether a master takes what its tensor of `low_weights` has otherwise, before the step.
    """

    weights: Tensors
    grads: Sequence[Any]
    states: tuple[Tensors, ...]
    low_weights: Tensors
    compensations: Tensors
    steps: Tensors
    started: Tensor | None
    rng: Tensor | None
    hyper: Tensor
    coef: Tensor
    skip: Tensor
    mode: int
    flags: Mapping[str, bool]
    stale: Tensor | None
    takes: bool


class How(NamedTuple):
    """What one tensor's step is told besides its values.

    Args:
        flags: as in `Update`.
        started: as in `Update`.
        sqrt: the square root to use.
        stored: `stored(value, place)` rounds the new state at a place to what is kept of it.
    """

    flags: Mapping[str, bool]
    started: Any
    sqrt: Callable[[Tensor], Tensor]
    stored: Callable[[Tensor, int], Tensor]


class Parameter(NamedTuple):
    """One parameter of an update operator: its name, type and default in the schema, and whether it is written."""

    name: str
    type: str
    written: bool = False
    default: str = ""


@dataclass(frozen=True)
class State:
    """A tensor of an optimizer's state, shaped as its parameter; zeros before the first step.

    Args:
        name: its key in the optimizer's state.
        used: whether a group keeps it.
    """

    name: str
    used: Callable[[Group], bool] = lambda group: True


@dataclass(frozen=True)
class FusedOptimizer:
    """An optimizer whose update is one node per group of parameters.

    Args:
        name: names all that belongs to it: the operators `NAME_update` (fp32 masters) and `NAME_update_low` (weights
            without), `amp_NAME_update` in C++, `NAME_kernel` in Triton.
        classes: the `torch.optim` classes whose update it is.
        states: what it keeps, at most three, in the order of the kernels' columns.
        hyper: the numbers that a scheduler may change, by name, with where a group has them. They reach the device as
            fp64, so that a change compiles nothing anew.
        flags: the settings that are part of the graph, by name, with where an optimizer and its group have them.
        numbers: a `NamedTuple` of the numbers of one step, in the order of the kernels. `numbers.of(hyper, step, sqrt)`
            makes them of the hyperparameters, the number of this step (from 1; `None` for one that does not count), and
            a square root, in fp64 tensors of one shape or in Python floats.
        step: one tensor's update: `step(weight, grad, states, numbers, how)` gives the new weight and the new states.
            Weight, gradient (unscaled) and states are fp32, `None` for a state that is not kept; `numbers` fp32 [].
        counts: whether it counts the steps of every parameter.
        started: whether the first step of a group may differ from later ones; `None` where it never does.
        state_as_weight: whether states of weights without masters are kept in their type, rather than in fp32.
    """

    name: str
    classes: tuple[type[torch.optim.Optimizer], ...]
    states: tuple[State, ...]
    hyper: Mapping[str, Callable[[Group], Any]]
    flags: Mapping[str, Callable[[torch.optim.Optimizer, Group], bool]]
    numbers: Any
    step: Callable[..., tuple[Tensor, tuple[Tensor | None, ...]]]
    counts: bool = False
    started: Callable[[Group], bool] | None = None
    state_as_weight: bool = False

    def __post_init__(self) -> None:
        names = [state.name for state in self.states]
        if len(names) > MOST_STATES or _RESERVED.intersection(names) or "maximize" not in self.flags:
            raise LoweringError(
                f"the fused optimizer '{self.name}' keeps {names} and has the flags {list(self.flags)}",
                hint=f"keep at most {MOST_STATES} states, none called {', '.join(sorted(_RESERVED))}; add 'maximize'",
            )

    def operator(self, low: bool) -> str:
        """The name of the operator: for weights without masters where `low`, else for masters."""
        return f"{self.name}_update_low" if low else f"{self.name}_update"

    def parameters(self, low: bool) -> tuple[Parameter, ...]:
        """The signature of that operator."""
        return (
            Parameter("weights" if low else "masters", _LISTS, True),
            Parameter("grads", _LISTS),
            *(Parameter(f"{state.name}s", _LISTS, True) for state in self.states),
            Parameter("compensations" if low else "low_weights", _LISTS, True),
            *([Parameter("steps", _LISTS, True)] if self.counts else []),
            *([Parameter("started", _NUMBER, True)] if self.started else []),
            *([Parameter("rng", _NUMBER, True)] if low else []),
            *(Parameter(name, _NUMBER) for name in ("hyper", "coef", "skip")),
            *([Parameter("mode", "int")] if low else []),
            *(Parameter(flag, "bool") for flag in self.flags),
            *(
                []
                if low
                else [Parameter("stale", "Tensor?", True, "=None"), Parameter("takes", "bool", False, "=False")]
            ),
        )

    def schema(self, low: bool) -> str:
        """The schema of that operator, as `torch.library` takes it."""
        letters = iter(string.ascii_lowercase)
        written = (
            f"{one.type.replace('Tensor', f'Tensor({next(letters)}!)') if one.written else one.type}"
            f" {one.name}{one.default}"
            for one in self.parameters(low)
        )
        return f"{self.operator(low)}({', '.join(written)}) -> ()"

    def bound(self, low: bool, arguments: Sequence[Any]) -> Update:
        """The arguments of that operator by name."""
        by_name = dict(zip((one.name for one in self.parameters(low)), arguments, strict=False))
        return Update(
            weights=by_name["weights" if low else "masters"],
            grads=by_name["grads"],
            states=tuple(by_name[f"{state.name}s"] for state in self.states),
            low_weights=by_name.get("low_weights", ()),
            compensations=by_name.get("compensations", ()),
            steps=by_name.get("steps", ()),
            started=by_name.get("started"),
            rng=by_name.get("rng"),
            hyper=by_name["hyper"],
            coef=by_name["coef"],
            skip=by_name["skip"],
            mode=by_name.get("mode", Storage.NEAREST),
            flags={flag: by_name[flag] for flag in self.flags},
            stale=by_name.get("stale"),
            takes=by_name.get("takes", False),
        )


def group_value(name: str, place: int | None = None) -> Callable[[Group], Any]:
    """Reads a hyperparameter from a group: `group[name]`, or an element of it."""
    return (lambda group: group[name]) if place is None else (lambda group: group[name][place])


def group_flag(name: str) -> Callable[[torch.optim.Optimizer, Group], bool]:
    """Reads a flag from a group."""
    return lambda optimizer, group: bool(group[name])


def l1_of(group: Group) -> Any:
    """The L1 decay of a group; it is 0 where there is none."""
    return group.get(L1_DECAY, 0.0)
