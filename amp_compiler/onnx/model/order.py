"""The order of the nodes of a message: each stands behind what it reads, which not every exporter sees to."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from amp_compiler.onnx.model.walk import all_nodes, proto_bodies


def in_order(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model with its nodes in order: itself where they are, else a copy.

    Nodes that read one another in a circle stay as they are, for the checker to refuse.
    """
    if _is_ordered(proto.graph, {""}):
        return proto
    named = {node.name for node in all_nodes(proto)}
    try:
        model = ir.serde.deserialize_model(proto)
        model.graph.sort()
    except Exception:  # noqa: BLE001  a circle, or a damaged graph: the checker says it with the node
        return proto
    for node in model.graph.all_nodes():
        if node.name not in named:  # `onnx_ir` gave it one
            node.name = None
    return ir.serde.serialize_model(model)


def _is_ordered(graph: onnx.GraphProto, around: set[str]) -> bool:
    """Whether each node, and each in its bodies, reads what stands before it."""
    known = around | {info.name for info in graph.input} | {tensor.name for tensor in graph.initializer}
    for node in graph.node:
        if not known.issuperset(node.input):
            return False
        if node.attribute and not all(_is_ordered(body, known) for body in proto_bodies(node).values()):
            return False
        known.update(node.output)
    return True
