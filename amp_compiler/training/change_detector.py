"""`ChangeDetector`: whether models and optimizers are as a training step left them.

Dynamo's guards see what changes the graph of a loss. What is left is which tensors stand in the model, the optimizers
and their states, where they lie, and who wrote to them. While none of that changes, a program's tensors are those of
its last call. A parameter that was written in its place, as a loaded checkpoint does, is seen by its version: what is
kept beside it (its 16-bit copy, its master) is made again, and all the rest stands.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from operator import attrgetter, eq, is_, methodcaller
from typing import Any

import torch
from torch import Tensor, nn

from amp_compiler.forward.tensor_versions import OPTIMIZER_STEPS, VERSION
from amp_compiler.fx.capture.hooks import has_hooks, hooks_made
from amp_compiler.training.loss_module import LossModule
from amp_compiler.training.state import StepState

# Each goes over some thousand objects at every call: by what CPython does without a line of Python for each.
_LAYOUT = attrgetter("layout")
_PLAIN = {Tensor, nn.Parameter}
_REQUIRES_GRAD = attrgetter("requires_grad")
_TABLES = attrgetter("_parameters", "_buffers", "_modules")
_VALUES = methodcaller("values")


class ChangeDetector:
    """How everything stands that lives from call to call.

    Args:
        model: the loss as a module.
        optimizers: checked optimizers.
        state: what the step keeps beside theirs.

    Attributes:
        generation: another number after every change. A program whose tensors were found in it has the same ones still.
        owners: ids of the parameters in each group of the optimizers.
        hooked: whether a parameter has hooks on its gradient.
    """

    def __init__(self, model: LossModule, optimizers: Sequence[torch.optim.Optimizer], state: StepState) -> None:
        self.generation, self.hooked = 0, False
        self.owners: tuple[tuple[int, ...], ...] = ()
        self._model, self._optimizers, self._state = model, optimizers, state
        self._tables: list[Any] = []  # of all modules, with their tensors and children
        self._objects: list[Any] = []  # what stands in them, and in the optimizers' states
        self._parameters: list[Tensor] = []
        self._tensors: list[Tensor] = []  # these, buffers and states
        self._places: list[Any] = []
        self._versions: list[int] = []  # of the parameters
        self._comparable = self._is_read = False  # read: in this call
        self._steps, self._hooks = 0, -1
        OPTIMIZER_STEPS.watch()

    def look(self) -> None:
        """At the beginning of a call: what has changed since the last one."""
        self._is_read = False
        count = hooks_made()
        if count != self._hooks or self.hooked:
            self._hooks, self.hooked = count, any(map(has_hooks, self._model.parameters()))
        if self._is_same():
            self._follow_writes()
        else:
            self.read()

    def read(self) -> None:
        """Look everything up, because something was assigned."""
        self.generation += 1
        modules, trained = [*self._model.modules()], self._trained()
        scripted = any(isinstance(one, torch.jit.ScriptModule) for one in modules)  # no tables of Python's
        tables = [] if scripted else [*zip(*map(_TABLES, modules), strict=True)]
        self._tables = [*chain.from_iterable(tables)]
        self._objects, self.owners = [*self._present_objects()], _ids(trained)
        held = [*chain.from_iterable(map(_VALUES, tables[0] if tables else ())), *chain.from_iterable(trained)]
        parameters = {id(one): one for one in held if one is not None}
        tensors = {id(one): one for one in self._objects if isinstance(one, Tensor)} | parameters
        self._parameters, self._tensors = [*parameters.values()], [*tensors.values()]
        plain = {*map(type, self._tensors)} <= _PLAIN and {*map(_LAYOUT, self._tensors)} <= {torch.strided}
        self._comparable = plain and not scripted and not any(map(Tensor.is_inference, self._parameters))
        self._places = [*self._present_places()] if self._comparable else []
        self.left()
        self._is_read = True

    def another(self) -> None:
        """A graph was given other parameters or buffers than before, wherever they stand."""
        if not self._is_read:
            self.read()

    def settle(self) -> None:
        """When a program has found its tensors: take in the states that were made for it."""
        if not self._is_same():
            self.read()

    def left(self) -> None:
        """At the end of a call: what was written to parameters up to now, this step wrote."""
        self._versions = [*map(VERSION, self._parameters)] if self._comparable else []
        self._steps = OPTIMIZER_STEPS.count

    def _is_same(self) -> bool:
        """Whether the same objects stand everywhere, and lie where they lay."""
        if not self._comparable or _ids(self._trained()) != self.owners:
            return False
        same = all(map(is_, self._present_objects(), self._objects))
        return same and all(map(eq, self._present_places(), self._places))

    def _trained(self) -> list[Sequence[Tensor]]:
        return [group["params"] for one in self._optimizers for group in one.param_groups]

    def _present_objects(self) -> Iterator[Any]:
        states = [one.state for one in self._optimizers]
        own = [state for table in states for state in table.values() if isinstance(state, dict)]
        values = map(_VALUES, [*self._tables, *states, *own])
        # By the last one more objects differ from fewer.
        return chain([self._state.scale.state], *states, *own, chain.from_iterable(values), [self])

    def _present_places(self) -> Iterator[Any]:
        tensors, parameters = self._tensors, self._parameters
        forms = (map(read, parameters) for read in (Tensor.size, Tensor.stride, _REQUIRES_GRAD))
        return chain(map(Tensor.data_ptr, tensors), *forms)

    def _follow_writes(self) -> None:
        """Make again what is kept beside the parameters that were written since the last call."""
        before, every = self._versions, OPTIMIZER_STEPS.count != self._steps
        self.left()
        if self._versions == before and not every:
            return
        with torch.no_grad():
            for parameter, old, new in zip(self._parameters, before, self._versions, strict=True):
                if every or old != new:
                    held = (one.state[parameter] for one in self._optimizers if parameter in one.state)
                    self._state.follow(parameter, next(held, {}))


def _ids(groups: Sequence[Sequence[Tensor]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(id, group)) for group in groups)
