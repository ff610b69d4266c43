"""The model's own casts after a plan was carried out: what changes no type any more goes, and what nobody reads."""

from __future__ import annotations

import onnx_ir as ir

from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.onnx.lowering.lowered import Lowered

_CASTS = ("onnx.Cast", "onnx.CastLike")


def drop_idle_casts(lowered: Lowered, plan: PrecisionPlan) -> None:
    """Take out casts of the model that the plan made idle, in place. What was idle before stays,
    but for what an export has kept for the plan (`Lowered.held`).

    A cast whose input has come to have its type is read past; where it makes an output of a graph it becomes an
    `Identity`. One that nobody reads any more, since all its readers have its input cast to the low type, goes too.

    Args:
        lowered: the model, on which the plan has been carried out.
        plan: the plan.
    """
    own = [neutral for neutral in lowered.graph.nodes.values() if neutral.op in _CASTS]
    planned_types = plan.types
    for neutral in own:
        node = lowered.nodes[neutral.name]
        source, result = neutral.inputs[0].value, neutral.outputs[0]
        captured = lowered.graph.values[source].dtype
        was = captured is lowered.graph.values[result].dtype
        idle = planned_types.get(source, captured) is planned_types.get(result, lowered.graph.values[result].dtype)
        idle &= not was or neutral.name in lowered.held
        if idle:
            _pass_on(node)
        if _is_dead(node) and (lowered.graph.users(result) or idle):
            _remove(node)


def _pass_on(node: ir.Node) -> None:
    source, result = node.inputs[0], node.outputs[0]
    if source is None:
        return
    if result.is_graph_output():
        for other in list(node.attributes):
            node.attributes.pop(other)
        node.op_type = "Identity"
        node.resize_inputs(1)
    else:
        result.replace_all_uses_with(source)


def _is_dead(node: ir.Node) -> bool:
    return not any(out.uses() or out.is_graph_output() for out in node.outputs)


def _remove(node: ir.Node) -> None:
    graph = node.graph
    if isinstance(graph, ir.Graph):
        graph.remove(node, safe=True)
