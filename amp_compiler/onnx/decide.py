"""What the rules decide on a lowered model, once what its graph demands of its nodes is pinned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.graph import Pin
from amp_compiler.ir.graph_text import format_graph
from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.onnx.lowering.compounds import mark_compounds
from amp_compiler.onnx.lowering.fuse import OPS, Fusion, told_fusion
from amp_compiler.onnx.lowering.lowered import Lowered
from amp_compiler.onnx.lowering.norms import pin_norm
from amp_compiler.onnx.lowering.overflow import Overflows
from amp_compiler.onnx.lowering.parameters import pin_batch_norms, pin_scales
from amp_compiler.onnx.lowering.ranges import Ranges, pin_ranges
from amp_compiler.onnx.lowering.running_sums import pin_running_sums
from amp_compiler.onnx.lowering.whole_numbers import pin_whole_numbers
from amp_compiler.passes.pipeline import Stages
from amp_compiler.passes.plan.make_plan import make_plan
from amp_compiler.policy.matching import RuleMatcher
from amp_compiler.policy.rules import Context, Precision, RuleSet


@dataclass(frozen=True)
class Decided:
    """A model with its plan.

    Args:
        plan: the plan.
        lowered: what `lowering.apply` carries it out on.
        ranges: what ranges demand.
        stages: the graph that was planned, as text, and what each pass decided on it; `None` where nobody asked.
    """

    plan: PrecisionPlan
    lowered: Lowered
    ranges: Ranges
    stages: Stages | None


def decide(
    lowered: Lowered, fusion: Fusion | None, rules: RuleSet, ranges: Mapping[str, float] | None, stages: Stages | None
) -> Decided:
    """Plan a lowered model. Fills in what its graph demands of its nodes.

    Args:
        lowered: the lowered model.
        fusion: which of its norms and GELUs were made one op each; `None` where none were to be.
        rules: the rules.
        ranges: calibrated largest magnitude by value name.
        stages: takes the graph and what each pass decides, as text.
    """
    low = lowered.low
    mark_compounds(lowered)
    known = {name: largest for name, largest in (ranges or {}).items() if name in lowered.graph.values}
    if fusion is not None:
        _mark_fused(lowered, fusion)
    found = pin_ranges(lowered, known, powers=rules.keeps("powers"))
    if low is DType.FLOAT16 and rules.keeps("powers"):
        pin_whole_numbers(lowered, rules)
    pin_batch_norms(lowered)
    pin_scales(lowered)
    if rules.keeps("running_sums"):
        pin_running_sums(lowered)
    _unify_norms(lowered, rules, known)
    if low is DType.FLOAT16 and rules.keeps("powers"):
        _keep_means(lowered, rules, known)
    if stages is not None:
        stages.note("capture", format_graph(lowered.graph))
    plan = make_plan(lowered.graph, rules, low, ranges=known, stages=stages, later=True)
    plan = plan if fusion is None else _with_fusion(plan, lowered, fusion)
    return Decided(plan, lowered, found, stages)


def _mark_fused(lowered: Lowered, fusion: Fusion) -> None:
    """Say of each op that took the place of a norm or GELU what it stands for (`Node.part`). Changes the graph."""
    nodes, kinds = lowered.graph.nodes, {op: kind for kind, (op, _) in OPS.items()}
    for name, node in lowered.nodes.items() if fusion.made else ():
        if node in fusion.made:
            nodes[name] = replace(nodes[name], part=kinds[node.op_type])


def _with_fusion(plan: PrecisionPlan, lowered: Lowered, fusion: Fusion) -> PrecisionPlan:
    """The plan with what was fused, and what was not, in the reasons of its nodes. Fills `lowered`."""
    lowered.fused = fusion.fused.total()
    lowered.notes.extend(told_fusion(fusion, lowered.model.opset("")))
    told = {**fusion.made, **fusion.left}
    by_name = {name: told[node] for name, node in lowered.nodes.items() if node in told}
    nodes = (replace(node, reason=f"{node.reason}; {by_name[node.name]}") if node.name in by_name else node
             for node in plan.nodes)  # fmt: skip
    return replace(plan, nodes=tuple(nodes))


def _unify_norms(lowered: Lowered, rules: RuleSet, ranges: Mapping[str, float]) -> None:
    """Keep a normalisation or GELU that is written out FP32 as a whole where a part of it is.

    ONNX Runtime fuses such parts to one op of one type, and refuses the model where their types differ. What stands
    between a sum of squares and its root would undo what the FP32 sum is for.
    """
    norms = [*lowered.compounds, *Overflows(lowered, {}).sums_of_squares()]
    if not norms:
        return
    matcher = RuleMatcher(rules, lowered.graph, Context(lowered.low, lowered.graph.device), ranges)
    for norm in norms:
        for name in norm:
            node = lowered.graph.nodes[name]
            decision = matcher.decide(node)
            asked = node.pin.precision if node.pin is not None else decision and decision.precision.value
            if asked == Precision.FP32.value:
                pin_norm(lowered, norm, name)
                break


def _keep_means(lowered: Lowered, rules: RuleSet, ranges: Mapping[str, float]) -> None:
    """Pin to FP32 what makes a mean of a sum that is FP32, and may be beyond FP16. Changes `lowered.graph`."""
    matcher = RuleMatcher(rules, lowered.graph, Context(lowered.low, lowered.graph.device), ranges)
    for total, makers in list(Overflows(lowered, {}).means()):
        decision = matcher.decide(total) if total.pin is None and makers else None
        asked = total.pin.precision if total.pin is not None else decision and decision.precision.value
        for node in makers if asked == Precision.FP32.value else ():
            if node.pin is None:
                reason = f"it brings the sum '{total.name}' back into the range of fp16"
                lowered.graph.nodes[node.name] = replace(node, pin=Pin("fp32", reason))
