"""The choice between norms in parts, as a model has them, and one op for each: by what the casts of both plans cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from amp_compiler.ir.graph import Node
from amp_compiler.ir.plan import PlannedCast, PrecisionPlan
from amp_compiler.onnx.decide import Decided
from amp_compiler.onnx.lowering.compounds import LAYER_NORM, RMS_NORM
from amp_compiler.onnx.lowering.fuse import FIRST_OPSET
from amp_compiler.planner.free_nodes import CAST_OVERHEAD
from amp_compiler.planner.numbers import find_numbers
from amp_compiler.policy.matching import RuleMatcher
from amp_compiler.policy.rules import Context, Precision, RuleSet

_OPS = {LAYER_NORM: "onnx.LayerNormalization", RMS_NORM: "onnx.RMSNormalization"}  # by part, the op for it


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
    lowered, nodes = parts.lowered, parts.lowered.graph.nodes
    norms = _norms_in_parts(parts)
    beside: set[str] = set()
    for cast in parts.plan.casts if norms else ():
        if _moves(cast):
            maker = lowered.graph.producer(cast.value)
            beside.update([name for name, _ in cast.users], [maker.name] if maker is not None else ())
    norms = [names for names in norms if not beside.isdisjoint(names)]
    if not norms:
        return frozenset()
    matcher = RuleMatcher(rules, lowered.graph, Context(lowered.low, lowered.graph.device))
    numbers = find_numbers(lowered.graph, rules)

    def may_be_low(node: Node) -> bool:
        if node.name in numbers.kept or (node.pin is not None and node.pin.precision == Precision.KEEP.value):
            return False
        decision = matcher.decide(replace(node, op=_OPS[node.part])) if node.part in _OPS else None
        return decision is None or decision.precision in (Precision.LOW, Precision.FOLLOW)

    whole = [names for names in norms if all(may_be_low(nodes[name]) for name in names)]
    return frozenset(lowered.nodes[names[-1]].outputs[0].name or "" for names in whole)


def _norms_in_parts(parts: Decided) -> list[list[str]]:
    """The norms among the compounds, where the opset has an op for them."""
    if parts.lowered.model.opset("") < FIRST_OPSET:
        return []
    nodes = parts.lowered.graph.nodes
    return [names for names in parts.compounds if any(nodes[name].part in _OPS for name in names)]


def _moves(cast: PlannedCast) -> bool:
    return cast.bytes > 0 and not cast.explicit


def _cast_cost(plan: PrecisionPlan) -> int:
    """What the casts of a plan cost, as the cut counts it."""
    return sum(cast.bytes + CAST_OVERHEAD for cast in plan.casts if _moves(cast))
