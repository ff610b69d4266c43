"""From a graph and rules to a `PrecisionPlan`: the neutral passes in their order."""

from __future__ import annotations

from collections.abc import Mapping

from amp_compiler.errors import PassError
from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.graph import Node, PrecisionGraph, ValueKind
from amp_compiler.ir.plan import PlannedModel, PlannedNode, PrecisionPlan
from amp_compiler.passes.pipeline import PLAN, Pipeline, Stages
from amp_compiler.planner.draft import Draft
from amp_compiler.policy.matching import RuleMatcher
from amp_compiler.policy.reduction_size import flops
from amp_compiler.policy.rules import Context, Decision, Precision, RuleSet
from amp_compiler.policy.unused import unused_rules


def make_plan(
    graph: PrecisionGraph,
    rules: RuleSet,
    low: DType,
    *,
    ranges: Mapping[str, float] | None = None,
    stages: Stages | None = None,
    pipeline: Pipeline = PLAN,
) -> PrecisionPlan:
    """Plan a graph: which node runs in which type, and where casts stand.

    Args:
        graph: the captured graph. It is not changed; its device is the one that is planned for.
        rules: the rules.
        low: the 16-bit type, `DType.FLOAT16` or `DType.BFLOAT16`.
        ranges: calibrated largest magnitude by value name.
        stages: takes the text behind each pass.
        pipeline: the passes.

    Returns:
        The plan; the same for the same arguments on every run.

    Raises:
        GraphError: the graph breaks an invariant.
        PassError: `low` is no 16-bit type, or a pass broke its contract.

    Example:
        ```python
        plan = make_plan(graph, load_rules("default"), DType.BFLOAT16)
        print(plan.cast_bytes)
        ```
    """
    if low not in (DType.FLOAT16, DType.BFLOAT16):
        raise PassError(f"{low.value} is no low-precision type", hint="use DType.FLOAT16 or DType.BFLOAT16")
    graph.verify()
    draft = Draft(graph, rules, Context(low, graph.device), ranges=dict(ranges or {}))
    return plan_of(pipeline.run(draft, {}, stages))


def plan_of(draft: Draft) -> PrecisionPlan:
    """The plan that a finished draft says.

    Args:
        draft: with decisions, labels and casts.

    Raises:
        PassError: where casts were not placed yet.
    """
    if draft.casts is None:
        raise PassError("casts were not placed yet", hint="run 'place_casts' first")
    values = draft.graph.values.values()
    inputs = [value for value in values if value.kind is ValueKind.INPUT]
    shapes = [", ".join(map(str, "?" if value.shape is None else value.shape)) for value in inputs]
    model = PlannedModel(
        draft.graph.model,
        sum(value.numel for value in values if value.kind is ValueKind.PARAMETER),
        tuple(f"{value.dtype.short}[{shape}]" for value, shape in zip(inputs, shapes, strict=True)),
    )
    return PrecisionPlan(
        draft.context.low.short,
        draft.rules.name,
        draft.context.device,
        _Verdicts(draft).nodes(),
        draft.casts,
        tuple((value.name, value.dtype.short) for value in inputs),
        tuple(draft.graph.outputs),
        unused_rules(RuleMatcher(draft.rules, draft.graph, draft.context, draft.ranges)),
        model=model,
    )


class _Verdicts:
    """The verdicts on the nodes of a draft. What is alike in many of them is put into words once."""

    def __init__(self, draft: Draft) -> None:
        self.draft, self.typing, self.types = draft, draft.typing.nodes, draft.types
        self.shorts, self.sizes = ({dtype: getattr(dtype, what) for dtype in DType} for what in ("short", "itemsize"))
        self.values = draft.graph.values
        self.said: dict[tuple[int, str, str], tuple[str, ...]] = {}

    def nodes(self) -> tuple[PlannedNode, ...]:
        """The verdicts on all nodes, in execution order."""
        return tuple([self._of(node) for node in self.draft.graph.nodes.values()])

    def _of(self, node: Node) -> PlannedNode:
        draft, name = self.draft, node.name
        decision, label, note = draft.decisions[name], draft.labels[name], draft.notes.get(name, "")
        key = (id(decision), label, note)  # the draft holds the decisions, so that each has an id of its own
        said = self.said.get(key)
        if said is None:
            said = self.said[key] = _said(decision, label, note)
        reason, requested, math, backward, backward_math, math_rule = said
        types, shorts, sizes, values, info = self.types, self.shorts, self.sizes, self.values, self.typing[name].info
        return PlannedNode(
            name,
            node.op,
            info.family,
            node.module,
            label,
            decision.rule,
            reason,
            requested,
            node.source,
            tuple([(output, shorts[types[output]]) for output in node.outputs]),
            math,
            backward,
            backward_math,
            tuple([operand.value for operand in node.inputs]),
            math_rule,
            0 if info.family == "view" else sum([values[one].numel * sizes[types[one]] for one in node.outputs]),
            flops(draft.graph, node, info),
        )


def _said(decision: Decision, label: str, note: str) -> tuple[str, ...]:
    """The fields of a verdict that follow from the decision, the label and its note alone."""
    computes = decision.precision is not Precision.KEEP  # what is kept as captured keeps its arithmetic too
    return (
        _reason(decision, note),
        decision.precision.value,
        decision.math.short if computes and decision.math else "",
        _backward(decision, label),
        decision.backward_math.short if decision.backward_math else "",
        decision.math_rule if computes else "",
    )


def _backward(decision: Decision, label: str) -> str:
    """The type of the gradients; the node's own where it could not be moved from its captured type."""
    stays = label == "keep" and decision.precision is not Precision.KEEP
    return "" if decision.backward is None or stays else decision.backward.value


def _reason(decision: Decision, note: str) -> str:
    """The rule's reason, and how it came to this label."""
    return f"{decision.reason}; {note}" if decision.reason and note else decision.reason or note
