"""`amp.profile`: the ranges of what a training step computes, and the loss scale that fits them."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from amp_compiler.diagnose.exponents import RANGES, Counts, Histogram
from amp_compiler.errors import AmpError
from amp_compiler.forward.signature import leaves_key
from amp_compiler.fx.graph import canonical_op, module_of, neutral_dtype, user_source
from amp_compiler.fx.meta import Key
from amp_compiler.ir.files import write_atomically
from amp_compiler.ops.exponents import BINS, LOWEST, count_exponents, count_update
from amp_compiler.training.counting import CountingProgram
from amp_compiler.training.program import StepProgram
from amp_compiler.training.step import TrainingStep

ACTIVATION, ACTIVATION_GRADIENT, WEIGHT_GRADIENT, WEIGHT = (
    "activation",
    "activation gradient",
    "weight gradient",
    "weight",
)
GRADIENTS = (ACTIVATION_GRADIENT, WEIGHT_GRADIENT)
_HEADROOM = 2  # exponents above the greatest gradient that was seen
_MOST_SCALE = 24  # exponent of the greatest scale, as the dynamic one has it
_TOLERATED = 1e-3  # of the numbers of a node: more is a loss
_SHOWN = 12
_FIELDS = ("name", "kind", "op", "module", "where", "planned", "dtype")
_LOST_IN = ("fp16", "bf16")  # as `count_update` counts them


@dataclass(frozen=True)
class Row:
    """One tensor of a step, over all batches.

    Args:
        name: of the node in the graph of the step, or of the parameter.
        kind: `activation`, `activation gradient`, `weight gradient` or `weight`.
        op: canonical op; empty for a parameter.
        module: qualified name of the module; empty where it is unknown.
        where: `file:line` of the user's code; empty where it is unknown.
        planned: the node of the plan that it was made for; empty where there is none.
        dtype: short name of its type in the step.
        histogram: of its exponents; of a gradient without the loss scale.
        stored: of a gradient, as it stood in the step, with the loss scale; else the same.
    """

    name: str
    kind: str
    op: str
    module: str
    where: str
    planned: str
    dtype: str
    histogram: Histogram
    stored: Histogram

    def __str__(self) -> str:
        parts = [part for part in (self.op, f"in {self.module}" if self.module else "", self.where) if part]
        return f"{self.kind} {self.name}" + (f" ({', '.join(parts)})" if parts else "")


@dataclass(frozen=True)
class UpdateRow:
    """The updates of one parameter, over all steps that were not skipped.

    Args:
        name: of the parameter.
        ratios: of `|update| / |weight|`, where the weight is not zero.
        made: number of elements whose update was not zero.
        lost: of these, by type, how many would have left a weight of that type as it was.
    """

    name: str
    ratios: Histogram
    made: int
    lost: dict[str, int]

    def fraction_lost(self, dtype: str) -> float:
        """The fraction of updates that a weight of this type would not have noticed."""
        return self.lost[dtype] / self.made if self.made else 0.0


@dataclass(frozen=True)
class Advice:
    """A static loss scale.

    Args:
        scale: the power of two by which gradients are best kept.
        lost: the fraction of the nonzero gradients of weights that become zero or infinite with it.
        lost_without: the same without a scale.
        hopeless: names of the rows of which no scale keeps all but a thousandth.
    """

    scale: float
    lost: float
    lost_without: float
    hopeless: tuple[str, ...]


@dataclass(frozen=True)
class Profile:
    """What `amp.profile` found.

    Args:
        rows: one for each tensor, in the order of execution; parameters behind them.
        updates: one for each parameter.
        batches: how many were run.
        skipped: how many of the steps were skipped.
        dtype: the low type of the step.
    """

    rows: tuple[Row, ...]
    updates: tuple[UpdateRow, ...]
    batches: int
    skipped: int
    dtype: str

    def of(self, kind: str) -> list[Row]:
        """The rows of a kind."""
        return [row for row in self.rows if row.kind == kind]

    def loss_scale(self, dtype: str = "fp16") -> Advice:
        """The static loss scale that keeps most gradients in a type.

        It is the greatest power of two, 2^24 at most, with which the greatest gradient that was seen stays a quarter of
        the type's largest number. Gradients were seen as the step made them: what had become zero there is not known
        of, so profile in BF16, or in FP16 with a scale.

        Args:
            dtype: `fp16`, `bf16`, `fp8_e4m3` or `fp8_e5m2`.
        """
        limits = _range(dtype)
        gradients = [row for row in self.rows if row.kind in GRADIENTS]
        highest = max((row.histogram.highest for row in gradients if row.histogram.highest is not None), default=0)
        lowest = min((row.histogram.lowest for row in gradients if row.histogram.lowest is not None), default=0)
        needed = max(limits.normal - lowest, 0)  # more helps nobody
        exponent = min(limits.greatest - _HEADROOM - highest, _MOST_SCALE, needed)
        scale = 2.0**exponent
        hopeless = [row.name for row in gradients if row.histogram.fractions(dtype, scale).lost > _TOLERATED]
        hopeless += [row.name for row in self.of(ACTIVATION) if row.histogram.fractions(dtype).infinite > 0]
        weights = sum((row.histogram for row in self.of(WEIGHT_GRADIENT)), Histogram.empty())
        lost, without = weights.fractions(dtype, scale).lost, weights.fractions(dtype).lost
        return Advice(scale, lost, without, tuple(dict.fromkeys(hopeless)))

    def worst(self, dtype: str = "fp16", most: int = _SHOWN) -> list[Row]:
        """The rows that lose most in a type, the worst first, as they stood in the step."""
        limits = _range(dtype).name

        def lost(row: Row) -> float:
            found = row.stored.fractions(limits)
            return found.lost + found.subnormal / 2

        return sorted((row for row in self.rows if lost(row) > 0), key=lost, reverse=True)[:most]

    def __str__(self) -> str:
        dtype = self.dtype if self.dtype in RANGES else "fp16"
        advice = self.loss_scale(dtype)
        lines = [
            f"{len(self.rows)} tensors over {self.batches} batches, {self.skipped} of them skipped; as {dtype}:",
            f"  a static loss scale of {advice.scale:g} loses {advice.lost:.2%} of the gradients of weights, "
            f"none {advice.lost_without:.2%}",
        ]
        if advice.hopeless:
            lines.append(f"  no scale keeps {', '.join(advice.hopeless[:_SHOWN])}")
        for row in self.worst(dtype):
            found = row.stored.fractions(dtype)
            lines.append(
                f"  {found.zero:6.2%} zero {found.subnormal:6.2%} subnormal {found.infinite:6.2%} infinite  {row}"
            )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "dtype": self.dtype,
            "batches": self.batches,
            "skipped": self.skipped,
            "rows": [
                {
                    **{name: getattr(row, name) for name in _FIELDS},
                    "exponents": _sparse(row.histogram),
                    "stored": _sparse(row.stored),
                }
                for row in self.rows
            ],
            "updates": [
                {"name": row.name, "ratios": _sparse(row.ratios), "made": row.made, "lost": row.lost}
                for row in self.updates
            ],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Profile:
        """What `to_dict` gave.

        Raises:
            AmpError: the data is none.
        """
        try:
            rows = [
                Row(
                    *(one[key] for key in _FIELDS),
                    _dense(one["exponents"]),
                    _dense(one["stored"]),
                )
                for one in data["rows"]
            ]
            updates = [
                UpdateRow(one["name"], _dense(one["ratios"]), one["made"], dict(one["lost"])) for one in data["updates"]
            ]
            return cls(tuple(rows), tuple(updates), data["batches"], data["skipped"], data["dtype"])
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as cause:
            raise AmpError(f"this is no profile: {cause!r}", mend="pass what Profile.to_dict() gave") from cause

    def to_json(self, path: str | Path) -> None:
        """Write it to a file, atomically.

        Raises:
            AmpError: the file cannot be written.
        """
        write_atomically(path, json.dumps(self.to_dict(), indent=1))


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
        self.rows: dict[tuple[Any, ...], tuple[Counts, Counts]] = {}
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
            self._add((name, WEIGHT_GRADIENT, "", name.rpartition(".")[0], "", "", _short(value.dtype)), counts, shift)
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

    def _add(self, key: tuple[Any, ...], counts: Counts, shift: int) -> None:
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
        rows = [Row(*key, Histogram(true), Histogram(stored)) for key, (true, stored) in self.rows.items()]
        named = list(self._parameters())
        for (name, parameter), counts in zip(named, _count([one for _, one in named]), strict=True):
            held = Histogram(counts)
            rows.append(Row(name, WEIGHT, "", name.rpartition(".")[0], "", "", _short(parameter.dtype), held, held))
        low = self.step._low.short
        return Profile(
            tuple(rows), tuple(self.updates.values()), self.batches, int(self.step.skipped_steps) - self.skipped, low
        )


def _count(values: Sequence[Tensor]) -> Counts:
    found: Counts = count_exponents([one.detach() for one in values]).cpu().numpy()
    return found


def _short(dtype: torch.dtype) -> str:
    return neutral_dtype(dtype).short


def _key(node: fx.Node, kind: str) -> tuple[Any, ...]:
    made = node.all_input_nodes[0] if node.target is operator.getitem else node
    where, planned = user_source(node.meta.get("stack_trace")), str(node.meta.get(Key.PLANNED, ""))
    op, module, dtype = canonical_op(made.target), module_of(node)[0], _short(node.meta["val"].dtype)
    return (node.name, kind, op, module, where, planned, dtype)


def _range(dtype: str) -> Any:
    if dtype not in RANGES:
        raise AmpError(f"dtype={dtype!r}", mend=f"pass one of {', '.join(RANGES)}")
    return RANGES[dtype]


def _sparse(histogram: Histogram) -> dict[str, int]:
    """Exponents, or what stands in the place of one, that occur."""
    names = [str(LOWEST + place) for place in range(BINS - 3)] + ["zero", "infinite", "nan"]
    return {name: int(count) for name, count in zip(names, histogram.counts, strict=True) if count}


def _dense(data: dict[str, int]) -> Histogram:
    places = {"zero": BINS - 3, "infinite": BINS - 2, "nan": BINS - 1}
    counts = np.zeros(BINS, np.int64)
    for name, count in data.items():
        counts[places[name] if name in places else int(name) - LOWEST] = count
    return Histogram(counts)
