"""What a profile says: the ranges of what a training step computes, and the loss scale that fits them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from amp_compiler.diagnose.exponents import Histogram
from amp_compiler.errors import AmpError
from amp_compiler.ir.dtypes import LowArgument, element_type, low_type
from amp_compiler.ir.files import write_atomically
from amp_compiler.ir.plan import Printed, many
from amp_compiler.ir.ranges import RANGES
from amp_compiler.ops.exponents import BINS, LOWEST

ACTIVATION, ACTIVATION_GRADIENT = "activation", "activation gradient"
WEIGHT, WEIGHT_GRADIENT = "weight", "weight gradient"
GRADIENTS = (ACTIVATION_GRADIENT, WEIGHT_GRADIENT)
_HEADROOM = 2  # exponents above the greatest gradient that was seen
_MOST_SCALE = 24  # exponent of the greatest scale, as the dynamic one has it
_TOLERATED = 1e-3  # of the numbers of a node: more is a loss
_WIDE = ("fp32", "fp64")
_SHOWN = 12
_FIELDS = ("name", "kind", "op", "module", "where", "planned", "dtype")


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
        histogram: of its exponents; of a gradient without the loss scale, to the whole exponent where that is no power
            of two.
        stored: of a gradient, as it stood in the step, with the loss scale; else the same. Where batches are gathered
            (`accumulate`), a weight's gradient is the FP32 sum so far.
        vanished: a gradient that is zero in every element, and of which FP16 does not tell whether it is so in FP32.
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
    vanished: bool = False

    def __str__(self) -> str:
        parts = [part for part in (self.op, f"in {self.module}" if self.module else "", self.where) if part]
        return f"{self.kind} {self.name}" + (f" ({', '.join(parts)})" if parts else "")


@dataclass(frozen=True)
class UpdateRow:
    """The updates of one parameter, over all steps that were not skipped.

    Args:
        name: of the parameter.
        ratios: of `|update| / |weight|`, where the weight is not zero.
        changed: number of elements whose update was not zero.
        lost: of these, by type, how many would have left a weight of that type as it was.
    """

    name: str
    ratios: Histogram
    changed: int
    lost: dict[str, int]

    def fraction_lost(self, dtype: LowArgument) -> float:
        """The fraction of updates that a weight of this type would not have noticed."""
        return self.lost[low_type(dtype).short] / self.changed if self.changed else 0.0


@dataclass(frozen=True)
class Advice:
    """A static loss scale.

    Args:
        scale: the power of two by which gradients are best kept.
        lost: the fraction of the nonzero gradients of weights that become zero or infinite with it; NaN where all that
            may be nonzero vanished.
        lost_without: the same without a scale.
        hopeless: names of the rows of which no scale keeps all but a thousandth.
        unknown: names of the weights whose gradients vanished, which the fractions do not count.
    """

    scale: float
    lost: float
    lost_without: float
    hopeless: tuple[str, ...]
    unknown: tuple[str, ...] = ()

    def __str__(self) -> str:
        if math.isnan(self.lost):
            return "what a static loss scale keeps is unknown: all gradients of weights are zero"
        lost = f"loses {self.lost:.2%} of the gradients of weights; none loses {self.lost_without:.2%}"
        return f"a static loss scale of {self.scale:,.9g} {lost}"


@dataclass(frozen=True)
class Product:
    """A node that may compute of FP8 operands.

    Args:
        name: of the node in the plan.
        op: canonical op; empty in an ONNX model.
        where: as in `Row`.
        match: what a rule matches it by.
        operands: places in `Profile.rows` of what it multiplies, as far as that is counted.
        gradients: places of what comes in for its backward.
    """

    name: str
    op: str
    where: str
    match: Mapping[str, str]
    operands: tuple[int, ...]
    gradients: tuple[int, ...]


@dataclass(frozen=True)
class Fp8Advice:
    """How a product is best computed of FP8 operands. As text it is a rule, to be pasted below `rules:`.

    Args:
        product: the node.
        format: `hybrid`, or `e4m3` where that loses no more of its gradient than a thousandth.
        scaling: `tensorwise`; `rowwise` where one scale loses more than a thousandth of an operand or of the gradient;
            empty for a convolution then, which has no finer scales and stays in 16 bits.
        lost: the fraction of its operands' nonzero numbers that become zero with one scale: of that which loses most.
        gradient_lost: the same of its gradient; `None` where none was counted.
    """

    product: Product
    format: str
    scaling: str
    lost: float
    gradient_lost: float | None

    def __str__(self) -> str:
        match = ", ".join(f"{key}: {json.dumps(value)}" for key, value in self.product.match.items())
        math_ = f", math: {{format: {self.format}, scaling: {self.scaling}}}" if self.scaling else ""
        gradient = "" if self.gradient_lost is None else f", {self.gradient_lost:.2%} of its gradient"
        where = f" ({self.product.where})" if self.product.where else ""
        lost = f"one scale loses {self.lost:.2%} of an operand{gradient}{where}"
        return f"- {{match: {{{match}}}, precision: low{math_}}}  # {lost}"


@dataclass(frozen=True, repr=False)
class Profile(Printed):
    """What `amp.profile` found.

    Args:
        rows: one for each tensor, in the order of execution; parameters behind them.
        updates: one for each parameter.
        batches: how many there were.
        skipped: how many of the steps were skipped.
        dtype: the low type of the step.
        every: the first of so many batches was counted.
        products: the nodes that may compute of FP8 operands, in the order of the plan.
    """

    rows: tuple[Row, ...]
    updates: tuple[UpdateRow, ...]
    batches: int
    skipped: int
    dtype: str
    every: int = 1
    products: tuple[Product, ...] = ()

    @property
    def counted(self) -> range:
        """The numbers of the batches that were counted, from 1."""
        return range(1, self.batches + 1, self.every)

    def of(self, kind: str) -> list[Row]:
        """The rows of a kind.

        Args:
            kind: as `Row.kind` has it, such as `"weight gradient"`.
        """
        return [row for row in self.rows if row.kind == kind]

    def loss_scale(self, dtype: str | LowArgument = "fp16") -> Advice:
        """The static loss scale that keeps most gradients in a type.

        It is the greatest power of two, 2^24 at most, with which the greatest gradient that was seen stays a quarter of
        the type's largest number. Gradients were seen as the step made them: of what had become zero there no more is
        known. Where all of a gradient may have, `unknown` names it: profile in BF16, or in FP16 with a scale.

        Args:
            dtype: `fp16`, `bf16`, `fp8_e4m3` or `fp8_e5m2`, or torch's 16-bit types and their names.
        """
        name = _named(dtype)
        _, normal, greatest = RANGES[name].exponents
        gradients = [row for row in self.rows if row.kind in GRADIENTS]
        # What the step makes in FP32, such as the gradients within the loss, is in no danger and sets no bound.
        gradients = [row for row in gradients if row.dtype not in _WIDE] or gradients
        highest = max((row.histogram.highest for row in gradients if row.histogram.highest is not None), default=0)
        lowest = min((row.histogram.lowest for row in gradients if row.histogram.lowest is not None), default=0)
        needed = max(normal - lowest, 0)  # more helps nobody
        exponent = min(greatest - _HEADROOM - highest, _MOST_SCALE, needed)
        scale = 2.0**exponent
        hopeless = [row.name for row in gradients if row.histogram.fractions(name, scale).lost > _TOLERATED]
        hopeless += [row.name for row in self.of(ACTIVATION) if row.histogram.fractions(name).infinite > 0]
        weights = sum((row.histogram for row in self.of(WEIGHT_GRADIENT)), Histogram.empty())
        lost, without = weights.fractions(name, scale).lost, weights.fractions(name).lost
        unknown = tuple(row.name for row in self.of(WEIGHT_GRADIENT) if row.vanished)
        if unknown and weights.zeros == weights.total:
            lost = without = math.nan
        return Advice(scale, lost, without, tuple(dict.fromkeys(hopeless)), unknown)

    def fp8(self) -> list[Fp8Advice]:
        """How each product is best computed of FP8 operands, the worst first: a rule each, `print(*found, sep="\\n")`.

        One scale takes the greatest exponent that was seen to that of the format, so where magnitudes change from batch
        to batch less is lost than is said here. What no finer scales would keep either is not told apart.
        """
        advice = []
        for product in self.products:
            lost = max((self._lost(place, "fp8_e4m3") for place in product.operands), default=0.0)
            narrow, wide = (
                max((self._lost(place, name) for place in product.gradients), default=None)
                for name in ("fp8_e4m3", "fp8_e5m2")
            )
            if not product.operands and narrow is None:
                continue
            format_ = "e4m3" if narrow is not None and narrow <= _TOLERATED else "hybrid"
            gradient_lost = narrow if format_ == "e4m3" else wide
            finer = "" if "conv" in product.op.lower() else "rowwise"
            scaling = "tensorwise" if max(lost, gradient_lost or 0.0) <= _TOLERATED else finer
            advice.append(Fp8Advice(product, format_, scaling, lost, gradient_lost))
        return sorted(advice, key=lambda one: -max(one.lost, one.gradient_lost or 0.0))

    def _lost(self, place: int, dtype: str) -> float:
        """The fraction of a tensor's nonzero numbers that become zero in an FP8 type with one scale."""
        histogram = self.rows[place].histogram
        if histogram.highest is None:
            return 0.0
        return histogram.fractions(dtype, 2.0 ** (RANGES[dtype].exponents[2] - histogram.highest)).zero

    def worst(self, dtype: str | LowArgument = "fp16", most: int = _SHOWN) -> list[Row]:
        """The rows that lose most in a type, the worst first, as they stood in the step; those that vanished lead.

        Args:
            dtype: `"fp16"`, `"bf16"`, another name of `RANGES`, or a `torch.dtype`.
            most: how many rows at most.
        """
        name = _named(dtype)

        def lost(row: Row) -> float:
            fractions = row.stored.fractions(name)
            return math.inf if row.vanished else fractions.lost + fractions.subnormal / 2

        return sorted((row for row in self.rows if lost(row) > 0), key=lost, reverse=True)[:most]

    def __str__(self) -> str:
        dtype = self.dtype if self.dtype in RANGES else "fp16"
        advice = self.loss_scale(dtype)
        sampled = f", counted in {len(self.counted)}: the first of every {self.every}" if self.every > 1 else ""
        lines = [
            f"{many(len(self.rows), 'tensor')} over {many(self.batches, 'batch')},"
            f" {self.skipped} of them skipped{sampled}; as {dtype}:",
            f"  {advice}",
        ]
        if advice.unknown:
            lines.append(
                f"  unknown: gradients of {', '.join(advice.unknown[:_SHOWN])}, zero in {self.dtype} and perhaps not in"
                " FP32; profile in BF16 or with a scale"
            )
        if advice.hopeless:
            lines.append(f"  no scale keeps {', '.join(advice.hopeless[:_SHOWN])}")
        for row in self.worst(dtype):
            fractions = row.stored.fractions(dtype)
            lost = f"{fractions.zero:6.2%} zero {fractions.subnormal:6.2%} subnormal {fractions.infinite:6.2%} infinite"
            lines.append(f"  {'unknown: all are zero' if row.vanished else lost}  {row}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "dtype": self.dtype,
            "batches": self.batches,
            "skipped": self.skipped,
            "every": self.every,
            "rows": [
                {
                    **{name: getattr(row, name) for name in _FIELDS},
                    "exponents": _sparse(row.histogram),
                    "stored": _sparse(row.stored),
                    "vanished": row.vanished,
                }
                for row in self.rows
            ],
            "updates": [
                {"name": row.name, "ratios": _sparse(row.ratios), "changed": row.changed, "lost": row.lost}
                for row in self.updates
            ],
            "products": [asdict(one) for one in self.products],
        }

    def to_json(self, path: str | Path) -> None:
        """Write it to a file, atomically.

        Args:
            path: the file.

        Raises:
            AmpError: the file cannot be written.
        """
        write_atomically(path, json.dumps(self.to_dict(), indent=1))


def _named(dtype: object) -> str:
    known = element_type(dtype)
    name = known.short if known else str(dtype)
    if name not in RANGES:
        raise AmpError(f"dtype={dtype!r}", hint=f"pass one of {', '.join(RANGES)}")
    return name


def _sparse(histogram: Histogram) -> dict[str, int]:
    """Exponents, or what stands in the place of one, that occur."""
    names = [str(LOWEST + place) for place in range(BINS - 3)] + ["zero", "infinite", "nan"]
    return {name: int(count) for name, count in zip(names, histogram.counts, strict=True) if count}
