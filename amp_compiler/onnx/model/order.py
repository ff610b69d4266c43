"""The order of the nodes of a message: each stands behind what it reads, which not every exporter sees to."""

from __future__ import annotations

import onnx

from amp_compiler.onnx.model.walk import proto_bodies, read_names


def in_order(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model with its nodes in order: itself where they are, else a copy.

    Nodes that read one another in a circle stay as they are, for the checker to refuse.
    """
    if _is_ordered(proto.graph, set()):
        return proto
    sorted_copy = onnx.ModelProto()
    sorted_copy.CopyFrom(proto)
    _sort(sorted_copy.graph)
    return sorted_copy


def _is_ordered(graph: onnx.GraphProto, around: set[str]) -> bool:
    """Whether each node reads what stands before it. What nothing makes at all is no question of order."""
    known = around | {info.name for info in graph.input} | {tensor.name for tensor in graph.initializer}
    known.add("")  # what is left out is no question of order either
    makes: set[str] = set()  # filled where something is read that nothing before it makes
    for node in graph.node:
        if not known.issuperset(node.input):
            makes = makes or _output_names(graph)
            if any(name in makes and name not in known for name in node.input):
                return False
        inner = proto_bodies(node) if node.attribute else None
        if inner:
            makes = makes or _output_names(graph)
            if any(name in makes and name not in known for name in read_names(node)):
                return False
            if not all(_is_ordered(body, known) for body in inner.values()):
                return False
        known.update(node.output)
    return True


def _output_names(graph: onnx.GraphProto) -> set[str]:
    return {name for node in graph.node for name in node.output}


def _sort(graph: onnx.GraphProto) -> None:
    import networkx as nx  # takes a tenth of a second, and few models need it

    for node in graph.node:
        for body in proto_bodies(node).values():
            _sort(body)
    makers = {name: index for index, node in enumerate(graph.node) for name in node.output if name}
    reads: nx.DiGraph = nx.DiGraph()
    reads.add_nodes_from(range(len(graph.node)))
    for index, node in enumerate(graph.node):
        reads.add_edges_from((makers[name], index) for name in read_names(node) if name in makers)
    try:
        order = list(nx.lexicographical_topological_sort(reads))
    except nx.NetworkXUnfeasible:
        return
    nodes = [onnx.NodeProto.FromString(graph.node[index].SerializeToString()) for index in order]
    del graph.node[:]
    graph.node.extend(nodes)
