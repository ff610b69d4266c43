"""`amp.profile`: training with the exponents of everything counted."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from amp_compiler.diagnose.exponents import Counts, Histogram
from amp_compiler.diagnose.profile import (
    ACTIVATION,
    ACTIVATION_GRADIENT,
    GRADIENTS,
    WEIGHT,
    WEIGHT_GRADIENT,
    Profile,
    Row,
    UpdateRow,
)
from amp_compiler.errors import AmpError
from amp_compiler.forward.signature import leaves_key
from amp_compiler.fx.graph import canonical_op, module_of, neutral_dtype, user_source
from amp_compiler.fx.meta import Key
from amp_compiler.ops.exponents import BINS, count_exponents, count_update
from amp_compiler.training.counting import CountingProgram
from amp_compiler.training.program import StepProgram
from amp_compiler.training.step import TrainingStep

_LOST_IN = ("fp16", "bf16")  # as `count_update` counts them
_Place = tuple[str, str, str, str, str, str, str]  # the fields of a `Row` that are text


def profile(step: TrainingStep, batches: Iterable[Any]) -> Profile:
    """Train on some batches, and count the binary exponents of all that the step computes.

    Every step is `step(*batch)`: weights, states and the loss scale move on, and to the bit as they would otherwise. In
    front of it its forward and backward run once more, compiled with counters in them (pipeline COUNT), so that a step
    takes two to three times as long. The counts are as large for a thousand batches as for one.

    Args:
        step: a training step.
        batches: each a tuple of arguments, as for `step(*batch)`, or a single one.

    Raises:
        AmpError: `step` is none, there is no batch, or the step runs in pieces.

    Source: the histograms of Micikevicius et al., Mixed Precision Training, 2018, section 3.2.

    Example:
        >>> import torch, amp_compiler as amp
        >>> model = torch.nn.Linear(4, 1)
        >>> step = amp.training_step(model, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters(), 0.1),
        ...                          dtype="fp16", loss_scale=1024.0, backend="eager")
        >>> found = amp.profile(step, [torch.ones(2, 4)])
        >>> [row.name for row in found.of("weight gradient")]
        ['weight', 'bias']
    """
    if not isinstance(step, TrainingStep):
        raise AmpError(f"there is no profile of {type(step).__name__}", mend="pass what amp.training_step gave")
    found = _Found(step)
    for batch in batches:
        found.run(tuple(batch) if isinstance(batch, (tuple, list)) else (batch,))
    return found.profile()


class _Found:
    """Gathers what the steps find."""

    def __init__(self, step: TrainingStep) -> None:
        self.step = step
        self.rows: dict[_Place, tuple[Counts, Counts]] = {}
        self.updates: dict[str, UpdateRow] = {}
        self.batches = 0
        self.programs: dict[Any, CountingProgram] = {}
        self.skipped = int(step.skipped_steps)

    def run(self, batch: tuple[Any, ...]) -> None:
        """Take one step."""
        shift = -math.floor(math.log2(float(self.step.loss_scale)))
        before = {name: parameter.detach().clone() for name, parameter in self._parameters()}
        self._count_nodes(batch, shift)
        self.step(*batch)
        program, output, _ = self.step._seen()
        if not isinstance(program, StepProgram):
            raise AmpError(
                f"the step runs {self.step.execution}: what its pieces compute is not counted",
                mend="profile a loss that is one graph",
            )
        self.batches += 1
        gradients = [one if isinstance(one, Tensor) else one.float() for one in output.gradients]
        for name, value, counts in zip(program.updated, gradients, _count(gradients), strict=True):
            self._add(_place_of(name, WEIGHT_GRADIENT, value.dtype), counts, shift)
        for name, parameter in self._parameters():
            self._update(name, before[name], parameter.detach())

    def _count_nodes(self, batch: tuple[Any, ...], shift: int) -> None:
        leaves, spec = pytree.tree_flatten((batch, {}))
        form = (spec, leaves_key(leaves), tuple(module.training for module in self.step.model.modules()))
        if form not in self.programs:
            self.programs[form] = self.step._counting(batch)
        program = self.programs[form]
        counts = program(leaves)
        for node, row in zip(program.nodes, () if counts is None else counts.cpu().numpy(), strict=True):
            key = _key(node, ACTIVATION_GRADIENT if node in program.scaled else ACTIVATION)
            self._add(key, row, shift if key[1] in GRADIENTS else 0)

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, one) for name, one in self.step.model.named_parameters() if one.is_floating_point())

    def _add(self, key: _Place, counts: Counts, shift: int) -> None:
        kept = self.rows.setdefault(key, (np.zeros(BINS, np.int64), np.zeros(BINS, np.int64)))
        kept[0][:] += Histogram(counts).shifted(shift).counts if shift else counts
        kept[1][:] += counts

    def _update(self, name: str, before: Tensor, after: Tensor) -> None:
        counts, found = (one.cpu().numpy() for one in count_update(before, after))
        made, *lost = map(int, found)
        known = self.updates.get(name, UpdateRow(name, Histogram.empty(), 0, dict.fromkeys(_LOST_IN, 0)))
        sums = {dtype: known.lost[dtype] + more for dtype, more in zip(_LOST_IN, lost, strict=True)}
        self.updates[name] = UpdateRow(name, known.ratios + Histogram(counts), known.made + made, sums)

    def profile(self) -> Profile:
        """All of it."""
        if not self.batches:
            raise AmpError("there is no batch to profile", mend="pass at least one")
        rows = [
            Row(*key, histogram=Histogram(true), stored=Histogram(stored)) for key, (true, stored) in self.rows.items()
        ]
        named = list(self._parameters())
        for (name, parameter), counts in zip(named, _count([one for _, one in named]), strict=True):
            held = Histogram(counts)
            rows.append(Row(*_place_of(name, WEIGHT, parameter.dtype), held, held))
        low = self.step._low.short
        return Profile(
            tuple(rows), tuple(self.updates.values()), self.batches, int(self.step.skipped_steps) - self.skipped, low
        )


def _count(values: Sequence[Tensor]) -> Counts:
    found: Counts = count_exponents([one.detach() for one in values]).cpu().numpy()
    return found


def _place_of(parameter: str, kind: str, dtype: torch.dtype) -> _Place:
    return (parameter, kind, "", parameter.rpartition(".")[0], "", "", _short(dtype))


def _short(dtype: torch.dtype) -> str:
    return neutral_dtype(dtype).short


def _key(node: fx.Node, kind: str) -> _Place:
    made = node.all_input_nodes[0] if node.target is operator.getitem else node
    where, planned = user_source(node.meta.get("stack_trace")), str(node.meta.get(Key.PLANNED, ""))
    op, module, dtype = canonical_op(made.target), module_of(node)[0], _short(node.meta["val"].dtype)
    return (node.name, kind, op, module, where, planned, dtype)
