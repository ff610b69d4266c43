"""What a verification found, as values."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import onnx

from amp_compiler.ir.plan import many


@dataclass(frozen=True, slots=True)
class BadNode:
    """A node with a result that is not finite although the original's is.

    Args:
        node: its name in the converted model; empty for an unnamed one.
        op: its operator.
        value: the result.
        original: largest magnitude of the value in the original; NaN where the original has no such value.
    """

    node: str
    op: str
    value: str
    original: float


@dataclass(frozen=True, slots=True)
class OutputError:
    """How far one output is from the original's, over all batches.

    Args:
        name: the output.
        relative: relative L2 error, `‖a - b‖ / ‖a‖`; infinite where an element is not finite and the original's is.
            For an output that is not of floats, the share of elements that differ.
        largest: largest absolute difference of one element.
        elements: number of elements compared.
    """

    name: str
    relative: float
    largest: float
    elements: int


@dataclass(frozen=True, slots=True)
class WorstBatch:
    """The batch with the largest error.

    Args:
        number: which one, from 0 on.
        label: what it was drawn for, for a random batch.
        inputs: its inputs, as `ids: int64[1, 2003] from 0 to 2002`.
        output: the output with the largest error in it.
        relative: that error, as in `OutputError`.
        problem: why the outputs cannot be compared; empty where they can.
        stored: the largest error of an output where the stored data alone are in 16 bits, and all that is computed is
            in FP32: nodes in FP32 alone, whose data stay FP32 with them, take it away. `None` for an error below 0.01.
    """

    number: int
    label: str
    inputs: tuple[str, ...]
    output: str
    relative: float
    problem: str = ""
    stored: float | None = None

    def __str__(self) -> str:
        label = f" ({self.label})" if self.label else ""
        what = self.problem or f"'{self.output}' is off by {self.relative:.3g}"
        text = f"worst in batch {self.number}{label}: {what}; with {', '.join(self.inputs) or 'no inputs'}"
        if self.stored is None:
            return text
        return f"{text}\nwith 16-bit weights alone, and all that is computed in FP32, it is off by {self.stored:.3g}"


@dataclass(frozen=True)
class VerifyReport:
    """What `verify` found.

    Args:
        outputs: errors of the outputs, in the model's order.
        batches: number of batches compared.
        first_bad: the first node, in the order of execution, whose result is not finite where the original's is;
            `None` where there is none.
        bad: number of such values.
        engine: what ran the models: `onnxruntime`, or `onnx.reference` where ONNX Runtime lacks an operator.
        worst: the batch with the largest error; `None` where no batch has one.
        untried: what random inputs did not hold, in a few words each.

    Example:
        >>> report = verify("m.onnx", "m.fp16.onnx", "data.npz")
        >>> report.ok(1e-2), report.largest_error
        (True, 0.00061)
    """

    outputs: tuple[OutputError, ...]
    batches: int
    first_bad: BadNode | None = None
    bad: int = 0
    engine: str = ""
    worst: WorstBatch | None = None
    untried: tuple[str, ...] = ()

    @property
    def largest_error(self) -> float:
        """The largest relative error of any output."""
        return max((output.relative for output in self.outputs), default=0.0)

    def ok(self, tolerance: float) -> bool:
        """True where every output is finite wherever the original's is, and off by `tolerance` at most, on some batch.

        A value between that is not finite (a mask that became minus infinity, say) does no harm by itself.
        """
        return self.batches > 0 and self.largest_error <= tolerance

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, ready for JSON; what is not finite is written as text."""
        data: dict[str, Any] = _plain({**asdict(self), "largest_error": self.largest_error})
        return data

    def __str__(self) -> str:
        from rich import box
        from rich.console import Console
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
        for column in ("output", "relative error", "largest difference", "elements"):
            table.add_column(column, justify="left" if column == "output" else "right", overflow="fold")
        for output in self.outputs:
            table.add_row(output.name, f"{output.relative:.3g}", f"{output.largest:.3g}", f"{output.elements:,}")
        text = io.StringIO()
        Console(file=text, width=120, color_system=None, markup=False).print(table)
        over = many(self.batches, "batch")
        lines = [text.getvalue().rstrip(), f"largest relative error {self.largest_error:.3g} over {over}"]
        if self.first_bad is not None:
            bad = self.first_bad
            lines.append(
                f"not finite first at {bad.op} '{bad.node}' ({bad.value}; the original's largest is "
                f"{bad.original:.3g}); {self.bad} value{'s' * (self.bad != 1)} in all"
            )
        if self.worst is not None:
            lines.append(str(self.worst))
        if self.untried:
            lines.append(f"not tried: {'; '.join(self.untried)}")
        return "\n".join(lines) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def first_bad(
    model: onnx.ModelProto, batches: Sequence[tuple[Mapping[str, float], Mapping[str, float]]]
) -> tuple[BadNode | None, int]:
    """The first value that is not finite although the original's is in that batch, and how many such there are.

    A value that the original lacks stands for the one that it is a cast of, or that is a cast of it. Where there is
    none either, it counts if no result that its node reads is the cause.

    Args:
        model: the converted model.
        batches: for each batch the largest magnitude of each value of the original, and of the converted model.
    """
    same = _counterparts(model, {name for before, _ in batches for name in before})
    bad = []
    for node in model.graph.node:
        for name in node.output if batches else ():
            twin = same.get(name)
            originals = [
                math.nan if twin is None else before[twin]
                for before, after in batches
                if after.get(name) == math.inf
                and (all(after.get(one) != math.inf for one in node.input) if twin is None else before[twin] < math.inf)
            ]
            if originals:
                bad.append(BadNode(node.name, node.op_type, name, max(originals)))
    return next(iter(bad), None), len(bad)


def _counterparts(model: onnx.ModelProto, known: set[str]) -> dict[str, str]:
    """The original's value that each value of the converted model stands for."""
    same = {name: name for name in known}
    casts = [(node.input[0], node.output[0]) for node in model.graph.node if node.op_type == "Cast" and not node.domain]
    for source, target in casts:
        if source in same:
            same.setdefault(target, same[source])
    for source, target in reversed(casts):
        if target in same:
            same.setdefault(source, same[target])
    return same
