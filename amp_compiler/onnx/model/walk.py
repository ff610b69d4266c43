"""Walks over the message of an ONNX model: graphs, bodies, nodes and tensors, without recursion."""

from __future__ import annotations

from collections.abc import Iterator

import onnx
from onnx import AttributeProto

DEFAULT = ("", "ai.onnx")  # how ONNX's own domain is written


def opset_of(proto: onnx.ModelProto) -> int:
    """The version of ONNX's own domain that a model imports."""
    return next((entry.version for entry in proto.opset_import if entry.domain in DEFAULT), 1)


def proto_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph and all bodies in it."""
    pending = [graph]
    while pending:
        current = pending.pop()
        yield current
        for node in current.node:
            if node.attribute:
                pending.extend(proto_bodies(node).values())


def proto_bodies(node: onnx.NodeProto) -> dict[str, onnx.GraphProto]:
    """The bodies of a control-flow node by attribute name, as `model.bodies` names them."""
    inner = {}
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            inner[attribute.name] = attribute.g
        elif attribute.type == AttributeProto.GRAPHS:
            inner.update({f"{attribute.name}.{index}": body for index, body in enumerate(attribute.graphs)})
    return inner


def read_names(node: onnx.NodeProto) -> set[str]:
    """The values that a node reads, those that its bodies take from around them included."""
    names = {name for name in node.input if name}
    for body in proto_bodies(node).values():
        inner = {info.name for info in body.input} | {tensor.name for tensor in body.initializer}
        own = inner | {name for one in body.node for name in one.output}
        read = {info.name for info in body.output}.union(*(read_names(one) for one in body.node))
        names |= read - own
    return names


def all_nodes(proto: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """The nodes of a model: of its graph, of the bodies in it, and of its functions."""
    for graph in proto_graphs(proto.graph):
        yield from graph.node
    for function in proto.functions:
        yield from function_nodes(function)


def function_nodes(function: onnx.FunctionProto) -> Iterator[onnx.NodeProto]:
    """The nodes of a function, and of the bodies in it."""
    for node in function.node:
        yield node
        for body in proto_bodies(node).values():
            for graph in proto_graphs(body):
                yield from graph.node


def all_tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """The tensors of a model: initializers, and attributes of nodes."""
    yield from proto.graph.initializer
    yield from all_inner_tensors(proto)


def all_inner_tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """The tensors of attributes, and the initializers of bodies."""
    for graph in proto_graphs(proto.graph):
        if graph is not proto.graph:
            yield from graph.initializer
    for node in all_nodes(proto):
        for attribute in node.attribute:
            yield from attribute_tensors(attribute)


def attribute_tensors(attribute: AttributeProto) -> Iterator[onnx.TensorProto]:
    """The tensors that an attribute holds."""
    if attribute.type == AttributeProto.TENSOR:
        yield attribute.t
    elif attribute.type == AttributeProto.TENSORS:
        yield from attribute.tensors
    elif attribute.type in (AttributeProto.SPARSE_TENSOR, AttributeProto.SPARSE_TENSORS):
        one = [attribute.sparse_tensor] if attribute.type == AttributeProto.SPARSE_TENSOR else attribute.sparse_tensors
        for sparse in one:
            yield sparse.values
            yield sparse.indices


def node_place(node: onnx.NodeProto) -> str:
    """What messages call a node: its name and op, or where it has no name the value that it makes.

    Example:
        >>> node_place(onnx.helper.make_node("Relu", ["x"], ["y"]))
        "node of 'y' (Relu)"
    """
    if node.name:
        return f"node {_shown(node.name)} ({_shown(node.op_type, '')})"
    value = next((name for name in node.output if name), "")
    return f"node of {_shown(value)} ({_shown(node.op_type, '')})" if value else f"a node ({_shown(node.op_type, '')})"


def _shown(name: str | bytes, quote: str = "'") -> str:
    """A name in quotes, cut where it is long; one that is no text as its bytes."""
    if isinstance(name, bytes):
        return repr(name[:60])
    text = name if name.isprintable() else name.encode("unicode_escape").decode()
    return f"{quote}{text if len(text) <= 120 else text[:120] + '…'}{quote}"
