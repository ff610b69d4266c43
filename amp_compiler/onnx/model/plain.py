"""A graph without bodies, to be read only: what planning asks of nodes and values, in a fifth of the time of `onnx_ir`.

A plan leaves most nodes of a model as they are. So a model is planned on this, and `onnx_ir` is given what the plan
changes (`condense`). Nodes and values have the names and the meaning that they have in `onnx_ir`, and stand in for them
wherever nothing is changed.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator, Sequence
from typing import Any, cast

import onnx
import onnx_ir as ir
from onnx import AttributeProto, TensorProto

from amp_compiler.onnx.model.types import LIST_OPS
from amp_compiler.onnx.model.validate import NodeText

_BODIES = (AttributeProto.GRAPH, AttributeProto.GRAPHS)
_TENSORS = (AttributeProto.TENSOR, AttributeProto.TENSORS, AttributeProto.SPARSE_TENSOR, AttributeProto.SPARSE_TENSORS)
_EXTERNAL = TensorProto.EXTERNAL


class PlainValue:
    """A value, as `onnx_ir.Value`."""

    __slots__ = ("_message", "_tensor", "is_input", "is_output", "maker", "name", "users")

    def __init__(self, name: str, maker: PlainNode | None = None, message: TensorProto | None = None) -> None:
        self.name, self.maker, self._message = name, maker, message
        self.users: list[tuple[PlainNode, int]] = []
        self.is_input = self.is_output = False
        self._tensor: ir.TensorProtocol | None = None

    @property
    def const_value(self) -> ir.TensorProtocol | None:
        """The data of an initializer."""
        if self._tensor is None and self._message is not None:
            self._tensor = ir.serde.deserialize_tensor(self._message)
        return self._tensor

    def release(self) -> None:
        """Let go of the data of an initializer."""
        self._message = self._tensor = None

    def producer(self) -> PlainNode | None:
        """The node that makes it."""
        return self.maker

    def uses(self) -> list[tuple[PlainNode, int]]:
        """The nodes that read it, with the index of the input."""
        return self.users

    def is_initializer(self) -> bool:
        """True for stored data."""
        return self._message is not None

    def is_graph_input(self) -> bool:
        """True for an input of the graph."""
        return self.is_input

    def is_graph_output(self) -> bool:
        """True for an output of the graph."""
        return self.is_output


class PlainNode:
    """A node, as `onnx_ir.Node`; its place among the nodes of the graph is `index`."""

    __slots__ = ("_attributes", "domain", "index", "inputs", "message", "name", "op_type", "outputs")

    version = None
    graph = None  # there is but one

    def __init__(
        self, index: int, message: onnx.NodeProto, text: NodeText, inputs: tuple[PlainValue | None, ...]
    ) -> None:
        self.index, self.message, self.inputs = index, message, inputs
        self.name, self.op_type, self.domain, _, _, held = text
        self.outputs: tuple[PlainValue, ...] = ()
        self._attributes: UserDict[str, ir.Attr] | None = None if held else _NONE

    @property
    def attributes(self) -> UserDict[str, ir.Attr]:
        """Its attributes by name."""
        if self._attributes is None:
            made = (ir.serde.deserialize_attribute(one) for one in self.message.attribute)
            self._attributes = UserDict({one.name: one for one in made})
        return self._attributes

    @property
    def metadata_props(self) -> dict[str, str]:
        """What an exporter says of it."""
        props = self.message.metadata_props
        return {entry.key: entry.value for entry in props} if props else _NOTHING

    def op_identifier(self) -> tuple[str, str, str]:
        """Domain, op and overload."""
        return self.domain, self.op_type, self.message.overload


_NONE: UserDict[str, ir.Attr] = UserDict()
_NOTHING: dict[str, str] = {}
_NO_NODE = onnx.NodeProto()


class PlainGraph:
    """A graph, as `onnx_ir.Graph`.

    Args:
        proto: its message.
    """

    def __init__(self, proto: onnx.GraphProto) -> None:
        self.proto, self.name = proto, proto.name
        self.nodes: list[PlainNode] = []
        self.inputs: list[PlainValue] = []
        self.outputs: list[PlainValue] = []
        self.initializers: dict[str, PlainValue] = {}
        self.tensors = False  # whether an attribute holds a tensor

    def __iter__(self) -> Iterator[PlainNode]:
        return iter(self.nodes)

    def release(self) -> None:
        """Let go of the messages, each of which holds all of the model: nodes and values hold one another."""
        for node in self.nodes:
            node.message = _NO_NODE
        for value in self.initializers.values():
            value.release()


class PlainModel:
    """A model, as `onnx_ir.Model`, of one graph."""

    def __init__(self, proto: onnx.ModelProto, graph: PlainGraph) -> None:
        self.graph = graph
        self.functions: dict[Any, Any] = {}
        self.opset_imports = {entry.domain: entry.version for entry in proto.opset_import}
        self.ir_version = proto.ir_version


def plain_model(proto: onnx.ModelProto, texts: Sequence[NodeText] | None) -> ir.Model | None:
    """A model to be planned on.

    Args:
        proto: the model; it is not changed.
        texts: the text of its nodes; without it there is no such model.

    Returns:
        What stands in for its `onnx_ir.Model`; `None` for a model with functions, bodies, sparse initializers, data in
        other files, annotations, lists of tensors, or nodes out of order.
    """
    graph = proto.graph
    if (
        texts is None
        or not LIST_OPS.isdisjoint([text.op for text in texts])
        or _placed(proto)
        or proto.functions
        or graph.sparse_initializer
        or graph.quantization_annotation
    ):
        return None
    made = PlainGraph(graph)
    return cast("ir.Model", PlainModel(proto, made)) if _fill(made, texts) else None


def _placed(proto: onnx.ModelProto) -> bool:
    """Whether a model or a node of it says on which devices it runs, as from onnx 1.18 on."""
    if not hasattr(proto, "configuration"):
        return False
    return bool(proto.configuration) or any(node.device_configurations for node in proto.graph.node)


def _fill(graph: PlainGraph, texts: Sequence[NodeText]) -> bool:
    """Add inputs, initializers, nodes and outputs; false for what is not plain."""
    proto = graph.proto
    values: dict[str, PlainValue] = {}
    for info in proto.input:
        value = values[info.name] = PlainValue(info.name)
        value.is_input = True
        graph.inputs.append(value)
    for tensor in proto.initializer:
        name = tensor.name
        if not name or name in values or tensor.data_location == _EXTERNAL:
            return False
        values[name] = graph.initializers[name] = PlainValue(name, None, tensor)
    sources, count = len(values), 0
    if len(graph.inputs) + len(graph.initializers) != sources:
        return False
    known: dict[str, PlainValue | None] = {**values, "": None}
    nodes = graph.nodes
    try:
        for index, (message, text) in enumerate(zip(proto.node, texts, strict=True)):
            _, _, domain, read, made, held = text
            if domain == "ai.onnx" or (held and not _are_plain(message.attribute, graph)):  # `onnx_ir` writes it empty
                return False
            inputs = tuple([known[name] for name in read])
            node = PlainNode(index, message, text, inputs)
            for place, one in enumerate(inputs):
                if one is not None:
                    one.users.append((node, place))
            if len(made) == 1:
                (name,) = made
                known[name] = result = PlainValue(name, node)
                node.outputs = (result,)
            else:
                node.outputs = tuple([PlainValue(name, node) for name in made])
                known.update((result.name, result) for result in node.outputs)
            count += len(made)
            nodes.append(node)
        graph.outputs = [cast("PlainValue", known[info.name]) for info in proto.output]
    except KeyError:  # what is read is made later, or nowhere
        return False
    for value in graph.outputs:
        value.is_output = True
    return len(known) == sources + count + 1  # else two have one name, or one has none


def _are_plain(attributes: Any, graph: PlainGraph) -> bool:
    for attribute in attributes:
        kind = attribute.type
        if kind in _BODIES or attribute.ref_attr_name:
            return False
        if kind in _TENSORS:
            graph.tensors = True
            if kind != AttributeProto.TENSOR or attribute.t.data_location == _EXTERNAL:
                return False
    return True
