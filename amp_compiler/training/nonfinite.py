"""Where non-finite gradients come from: read from the flags of a step, and found by running its graph again."""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from amp_compiler.fx.graph import canonical_op, module_of, neutral_dtype, user_source
from amp_compiler.fx.meta import Key
from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.training.program import StepProgram

_MASKS = frozenset({"aten.full", "aten.full_like", "aten.masked_fill", "aten.scalar_tensor", "aten.where"})
_SHOWN = 5


@dataclass(frozen=True)
class ValueRange:
    """What a value holds.

    Args:
        least: the least magnitude that is finite and not zero; 0 where there is none.
        greatest: the greatest that is finite.
        infinite: number of infinite elements.
        nan: number of elements that are NaN.
        dtype: short name of its type.
    """

    least: float
    greatest: float
    infinite: int
    nan: int
    dtype: str

    @classmethod
    def of(cls, value: Tensor) -> ValueRange:
        """Of a floating-point tensor."""
        wide = value.detach() if value.dtype is torch.float64 else value.detach().float()
        sizes = wide.abs().reshape(-1)
        finite = sizes[torch.isfinite(sizes)]
        numbers = finite[finite != 0]
        least, greatest = (float(numbers.min()), float(numbers.max())) if numbers.numel() else (0.0, 0.0)
        bad = int(torch.isinf(sizes).sum()), int(torch.isnan(sizes).sum())
        return cls(least, greatest, *bad, neutral_dtype(value.dtype).short)

    def __str__(self) -> str:
        parts = [f"{self.least:.3g} to {self.greatest:.3g}" if self.greatest else "zeros"]
        parts += [f"{self.infinite} infinite"] if self.infinite else []
        parts += [f"{self.nan} NaN"] if self.nan else []
        return f"{self.dtype} {', '.join(parts)}"


@dataclass(frozen=True)
class NonfiniteNode:
    """A node of the step graph, or an input of it, that made a value that is not finite from finite ones.

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

    def __str__(self) -> str:
        place = f" in {self.module}" if self.module else ""
        line = f", {self.where}" if self.where else ""
        told = [f"{self.name} ({self.op}, {self.phase}{place}{line})"]
        if self.decision:
            told.append(f"in the plan: {self.planned}, {self.decision}")
        if self.output is not None:
            told += [f"given {name}: {found}" for name, found in self.inputs]
            told.append(f"made {self.output}")
        return "\n    ".join(told)


@dataclass(frozen=True)
class NonfiniteReport:
    """What was not finite in a step. False where everything was finite.

    Args:
        parameters: qualified names of the parameters with a non-finite gradient.
        nodes: the first nodes that made something non-finite, in execution order. Where running the step again shows
            nothing (dropout draws new numbers), the nodes that made the gradients of `parameters`.
        repeated: whether `nodes` come from running the step again.
    """

    parameters: tuple[str, ...] = ()
    nodes: tuple[NonfiniteNode, ...] = ()
    repeated: bool = field(default=False)

    def __bool__(self) -> bool:
        return bool(self.parameters)

    def __str__(self) -> str:
        if not self:
            return "all gradients were finite"
        rest = len(self.parameters) - _SHOWN
        names = ", ".join(self.parameters[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
        title = "first made by" if self.repeated else "gradients made by"
        return f"not finite: the gradients of {names}\n" + "".join(f"  {title} {node}\n" for node in self.nodes)


def report_nonfinite(
    program: StepProgram, flags: Sequence[int], leaves: Sequence[Any] | None, scale: Tensor, most: int = _SHOWN
) -> NonfiniteReport:
    """Name the parameters and the first nodes of a step that were not finite.

    A skipped step changes no weight and no buffer, so forward and backward of its graph can run again on the same
    batch, node by node. Minus infinity that a mask puts in on purpose is told from an overflow by what comes of it.

    Args:
        program: what ran.
        flags: per parameter of `program.updated` whether its gradient was not finite.
        leaves: the batch; `None` where the step was not skipped and cannot be run again.
        scale: the loss scale that the step ran with, FP32 scalar.
        most: largest number of nodes to name.
    """
    bad = [number for number, flag in enumerate(flags) if flag]
    if not bad:
        return NonfiniteReport()
    parameters = tuple(program.updated[number] for number in bad)
    order = {node: place for place, node in enumerate(program.graph_module.graph.nodes)}
    made = sorted({program.gradient_node(number) for number in bad}, key=order.__getitem__)
    origins, ranges = ([], {}) if leaves is None else _origins(program, leaves, scale, made)
    nodes = sorted(origins, key=order.__getitem__) or made
    shown = tuple(
        described(node, is_forward=node.meta.get(Key.PHASE) == "forward", ranges=ranges, plan=program.plan)
        for node in nodes[:most]
    )
    return NonfiniteReport(parameters, shown, bool(origins))


def described(
    node: fx.Node,
    *,
    is_forward: bool,
    piece: str = "",
    ranges: Mapping[fx.Node, ValueRange] = MappingProxyType({}),
    plan: PrecisionPlan | None = None,
) -> NonfiniteNode:
    """A node as a report names it.

    Args:
        node: of a graph.
        is_forward: whether it is meant itself; else its backward.
        piece: the name of the piece that it stands in.
        ranges: of values that were seen.
        plan: of the forward.
    """
    name = f"{piece}/{node.name}" if piece else node.name
    if node.op != "call_function":
        return NonfiniteNode(name, "input", "", "forward", output=ranges.get(node))
    phase, where = "forward" if is_forward else "backward", user_source(node.meta.get("stack_trace"))
    planned = str(node.meta.get(Key.PLANNED, ""))
    inputs = tuple((source.name, ranges[source]) for source in node.all_input_nodes if source in ranges)
    decided = None if plan is None else next((one for one in plan.nodes if one.name == planned), None)
    return NonfiniteNode(
        name,
        canonical_op(node.target),
        module_of(node)[0],
        phase,
        where,
        planned,
        "" if decided is None else f"{decided.precision} by {decided.rule or 'no rule'} ({decided.reason})",
        inputs,
        ranges.get(node),
    )


def _origins(
    program: StepProgram, leaves: Sequence[Any], scale: Tensor, wanted: list[fx.Node]
) -> tuple[list[fx.Node], dict[fx.Node, ValueRange]]:
    """The nodes that the non-finite gradients go back to, and the ranges of all values."""
    replay = _Replay(program, leaves, scale)
    devices = [scale.device] if scale.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices=devices):  # training's random numbers stay as they are
        replay.run_again()
    found: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    open_nodes = list(wanted)
    while open_nodes:
        node = open_nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.meta.get(Key.PHASE) == "update":  # a sum of gradients, which was not run
            open_nodes += node.all_input_nodes
            continue
        if not replay.seen.is_bad(node):
            continue
        causes = [source for source in node.all_input_nodes if replay.seen.is_bad(source)]
        open_nodes += causes
        if not causes:
            found.add(node)
    return list(found), replay.seen.ranges


class _State(enum.Enum):
    FINITE = "finite"
    MASKED = "minus infinity, put in on purpose"
    BAD = "infinite or NaN"


class Finiteness:
    """Whether the values of a graph's nodes are finite.

    Args:
        is_forward: whether a node belongs to the forward: only there masks are put in.

    Attributes:
        ranges: of the values that were looked at.
    """

    def __init__(self, is_forward: Callable[[fx.Node], bool]) -> None:
        self._is_forward = is_forward
        self._states: dict[fx.Node, _State] = {}
        self.ranges: dict[fx.Node, ValueRange] = {}

    def note(self, node: fx.Node, value: Any) -> None:
        """Look at the value of a node; those of its inputs come before it."""
        items = value if isinstance(value, (list, tuple)) else [value]
        first = next((one for one in items if isinstance(one, Tensor) and one.is_floating_point()), None)
        if first is not None:
            self.ranges[node] = ValueRange.of(first)
        bad = [item for item in items if isinstance(item, Tensor) and not bool(torch.isfinite(item).all())]
        if not bad:
            self._states[node] = _State.FINITE
        elif all(bool((torch.isfinite(item) | torch.isneginf(item)).all()) for item in bad) and self._may_mask(node):
            self._states[node] = _State.MASKED
        else:
            self._states[node] = _State.BAD

    def is_bad(self, node: fx.Node) -> bool:
        """Whether its value is infinite or NaN, and no mask."""
        return self._states.get(node) is _State.BAD

    def _may_mask(self, node: fx.Node) -> bool:
        states = self._states
        if node.op != "call_function" or node.target is operator.getitem:
            return node.op != "call_function" or states.get(node.args[0]) is _State.MASKED  # type: ignore[arg-type]
        if not self._is_forward(node):
            return False
        sources = {states.get(source) for source in node.all_input_nodes}
        return _State.BAD not in sources and (canonical_op(node.target) in _MASKS or _State.MASKED in sources)


class _Replay(fx.Interpreter):
    """Runs what comes before the update and notes for each value whether it is finite."""

    def __init__(self, program: StepProgram, leaves: Sequence[Any], scale: Tensor) -> None:
        super().__init__(program.graph_module, garbage_collect_values=True)
        self.program, self.leaves, self.scale = program, leaves, scale
        self.source = program.graph_module.graph
        self.seen = Finiteness(lambda node: node.meta.get(Key.PHASE) == "forward")

    def run_again(self) -> None:
        """Run up to the update."""
        for node, resolve in zip(self.source.find_nodes(op="placeholder"), self.program.resolve, strict=True):
            if all(user.meta.get(Key.PHASE) == "update" for user in node.users):
                continue
            is_scale = node.meta.get(Key.STATE) == ("scale", "scale", 0)
            self._note(node, self.scale if is_scale else resolve.get(self.leaves))
        for node in self.source.nodes:
            if node.op in ("call_function", "get_attr") and node.meta.get(Key.PHASE) != "update":
                self._note(node, self.run_node(node))
                for done in self.user_to_last_uses.get(node, ()):
                    self.env.pop(done, None)

    def _note(self, node: fx.Node, value: Any) -> None:
        self.env[node] = value
        self.seen.note(node, value)
