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


# ---- types of maps, as a `ZipMap` makes, which are left out while a model is worked on: `onnx_ir` has none for them


def without_maps(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A model in which what holds maps has no declared type."""
    if not any(_holds_map(info.type) for graph in proto_graphs(proto.graph) for info in _declared(graph)):
        return proto
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for graph in proto_graphs(copy.graph):
        for info in _declared(graph):
            if _holds_map(info.type):
                info.ClearField("type")
    return copy


def restore_maps(proto: onnx.ModelProto, original: onnx.ModelProto) -> bool:
    """Declare the types of outputs again that `without_maps` took away, in place; false where it took none."""
    maps = [info.type if _holds_map(info.type) else None for info in original.graph.output]
    for info, kind in zip(proto.graph.output, maps, strict=True):
        if kind is not None:
            info.type.CopyFrom(kind)
    return any(maps)


def _declared(graph: onnx.GraphProto) -> Iterator[onnx.ValueInfoProto]:
    yield from (*graph.input, *graph.output, *graph.value_info)


def _holds_map(kind: onnx.TypeProto) -> bool:
    while kind.HasField("sequence_type"):
        kind = kind.sequence_type.elem_type
    return bool(kind.HasField("map_type"))
