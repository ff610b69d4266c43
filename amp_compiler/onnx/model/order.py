"""The order of the nodes of a message: each stands behind what it reads, which not every exporter sees to."""

from __future__ import annotations

from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter

import onnx

from amp_compiler.onnx.model.walk import proto_bodies, proto_graphs


def in_order(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model with its nodes in order: itself where they are, else a copy.

    Nodes that read one another in a circle stay as they are, for the checker to refuse.
    """
    orders = [_order(graph.node) for graph in proto_graphs(proto.graph)]
    if not any(orders):
        return proto
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for graph, order in reversed([*zip(proto_graphs(copy.graph), orders, strict=True)]):  # bodies before their nodes
        if order:
            nodes = [graph.node[index] for index in order]
            del graph.node[:]
            graph.node.extend(nodes)
    return copy


def _order(nodes: Sequence[onnx.NodeProto]) -> list[int]:
    """The places of nodes in order; none where they are, or read one another in a circle."""
    read: set[str] = set()
    for node in nodes:
        read.update(_read(node) if node.attribute else node.input)
        read.discard("")
        if not read.isdisjoint(node.output):
            break
    else:
        return []
    makers = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    behind = {index: {makers[name] for name in _read(node) if name in makers} for index, node in enumerate(nodes)}
    try:
        return list(TopologicalSorter(behind).static_order())
    except CycleError:
        return []


def _read(node: onnx.NodeProto) -> set[str]:
    """What a node reads, itself and in its bodies from around them."""
    names = set(node.input)
    for body in proto_bodies(node).values() if node.attribute else ():
        inside = {name for inner in body.node for name in inner.output}
        inside.update(value.name for value in (*body.input, *body.initializer))
        names |= {value.name for value in body.output}.union(*map(_read, body.node)) - inside
    return names
