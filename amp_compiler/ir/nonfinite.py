"""What is not finite in a run, or lost in zeros: which nodes made it, of what, and the rule that fixes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from amp_compiler.ir.plan import Printed

INPUT = "input"  # the op of a node that is none
SHOWN = 5  # so many nodes are named
LOSS = "the loss"  # among the results of a step


@dataclass(frozen=True)
class ValueRange:
    """What a value holds.

    Args:
        least: the least magnitude that is finite and not zero; 0 where there is none.
        greatest: the greatest that is finite.
        infinite: number of infinite elements.
        nan: number of elements that are NaN.
        dtype: short name of its type.
        zeros: number of elements that are zero.
    """

    least: float
    greatest: float
    infinite: int
    nan: int
    dtype: str
    zeros: int = 0

    @property
    def is_zero(self) -> bool:
        """Whether it holds zeros and nothing else."""
        return self.zeros > 0 and self.greatest == 0 and not self.spoilt

    @property
    def spoilt(self) -> str:
        """What of it is not finite, in words; empty where all is finite."""
        counts = [f"{self.infinite} infinite"] if self.infinite else []
        return ", ".join([*counts, f"{self.nan} NaN"] if self.nan else counts)

    def __str__(self) -> str:
        numbers = [f"{self.least:.3g} to {self.greatest:.3g}"] if self.greatest else []
        zeros = [f"{self.zeros} zeros"] if self.zeros else []
        parts = [*numbers, *zeros, *([self.spoilt] if self.spoilt else [])]
        return f"{self.dtype} {', '.join(parts) or 'nothing'}"


@dataclass(frozen=True)
class NonfiniteNode:
    """A node of a graph, or an input of it, that made a value that is not finite from finite ones.

    Args:
        name: of the node, as `step.graph_module.print_readable()` shows it.
        op: canonical op, or `input`.
        module: qualified name of the module that it belongs to, empty where unknown.
        phase: `forward` or `backward`.
        where: `file:line` of the user's code, empty where unknown.
        planned: name of the node in the plan that it was made for, empty where unknown.
        decision: what the plan says of that node: its precision, the rule (`file:line`) and the reason.
        inputs: what it was given, by name; of tensors in floating point alone.
        output: what it made; of the first such result.
        rounding: whether it is where a value is rounded to 16 bits.
        parameter: qualified name of the parameter or buffer that `planned` is.
    """

    name: str
    op: str
    module: str
    phase: str
    where: str = ""
    planned: str = ""
    decision: str = ""
    inputs: tuple[tuple[str, ValueRange], ...] = ()
    output: ValueRange | None = None
    rounding: bool = False
    parameter: str = ""

    @property
    def title(self) -> str:
        """Name and place, in one line."""
        place = f" in {self.module}" if self.module else ""
        line = f", {self.where}" if self.where else ""
        name = self.parameter if self.parameter and self.op == INPUT else self.name
        return f"{name} ({self.op}, {self.phase}{place}{line})"

    @property
    def seen(self) -> str:
        """What it was given and made, in words."""
        ranges = ", ".join(str(item) for _, item in self.inputs)
        return (f"given {ranges}, " if ranges else "") + f"made {self.output or 'inf or NaN'}"

    def __str__(self) -> str:
        lines = [self.title]
        if self.decision:
            lines.append(f"in the plan: {self.parameter or self.planned}, {self.decision}")
        if self.output is not None:
            lines += [f"given {name}: {item}" for name, item in self.inputs]
            lines.append(f"made {self.output}")
        return "\n    ".join(lines)


@dataclass(frozen=True, repr=False)
class NonfiniteReport(Printed):
    """What was not finite in a step, or in what a model gives. False where everything was finite.

    Args:
        parameters: qualified names of the parameters with a non-finite gradient.
        nodes: the first nodes that made something non-finite, in execution order; empty where running the step again
            shows nothing, as dropout draws new numbers.
        results: what else was not finite: the loss, outputs of a model. Where there is neither this nor a parameter, an
            overflow has left no trace: `1 / inf` is 0.
        rule: rules in YAML, ready for a file, with which the same batch was run again and was finite; empty where none
            was found or none fixes it.
        cure: in a sentence, what fixes it, or why no rule does; empty where that was not asked for.
        zeros: qualified names of the parameters whose gradient is zero and would not be in FP32; all is finite then,
            and `nodes` are the first that made zeros of other numbers.
        saturated: operands of FP8 products, in words, that are larger than their scale holds, in a step that is finite.
    """

    parameters: tuple[str, ...] = ()
    nodes: tuple[NonfiniteNode, ...] = ()
    results: tuple[str, ...] = ()
    rule: str = ""
    cure: str = ""
    zeros: tuple[str, ...] = ()
    saturated: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.parameters or self.results or self.nodes or self.zeros or self.saturated)

    def __str__(self) -> str:
        if not self:
            return (
                "all was finite; what becomes zero or coarse in 16 bits is counted by amp.profile,"
                " and amp.tune writes the rules that cure it"
            )
        gradients = [_gradients(self.parameters)] if self.parameters else []
        what = (
            ", ".join([*self.results, *gradients])
            or "values between, and what is made of them is finite all the same, and may be wrong"
        )
        first = f"zero, and not so in FP32: {_gradients(self.zeros)}" if self.zeros else f"not finite: {what}"
        saturated = [f"saturated: {each}" for each in self.saturated[:SHOWN]]
        saturated += [f"and {rest} more" for rest in [len(self.saturated) - SHOWN] if rest > 0]
        text = "".join(f"{one}\n" for one in saturated or [first])
        text += "".join(f"  first made by {node}\n" for node in self.nodes)
        return text + "".join(f"{part}\n" for part in (self.cure, self.rule) if part)


def _gradients(parameters: Sequence[str]) -> str:
    rest = len(parameters) - SHOWN
    return f"the gradients of {', '.join(parameters[:SHOWN])}" + (f" and {rest} more" if rest > 0 else "")
