"""`RankValues`: what all ranks of a step must hold alike, and whether it may have changed between two calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from amp_compiler.forward.tensor_versions import OPTIMIZER_STEPS, writable
from amp_compiler.ops.layout import as_real
from amp_compiler.training.program import LossModule


class RankValues:
    """Weights, optimizer states and loss scale of this rank, as others are told of them.

    What was written is noticed by the versions of the parameters; states and scales that are loaded are counted, and
    steps that torch's own optimizers make. No value is read before the ranks compare them. `weight.data.mul_()` moves
    none: `HiddenWrites` does where it finds such a write.

    Args:
        model: the loss as a module.
        optimizers: its optimizers.
        scale: gives the state of the loss scale as plain values.
    """

    def __init__(
        self,
        model: LossModule,
        optimizers: Sequence[torch.optim.Optimizer],
        scale: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._model, self._optimizers, self._scale = model, optimizers, scale
        self._loads = 0
        self._generation = -1
        self._parameters: list[Tensor] = []
        self._marks: dict[int, tuple[int, int]] = {}
        OPTIMIZER_STEPS.watch()
        self._steps = OPTIMIZER_STEPS.count  # torch's own steps in this process before are nobody's writes
        for one in optimizers:
            one.register_load_state_dict_post_hook(self.loaded)

    def loaded(self, *_: object) -> None:
        """Note that a state was loaded."""
        self._loads += 1

    def changes(self, generation: int) -> int:
        """How many parameters were written, and states loaded, since the last call; the same where ranks do the same.

        Args:
            generation: another number where other parameters may stand in the model; while it stays, so do they.
        """
        if generation != self._generation:
            self._generation = generation
            self._parameters = writable({id(p): p for p in (*self._model.parameters(), *self._held())}.values())
        written = sum(self._marks.get(key, mark) != mark for key, mark in self._present().items())
        return self._loads + written + (OPTIMIZER_STEPS.count != self._steps)

    def left(self) -> None:
        """At the end of a call: what was written up to now, the step wrote."""
        self._marks = self._present()
        self._loads, self._steps = 0, OPTIMIZER_STEPS.count

    def _present(self) -> dict[int, tuple[int, int]]:
        """Where each parameter lies, and its version, by its `id`."""
        return {id(one): (one.data_ptr(), one._version) for one in self._parameters}

    def said(self) -> dict[str, Any]:
        """Sums of all weights and states, and the loss scale, as texts."""
        names = {id(parameter): name.partition(".")[2] for name, parameter in self._model.named_parameters()}
        states = []
        for optimizer in self._optimizers:
            for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor) and (not value.dim() or value.shape == parameter.shape):  # no part
                        states.append(f"{key} of {names.get(id(parameter), number)} with the sum {_sum(value)}")
        weights = self._model.named_parameters()
        return {
            "weights": [f"{name.partition('.')[2]} with the sum {_sum(one)}" for name, one in weights],
            "the optimizer's state": states,
            "the loss scale": [f"{key}={value}" for key, value in self._scale().items()],
        }

    def _held(self) -> Iterator[Tensor]:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]


def _sum(tensor: Tensor) -> float:
    return float(as_real(tensor.detach()).sum(dtype=torch.float64))
