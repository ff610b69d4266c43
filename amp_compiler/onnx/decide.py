"""What is decided on a lowered model: first by the pipeline ONNX_PLAN, which pins nodes, then by the rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from amp_compiler.ir.graph_text import format_graph
from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.onnx.lowering.compounds import mark_compounds
from amp_compiler.onnx.lowering.fuse import OPS, Fusion, told_fusion
from amp_compiler.onnx.lowering.lowered import Lowered
from amp_compiler.passes.pipeline import ONNX_PLAN, Stages
from amp_compiler.passes.plan.make_plan import make_plan
from amp_compiler.planner.draft import Draft
from amp_compiler.policy.rules import Context, RuleSet


def decide(
    lowered: Lowered, fusion: Fusion | None, rules: RuleSet, ranges: Mapping[str, float] | None, stages: Stages | None
) -> PrecisionPlan:
    """Plan a lowered model. Gives it the graph whose nodes are pinned.

    Args:
        lowered: the lowered model.
        fusion: which of its norms and GELUs were made one op each; `None` where none were to be.
        rules: the rules.
        ranges: calibrated largest magnitude by value name.
        stages: takes the graph and what each pass decides, as text.
    """
    mark_compounds(lowered)
    if fusion is not None:
        _mark_fused(lowered, fusion)
    graph = lowered.graph
    known = {name: largest for name, largest in (ranges or {}).items() if name in graph.values}
    if stages is not None:
        stages.note("capture", format_graph(graph))
    draft = Draft(graph, rules, Context(lowered.low, graph.device), ranges=known)
    lowered.graph = ONNX_PLAN.run(draft, {}, stages).graph
    plan = make_plan(lowered.graph, rules, lowered.low, ranges=known, stages=stages, later=True)
    return plan if fusion is None else _with_fusion(plan, lowered, fusion)


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
