"""From a graph and rules to a `PrecisionPlan`: the neutral passes in their order."""

from __future__ import annotations

from collections.abc import Mapping

from amp_compiler.errors import PassError
from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.graph import Node, PrecisionGraph, ValueKind
from amp_compiler.ir.plan import PlannedNode, PrecisionPlan
from amp_compiler.passes.pipeline import PLAN, Pipeline, Stages
from amp_compiler.planner.draft import Draft
from amp_compiler.planner.typing import TypingRules
from amp_compiler.policy.matching import RuleMatcher
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
        raise PassError(f"{low.value} is no low-precision type", mend="use DType.FLOAT16 or DType.BFLOAT16")
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
        raise PassError("casts were not placed yet", mend="run 'place_casts' first")
    typing = draft.typing
    shorts = {name: dtype.short for name, dtype in typing.results(draft.labels).items()}
    nodes = tuple([_planned(draft, typing, shorts, node) for node in draft.graph.nodes.values()])
    return PrecisionPlan(
        draft.context.low.short,
        draft.rules.name,
        draft.context.device,
        nodes,
        draft.casts,
        tuple((v.name, v.dtype.short) for v in draft.graph.values.values() if v.kind is ValueKind.INPUT),
        tuple(draft.graph.outputs),
        unused_rules(RuleMatcher(draft.rules, draft.graph, draft.context, draft.ranges)),
    )


def _planned(draft: Draft, typing: TypingRules, shorts: Mapping[str, str], node: Node) -> PlannedNode:
    decision = draft.decisions[node.name]
    computes = decision.precision is not Precision.KEEP  # what is kept as captured keeps its arithmetic too
    return PlannedNode(
        name=node.name,
        op=node.op,
        family=typing[node.name].info.family,
        module=node.module,
        precision=draft.labels[node.name],
        rule=decision.rule,
        reason=_reason(decision, draft.notes.get(node.name, "")),
        asked=decision.precision.value,
        source=node.source,
        outputs=tuple([(name, shorts[name]) for name in node.outputs]),
        math=decision.math.short if computes and decision.math else "",
        backward=_backward(decision, draft.labels[node.name]),
        backward_math=decision.backward_math.short if decision.backward_math else "",
        inputs=tuple([operand.value for operand in node.inputs]),
        math_rule=decision.math_rule if computes else "",
    )


def _backward(decision: Decision, label: str) -> str:
    """The type of the gradients; the node's own where it could not be moved from its captured type."""
    stays = label == "keep" and decision.precision is not Precision.KEEP
    return "" if decision.backward is None or stays else decision.backward.value


def _reason(decision: Decision, note: str) -> str:
    """The rule's reason, and how it came to this label."""
    return f"{decision.reason}; {note}" if decision.reason and note else decision.reason or note
