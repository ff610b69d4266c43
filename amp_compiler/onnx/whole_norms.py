"""The choice between norms in parts, as a model has them, and one op for each: by what the casts of both plans cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from amp_compiler.ir.graph import Node
from amp_compiler.ir.plan import PlannedCast, PrecisionPlan
from amp_compiler.onnx.decide import Decided
from amp_compiler.onnx.lowering.compounds import GELU
from amp_compiler.onnx.lowering.fuse import OPS
from amp_compiler.planner.free_nodes import CAST_OVERHEAD
from amp_compiler.planner.numbers import find_numbers
from amp_compiler.policy.matching import RuleMatcher
from amp_compiler.policy.rules import Context, Precision, RuleSet


def with_fewer_casts(parts: Decided, rules: RuleSet, decided_with: Callable[[frozenset[str]], Decided]) -> Decided:
    """The model as it stands, or with one op for each norm beside which casts would stand, where that saves some.

    Args:
        parts: what was decided on the model as it stands.
        rules: the rules.
        decided_with: gives what is decided where the norms with these results are one op each.
    """
    torn = _torn(parts, rules)
    whole = decided_with(torn) if torn else parts
    return whole if _cast_cost(whole.plan) < _cast_cost(parts.plan) else parts


def _torn(parts: Decided, rules: RuleSet) -> frozenset[str]:
    """The results of the norms beside which a plan has casts, though the rules would have one op for them 16-bit."""
    lowered, graph, opset = parts.lowered, parts.lowered.graph, parts.lowered.model.opset("")
    ops = {kind: f"onnx.{op}" for kind, (op, since) in OPS.items() if kind != GELU and since <= opset}
    norms = [names for names in lowered.compounds if any(graph.nodes[name].part in ops for name in names)]
    beside: set[str] = set()
    for cast in _moved(parts.plan) if norms else ():
        maker = graph.producer(cast.value)
        beside.update([name for name, _ in cast.users], [maker.name] if maker is not None else ())
    norms = [names for names in norms if not beside.isdisjoint(names)]
    if not norms:
        return frozenset()
    matcher = RuleMatcher(rules, graph, Context(lowered.low, graph.device))
    numbers = find_numbers(graph, rules)

    def may_be_low(node: Node) -> bool:
        if node.name in numbers.kept or (node.pin is not None and node.pin.precision == Precision.KEEP.value):
            return False
        decision = matcher.decide(replace(node, op=ops[node.part])) if node.part in ops else None
        return decision is None or decision.precision in (Precision.LOW, Precision.FOLLOW)

    whole = [names for names in norms if all(may_be_low(graph.nodes[name]) for name in names)]
    return frozenset(lowered.nodes[names[-1]].outputs[0].name or "" for names in whole)


def _moved(plan: PrecisionPlan) -> Iterator[PlannedCast]:
    return (cast for cast in plan.casts if cast.bytes > 0 and not cast.explicit)


def _cast_cost(plan: PrecisionPlan) -> int:
    """What the casts of a plan cost, as the cut counts it."""
    return sum(cast.bytes + CAST_OVERHEAD for cast in _moved(plan))
