"""`RankValues`: what all ranks of a step must hold alike, and whether it may have changed between two calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from amp_compiler.forward.tensor_versions import OPTIMIZER_STEPS, VERSION, writable
from amp_compiler.fx.plain import is_plain
from amp_compiler.ops.loss_scale.held import HeldScale
from amp_compiler.ops.update.rounding import RoundingState
from amp_compiler.ranks.checksum import checksums

_Mark = tuple[int, int, int]  # which tensor, where it lies, its version


class RankValues:
    """Weights, buffers, optimizer states and loss scale of this rank, as others are told of them.

    What was written is noticed by the versions of the tensors. Scales and states that are set or loaded are counted,
    and so are steps that torch's own optimizers make. No value is read before the ranks compare them.
    `weight.data.mul_()` moves none: `HiddenWrites` does where it finds such a write.

    Args:
        model: the loss as a module.
        root: name of what is trained in it.
        optimizers: its optimizers.
        scale: the loss scale.
        rounding: the random state of stochastic rounding.
        with_buffers: whether buffers have to be equal. Those that a call writes are the first rank's behind it.

    Attributes:
        parameters: of each parameter of the optimizers its group, and whether it is frozen.
    """

    def __init__(
        self,
        model: nn.Module,
        root: str,
        optimizers: Sequence[torch.optim.Optimizer],
        scale: HeldScale,
        rounding: RoundingState,
        with_buffers: bool,
    ) -> None:
        self._model, self._root, self._optimizers = model, root, optimizers
        self._scale, self._rounding = scale, rounding
        self._with_buffers = with_buffers
        self.parameters: tuple[str, ...] = ()
        self._generation = -1
        self._tensors: dict[str, Tensor] = {}  # parameters and buffers
        self._states: dict[int, Tensor] = {}  # of the optimizers
        self._left_states: dict[int, Tensor] = {}  # those at the end of the last call
        self._begun: dict[str, _Mark] = {}  # at the beginning of the call, or of the last one
        self._left: dict[str, _Mark] = {}  # at its end
        self._own: frozenset[str] = frozenset()  # the buffers that it wrote
        self._state_versions = self._loads = 0
        self._assigned = scale.assigned
        OPTIMIZER_STEPS.watch()
        self._steps = OPTIMIZER_STEPS.count  # torch's own steps in this process before are nobody's writes
        for one in optimizers:
            one.register_load_state_dict_post_hook(self.loaded)

    def loaded(self, *_: object) -> None:
        """Note that a state was loaded."""
        self._loads += 1

    def changes(self, generation: int) -> tuple[object, ...]:
        """What was set, written or loaded since the last call: the same where ranks do the same, empty for nothing.

        Args:
            generation: another number where other tensors may stand in model and optimizers; while it stays, so do
                they.
        """
        if generation != self._generation:
            self._generation = generation
            self._find()
        self._begun = self._present()
        changes = (
            self._loads,
            sum(self._left.get(name, mark) != mark for name, mark in self._begun.items()),
            not self._left_states.keys() <= self._states.keys()
            or sum(map(VERSION, self._left_states.values())) != self._state_versions,
            OPTIMIZER_STEPS.count != self._steps,
            self._scale.last if self._scale.assigned != self._assigned else "",
        )
        return changes if any(changes) else ()

    def left(self) -> None:
        """At the end of a call: what was set and written up to now, is the step's."""
        self._left = self._present()
        self._own = frozenset(name for name, mark in self._left.items() if mark != self._begun.get(name))
        self._left_states, self._loads = self._states, 0
        self._state_versions = sum(map(VERSION, self._states.values()))
        self._steps, self._assigned = OPTIMIZER_STEPS.count, self._scale.assigned

    def _find(self) -> None:
        """Look for all tensors anew."""
        buffers = self._model.named_buffers() if self._with_buffers else ()
        named = {**dict(self._model.named_parameters()), **dict(buffers)}
        states: list[Any] = []
        parameters = []
        for group, name, parameter, state in self._held():
            named.setdefault(name, parameter)
            states += state.values()
            parameters.append(f"{_shown(name)} in {group}{'' if parameter.requires_grad else ', frozen'}")
        tensors = {name: one for name, one in named.items() if not one.is_inference()}
        self._tensors, self.parameters = tensors, tuple(parameters)
        self._states = {id(one): one for one in writable(one for one in states if isinstance(one, Tensor))}

    def _present(self) -> dict[str, _Mark]:
        return {name: (id(one), one.data_ptr(), one._version) for name, one in self._tensors.items()}

    def _held(self) -> Iterator[tuple[str, str, Tensor, dict[str, Any]]]:
        """Group, name and state of each parameter of the optimizers."""
        names = {id(one): name for name, one in self._model.named_parameters() if name.startswith(self._root)}
        number = 0
        for optimizer in self._optimizers:
            for index, group in enumerate(optimizer.param_groups):
                for parameter in group["params"]:
                    name = names.get(id(parameter), f"{self._root}.parameter {number}")
                    state = optimizer.state.get(parameter, {})
                    yield f"{type(optimizer).__name__} group {index}", name, parameter, state
                    number += 1

    def message(self) -> dict[str, Any]:
        """Checksums of all weights, buffers and states, and the loss scale, as texts."""
        buffers = self._model.named_buffers() if self._with_buffers else ()
        weights: dict[str, Tensor] = dict(self._model.named_parameters())
        states: dict[str, Tensor] = {}
        numbers: list[str] = []
        for _, name, parameter, state in self._held():
            weights.setdefault(name, parameter)
            for key, value in state.items():
                if not isinstance(value, Tensor):
                    numbers += [f"{key}={value!r} of {_shown(name)}"] if is_plain(value) else []
                elif not value.dim() or value.shape == parameter.shape:  # no part
                    states[f"{key} of {_shown(name)}"] = value
        return {
            "weights": _checksums((_shown(name), one) for name, one in weights.items()),
            "buffers": _checksums((_shown(name), one) for name, one in buffers if name not in self._own),
            "the optimizer's state": [*_checksums(states.items()), *numbers],
            "the loss scale": [f"{k}={v}" for k, v in self._scale.config.state_dict(self._scale.state).items()],
            "the random state of rounding": [f"{k}={v}" for k, v in self._rounding.state_dict().items()],
        }


def _shown(name: str) -> str:
    return name.partition(".")[2]


def _checksums(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Each name with the checksum of its tensor."""
    tensors = dict(named)
    sums = checksums([*tensors.values()])
    return [f"{name} with the checksum {one}" for name, one in zip(tensors, sums, strict=True)]
