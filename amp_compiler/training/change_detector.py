"""`ChangeDetector`: whether models and optimizers are as a training step left them, seen in one pass at every call.

What a program is given changes only when somebody assigns something: a parameter, a mode, a group of an optimizer, a
loaded state. While nothing is assigned, the tensors of the last call are those of this one, and the keys by which
programs are found are the same objects. A parameter that was written in its place, as a loaded checkpoint does, is seen
by its version: what is kept beside it (its 16-bit copy, its master) is made again, and all the rest stands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor

from amp_compiler.forward.module_watch import HookWatch, Key, TensorWatch, WriteCount, note_modules
from amp_compiler.forward.same_objects import SameObjects
from amp_compiler.forward.signature import module_key
from amp_compiler.forward.tensor_versions import OPTIMIZER_STEPS
from amp_compiler.fx.plain import is_plain
from amp_compiler.training.kept import KeptTensors
from amp_compiler.training.loss_module import LossModule

LASTING = 16  # calls without a change, after which the next note is made at once
MOST_WAITING = 10  # power of two: calls between two notes that did not last


class ChangeDetector:
    """How everything stands that lives from call to call.

    Args:
        model: the loss as a module.
        optimizers: checked optimizers.
        kept: the tensors that the step keeps beside theirs.

    Attributes:
        module: key of the module's present state.
        owners: key of the parameters that the optimizers have.
        generation: another number after every change. A program whose tensors were noted in it has the same ones still.
        numbers: another number after every change of a value in the optimizers' `param_groups`.
    """

    def __init__(self, model: LossModule, optimizers: Sequence[torch.optim.Optimizer], kept: KeptTensors) -> None:
        self.module, self.owners = Key(()), Key(())
        self.generation, self.numbers = 0, 0
        self._model, self._optimizers, self._kept = model, optimizers, kept
        self._note: _Note | None = None
        self._values: list[Any] = []
        self._plain = False
        self._notes = self._wait = self._lasted = 0

    def look(self) -> None:
        """At the beginning of a call, with gradients as the caller has them: what has changed since the last one."""
        if self._note is not None and self._note.holds(self._kept):
            self._lasted += 1
            self._note.follow_writes(self._kept)
        else:
            self.read()
        self._look_at_numbers()

    def read(self) -> None:
        """Walk over everything, because something was assigned."""
        self._note = None
        self.generation += 1
        owners = tuple(tuple(map(id, group["params"])) for one in self._optimizers for group in one.param_groups)
        module = module_key(self._model, by_identity=True)
        if module != self.module.value:
            self.module = Key(module)
        if owners != self.owners.value:
            self.owners = Key(owners)

    def begin(self) -> None:
        """Walk over everything behind a capture, which took so long that a note costs nothing beside it."""
        self.read()
        self._wait = 0

    def note(self) -> bool:
        """Remember how everything stands, when a program has found its tensors; false where it is not remembered.

        Notes take longer than a look without one. Where they never last, fewer and fewer are made.
        """
        if self._note is not None and self._note.holds(self._kept):
            return True  # the program is a new one, or was last called in another generation
        before = self.module, self.owners
        self.read()
        if self._lasted >= LASTING:
            self._notes = self._wait = 0
        self._lasted = 0
        if self._wait > 0 or before != (self.module, self.owners):
            self._wait -= 1
            return False
        self._note = _Note.of(self._model, self._optimizers, self._kept)
        self._notes += 1
        self._wait = 2 ** min(self._notes, MOST_WAITING)
        return self._note is not None

    def covers(self, tensor: Tensor) -> bool:
        """Whether a tensor is among those that are looked at."""
        return self._note is not None and id(tensor) in self._note.watched

    def left(self, replayed: object = None) -> None:
        """At the end of a call: what was written to parameters up to now, this step wrote.

        Args:
            replayed: stands for what a replay has written, and nothing else was; `None` where there was no replay.
        """
        if self._note is not None:
            self._note.left(replayed)

    def _look_at_numbers(self) -> None:
        groups = [group for one in self._optimizers for group in one.param_groups]
        values = [*chain.from_iterable(map(dict.values, groups))]
        if len(values) == len(self._values) and self._plain and all(map(is_, values, self._values)):
            return
        self.numbers += 1
        self._values = values
        self._plain = all(is_plain(value) for group in groups for key, value in group.items() if key != "params")


class _Note:
    """What was where when all was well.

    Args:
        same: tells whether the same objects stand in all tables.
        hooks: tells whether there are hooks.
        watch: looks at the tensors.
        parameters: those of the models and optimizers, whose versions are looked at.
        buffers: of the models.
        placed: of the optimizers' states.
        states: state of a parameter, by its `id`.
        scale: the state of the loss scale.
    """

    def __init__(
        self,
        same: Callable[[], bool],
        hooks: HookWatch,
        parameters: list[Tensor],
        buffers: list[Tensor],
        placed: list[Tensor],
        states: dict[int, dict[str, Any]],
        scale: Any,
    ) -> None:
        self._same, self._hooks, self._parameters, self._states, self._scale = same, hooks, parameters, states, scale
        self._watch = TensorWatch(parameters, buffers, placed)
        self._writes = WriteCount(self._watch)
        self._steps = OPTIMIZER_STEPS.count
        self._versions: int | None = None
        self.watched = {id(tensor): tensor for tensor in (*parameters, *buffers)}

    @classmethod
    def of(cls, model: LossModule, optimizers: Sequence[torch.optim.Optimizer], kept: KeptTensors) -> _Note | None:
        """The note of now; `None` where there is something that cannot be seen in a quick pass."""
        same, unhooked = SameObjects(compiled=True), SameObjects(compiled=True)
        held = note_modules(model, same, unhooked)
        if held is None or not torch.is_grad_enabled():
            return None
        parameters = {id(parameter): parameter for parameter in held[0]}
        buffers = {id(buffer): buffer for buffer in held[1]}
        placed: dict[int, Tensor] = {}
        states: dict[int, dict[str, Any]] = {}
        for one in optimizers:
            same.attribute(one, "param_groups")
            same.attribute(one, "state")
            same.items(one.param_groups)
            same.table(one.state)
            for group in one.param_groups:
                same.item(group, "params")
                same.items(group["params"])
                parameters.update({id(parameter): parameter for parameter in group["params"]})
            for parameter, state in one.state.items():
                states[id(parameter)] = state
                placed.update({id(value): value for value in state.values() if isinstance(value, Tensor)})
            same.values_of(list(one.state.values()))
        own = list(parameters.values())
        beside = [tensor for number, tensor in buffers.items() if number not in parameters]
        kept_by_states = list(placed.values())
        if not TensorWatch.takes([*own, *beside, *kept_by_states]) or any(
            parameter.is_inference() for parameter in own
        ):
            return None
        hooks = HookWatch(unhooked.test(), own)
        if not hooks.holds():
            return None
        OPTIMIZER_STEPS.watch()
        return cls(same.test(), hooks, own, beside, kept_by_states, states, kept.scale())

    def holds(self, kept: KeptTensors) -> bool:
        """Whether the same objects stand everywhere, and lie where they lay."""
        self._versions = None
        if torch.is_grad_enabled() and kept.scale() is self._scale and self._hooks.holds() and self._same():
            self._versions = self._watch.look(placed=kept.in_graphs())
        return self._versions is not None

    def follow_writes(self, kept: KeptTensors) -> None:
        """Make again what is kept beside the parameters that were written since the last call, once `holds` is true."""
        steps = OPTIMIZER_STEPS.count
        every = steps != self._steps
        if self._versions == self._writes.sum and not every:
            return
        written = self._writes.written()
        with torch.no_grad():
            for parameter, is_written in zip(self._parameters, written, strict=True):
                if every or is_written:
                    kept.follow(parameter, self._states.get(id(parameter), {}))
        self._steps = steps

    def left(self, replayed: object) -> None:
        """Take the versions of now for those of the step's own writes."""
        if replayed is None:
            self._writes.read()
        else:
            self._writes.replayed(replayed)
        self._steps = OPTIMIZER_STEPS.count
