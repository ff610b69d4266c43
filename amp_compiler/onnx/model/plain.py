"""A graph without bodies, to be read only: what planning asks of nodes and values, in a fifth of the time of `onnx_ir`.

A plan leaves most nodes of a model as they are. So a model is planned on this, and `onnx_ir` is given what the plan
changes (`condense`). Nodes and values have the names and the meaning that they have in `onnx_ir`, and stand in for them
wherever nothing is changed.
"""

from __future__ import annotations

import functools
import operator
from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import onnx
import onnx_ir as ir
from onnx import AttributeProto, TensorProto

from amp_compiler.onnx.model.types import LIST_OPS
from amp_compiler.onnx.model.validate import NodeText

_BODIES = (AttributeProto.GRAPH, AttributeProto.GRAPHS)
_TENSORS = (AttributeProto.TENSOR, AttributeProto.TENSORS, AttributeProto.SPARSE_TENSOR, AttributeProto.SPARSE_TENSORS)
_EXTERNAL = TensorProto.EXTERNAL
TOLD = b"pkg.torch.onnx."
"""What the keys begin with under which torch's exporter tells of a node where it comes from."""
_DEVICES = operator.attrgetter("device_configurations")


class PlainValue:
    """A value, as `onnx_ir.Value`."""

    __slots__ = ("_message", "_of", "_tensor", "is_input", "maker_index", "name")

    def __init__(self, of: PlainGraph, name: str, maker_index: int = -1, message: TensorProto | None = None) -> None:
        self._of, self.name, self.maker_index, self._message = of, name, maker_index, message
        self.is_input = False
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
        return self._of.nodes[self.maker_index] if self.maker_index >= 0 else None

    def uses(self) -> list[tuple[PlainNode, int]]:
        """The nodes that read it, with the index of the input."""
        nodes = self._of.nodes
        return [(nodes[index], place) for index, place in self._of.readers.get(self.name, ())]

    def is_initializer(self) -> bool:
        """True for stored data."""
        return self._message is not None

    def is_graph_input(self) -> bool:
        """True for an input of the graph."""
        return self.is_input

    def is_graph_output(self) -> bool:
        """True for an output of the graph."""
        return self.name in self._of.returned


class PlainNode:
    """A node, as `onnx_ir.Node`; its place among the nodes of the graph is `index`."""

    __slots__ = ("_attributes", "_inputs", "_of", "_outputs", "domain", "index", "name", "op_type")

    version = None
    graph = None  # there is but one

    def __init__(self, of: PlainGraph, index: int) -> None:
        text = of.texts[index]
        self._of, self.index, self.name, self.op_type, self.domain = of, index, text.name, text.op, text.domain
        self._inputs: tuple[PlainValue | None, ...] | None = None
        self._outputs: tuple[PlainValue, ...] | None = None
        self._attributes: UserDict[str, ir.Attr] | None = None if text.attributes else _NONE

    @property
    def message(self) -> onnx.NodeProto:
        """Its message."""
        found: onnx.NodeProto = self._of.proto.node[self.index]
        return found

    @property
    def inputs(self) -> tuple[PlainValue | None, ...]:
        """What it reads; `None` for what is left out."""
        if self._inputs is None:
            values = self._of.values
            self._inputs = tuple([values[name] if name else None for name in self._of.texts[self.index].inputs])
        return self._inputs

    @property
    def outputs(self) -> tuple[PlainValue, ...]:
        """What it makes."""
        if self._outputs is None:
            values = self._of.values
            self._outputs = tuple([values[name] for name in self._of.texts[self.index].outputs])
        return self._outputs

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


class _Values(Mapping[str, PlainValue]):
    """The values of a graph by name, made when they are first asked for."""

    def __init__(self, graph: PlainGraph) -> None:
        self._graph, self._made = graph, dict[str, PlainValue]()

    def __getitem__(self, name: str) -> PlainValue:
        found = self._made.get(name)
        if found is None:
            found = self._made[name] = PlainValue(self._graph, name, self._graph.makers[name])
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._graph.makers

    def __iter__(self) -> Iterator[str]:
        return iter(self._graph.makers)

    def __len__(self) -> int:
        return len(self._graph.makers)

    def add(self, value: PlainValue) -> PlainValue:
        """Add one that no node makes."""
        self._graph.makers[value.name] = value.maker_index
        self._made[value.name] = value
        return value


class _Nodes(Sequence[PlainNode]):
    """The nodes of a graph, made when they are first asked for."""

    def __init__(self, graph: PlainGraph) -> None:
        self._graph, self._made = graph, dict[int, PlainNode]()

    def __getitem__(self, index: Any) -> Any:
        found = self._made.get(index)
        if found is None:
            found = self._made[index] = PlainNode(self._graph, index)
        return found

    def __len__(self) -> int:
        return len(self._graph.texts)


class PlainGraph:
    """A graph, as `onnx_ir.Graph`: the text of its nodes, of which nodes and values are made where they are asked for.

    Args:
        proto: its message.
        texts: the text of its nodes.

    Attributes:
        makers: by name of a value, the place of the node that makes it; -1 for inputs and initializers.
        nodes: its nodes.
        values: its values by name.
    """

    def __init__(self, proto: onnx.GraphProto, texts: Sequence[NodeText]) -> None:
        self.proto, self.texts, self.name = proto, texts, proto.name
        self.makers: dict[str, int] = {}
        self.nodes, self.values = _Nodes(self), _Values(self)
        self.inputs: list[PlainValue] = []
        self.outputs: list[PlainValue] = []
        self.initializers: dict[str, PlainValue] = {}
        self.tensors = False  # whether an attribute holds a tensor
        self.told = True  # whether torch's exporter may have told where nodes come from

    def __iter__(self) -> Iterator[PlainNode]:
        return iter(self.nodes)

    @functools.cached_property
    def returned(self) -> frozenset[str]:
        """The names of its outputs."""
        return frozenset([value.name for value in self.outputs])

    @functools.cached_property
    def readers(self) -> dict[str, list[tuple[int, int]]]:
        """By name of a value that is read, the places of the nodes that read it, and where among their inputs."""
        found: dict[str, list[tuple[int, int]]] = {}
        for index, text in enumerate(self.texts):
            for place, name in enumerate(text.inputs):
                found.setdefault(name, []).append((index, place))
        return found

    def release(self) -> None:
        """Let go of the messages, each of which holds all of the model: nodes and values hold one another."""
        self.proto = _NO_GRAPH
        for value in self.initializers.values():
            value.release()


_NO_GRAPH = onnx.GraphProto()


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
    made = PlainGraph(graph, texts)
    return cast("ir.Model", PlainModel(proto, made)) if _fill(made) else None


def _placed(proto: onnx.ModelProto) -> bool:
    """Whether a model or a node of it says on which devices it runs, as from onnx 1.18 on."""
    if not hasattr(proto, "configuration"):
        return False
    return bool(proto.configuration) or any(map(_DEVICES, proto.graph.node))


def _fill(graph: PlainGraph) -> bool:
    """Add inputs, initializers, what nodes make, and outputs; false for what is not plain."""
    proto, makers, add = graph.proto, graph.makers, graph.values.add
    for info in proto.input:
        value = add(PlainValue(graph, info.name))
        value.is_input = True
        graph.inputs.append(value)
    for tensor in proto.initializer:
        name = tensor.name
        if not name or name in makers or tensor.data_location == _EXTERNAL:
            return False
        graph.initializers[name] = add(PlainValue(graph, name, -1, tensor))
    count = len(graph.inputs) + len(graph.initializers)
    if count != len(makers):
        return False
    for index, (_, _, domain, read, made, held) in enumerate(graph.texts):
        if domain == "ai.onnx" or (
            held and not _are_plain(proto.node[index].attribute, graph)
        ):  # `onnx_ir` writes it empty
            return False
        for name in read:
            if name not in makers and name:  # it is made later, or nowhere
                return False
        for name in made:
            makers[name] = index
        count += len(made)
    if len(makers) != count or "" in makers:  # else two have one name, or one has none
        return False
    try:
        graph.outputs = [graph.values[info.name] for info in proto.output]
    except KeyError:
        return False
    return True


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
