"""Making the neutral graph of a model, node by node and body by body."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping

import onnx_ir as ir

from amp_compiler.errors import OnnxError
from amp_compiler.fx.graph import user_source
from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.graph import CARRIED, Attr, Node, Operand, Pin, Value, ValueKind
from amp_compiler.ir.plan import RETURN
from amp_compiler.onnx.lowering.lowered import EMPTY_LIST, FOLDED, LOOPS, Lowered, Site
from amp_compiler.onnx.lowering.pins import Demands, demands_of
from amp_compiler.onnx.model.model import UNKNOWN, OnnxModel, bodies
from amp_compiler.onnx.model.types import canonical_op
from amp_compiler.policy.op_table import op_table

NO_ATTRIBUTES: dict[str, Attr] = {}  # of all nodes that have none; nothing changes those of a node
_QUANTIZING = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"})
_STORING = (*FOLDED, EMPTY_LIST)


class Builder:
    """Adds graph after graph, each value and node under a name of its own.

    Attributes:
        names: the neutral name of each value that was added.
    """

    def __init__(
        self, lowered: Lowered, named: Callable[[str, str], bool], keep_quantized: bool, pins: Mapping[str, Pin]
    ) -> None:
        self.lowered, self.model, self.graph = lowered, lowered.model, lowered.graph
        self.named, self.keep_quantized, self.pins = named, keep_quantized, pins
        self.names: dict[ir.Value, str] = {}
        self.held = {graph: list(graph) for graph in lowered.model.graphs}
        self._reserved = self._main_names(lowered.model.ir.graph)
        ops = {node.op_type for nodes in self.held.values() for node in nodes}
        self.quantizes = keep_quantized and not ops.isdisjoint(_QUANTIZING)
        self._demands: dict[tuple[object, ...], Demands] = {}
        self._next: dict[str, int] = {}
        self._unnamed: dict[str, int] = {}

    def _main_names(self, main: ir.Graph) -> dict[str, ir.Value]:
        """The values of the main graph by name. They keep their own, though values in bodies before may share them."""
        outputs = (out for node in self.held[main] for out in node.outputs)
        return {value.name: value for value in (*main.inputs, *main.initializers.values(), *outputs) if value.name}

    def add_graph(self, graph: ir.Graph, region: str) -> None:
        """Add the inputs, initializers and nodes of a graph."""
        for value in graph.inputs:
            kind = ValueKind.BUFFER if value.is_initializer() else ValueKind.INPUT
            self.graph.add_value(self._value(value, kind))
        for value in graph.initializers.values():
            if value not in self.names:
                self.graph.add_value(self._value(value, ValueKind.PARAMETER))
        self._add_nodes(graph, region)

    def _add_nodes(self, graph: ir.Graph, region: str) -> None:
        for node in self.held[graph]:
            if node.op_type in _STORING and (is_folded(node, self.model) or self._is_empty_list(node)):
                self.graph.add_value(self._value(node.outputs[0], ValueKind.CONSTANT))
            else:
                self._add_node(node, region)

    def _add_node(self, node: ir.Node, region: str) -> None:
        name = self._node_name(node)
        held = node.attributes.data
        inner = bodies(node) if held else {}
        for attribute, body in inner.items():
            self.lowered.owners[body] = node
            self.add_graph(body, region if node.op_type in LOOPS else f"{name}.{attribute}")
        op, quantizing = _op_of(node.domain, node.op_type)
        named = not op.startswith("onnx.") and self.named(op, name)
        quantized = self._quantized(node, quantizing) if quantizing or self.quantizes else ""
        demands = self._demands_on(node, op, named, quantized, len(inner))
        if demands.late is not None:
            self.lowered.late[name] = demands.late
        operands = self._operands(node, name, demands, inner)
        outputs = [self._value(out, ValueKind.RESULT) for out in node.outputs if out.name]
        props, pin = node.metadata_props, demands.pin
        if pin is None and self.pins and any(value.dtype.is_float for value in outputs):
            pin = self.pins.get(node.name or "")
        self.graph.add_node(
            Node(
                name,
                op,
                tuple(operands),
                tuple([value.name for value in outputs]),
                self._attributes_of(node, inner) if held else NO_ATTRIBUTES,
                *module_of(node.name or "", props),
                source=user_source(props.get("pkg.torch.onnx.stack_trace")),
                region=region,
                pin=pin,
            ),
            outputs,
        )
        self.lowered.nodes[name] = node

    def _demands_on(self, node: ir.Node, op: str, named: bool, quantized: str, inner: int) -> Demands:
        """What the model demands of a node. Nodes of one op and one set of types share it; a pin may name values."""
        types, inputs = self.model.types, node.inputs
        key: list[object] = [node.op_identifier(), node.version, named, quantized, inner, len(inputs)]
        key += node.attributes.data
        for value in (*inputs, *node.outputs):
            key.append(types.get(value, UNKNOWN).kind if value is not None and value.name else None)
        alike = tuple(key)
        demands = self._demands.get(alike)
        if demands is None:
            demands = demands_of(self.model, self.lowered.low, node, op, named=named, quantized=quantized)
            if demands.pin is None:
                self._demands[alike] = demands
        return demands

    def _attributes_of(self, node: ir.Node, inner: dict[str, ir.Graph]) -> dict[str, Attr]:
        """The attributes of a node; of a loop also which states it carries."""
        attributes = attributes_of(node.attributes.data)
        for body in inner.values() if node.op_type in LOOPS else ():
            pairs = [(self.names[before], self.names[after]) for before, after in _states(node, body)
                     if before in self.names and after in self.names]  # fmt: skip
            attributes.update({CARRIED: tuple(pairs)} if pairs else {})
        return attributes

    def _operands(self, node: ir.Node, name: str, demands: Demands, inner: dict[str, ir.Graph]) -> list[Operand]:
        """The operands of a node, called `name` in the neutral graph; those of its bodies behind its own."""
        names, inputs = self.names, node.inputs
        try:
            operands = [
                Operand(names[value], slot, allowed, tied)
                for value, (slot, allowed, tied) in zip(inputs, demands.slots, strict=True)
                if value is not None
            ]
        except KeyError as missing:
            raise OnnxError(
                f"it reads '{missing.args[0].name}', which nothing before it makes",
                where=f"node '{node.name}' ({node.op_type})",
                hint="run onnx.checker.check_model on the model",
            ) from None
        if len(operands) == len(inputs) and not inner:
            return operands
        sites = [Site(node, index) for index, value in enumerate(inputs) if value is not None]
        self.lowered.sites[name] = sites
        for attribute, body in inner.items():
            for index, value in enumerate(body.outputs):
                if value in names:
                    captured = self.graph.values[names[value]].dtype
                    operands.append(Operand(names[value], f"{attribute}.{index}", frozenset({captured})))
                    sites.append(Site(node, index, body))
        return operands

    def _quantized(self, node: ir.Node, quantizing: bool) -> str:
        """Why a node stays as it is that quantises, or stands beside one that does: its types belong to that."""
        if not self.keep_quantized:
            return ""
        if quantizing:
            return "quantised models are left intact"
        makers = [maker for value in node.inputs if value is not None and (maker := value.producer()) is not None]
        users = [user for out in node.outputs for user, _ in out.uses()]
        beside = "it stands beside a quantising op, and quantised patterns are left intact"
        return beside if any(map(_is_quantizing, (*makers, *users))) else ""

    def _value(self, value: ir.Value, kind: ValueKind) -> Value:
        known, name = self.model.types.get(value, UNKNOWN), self._value_name(value)
        if known.item in (DType.FLOAT32, self.lowered.low):
            self.graph.lists.add(name)
            return Value(name, known.item, None, 0, kind)
        return Value(name, known.dtype or DType.OTHER, known.shape, known.numel, kind)

    def _value_name(self, value: ir.Value) -> str:
        """A name of its own for a value, which is noted."""
        values, name = self.lowered.values, value.name or "value"
        if name in values or self._reserved.get(name, value) is not value:
            name = self._unique(name, lambda wanted: wanted in self._reserved or wanted in values)
        self.names[value] = name
        values[name] = value
        return name

    def _is_empty_list(self, node: ir.Node) -> bool:
        """True for an empty list of FP32 or 16-bit tensors, which can as well be one of the other type."""
        item = self.model.type_of(node.outputs[0]).item
        return node.op_type == EMPTY_LIST and not node.domain and item in (DType.FLOAT32, self.lowered.low)

    def _node_name(self, node: ir.Node) -> str:
        name = node.name or ""
        if not name or node in self.model.unnamed:  # counted by op, so that casts in between change no name
            number = self._unnamed[node.op_type] = self._unnamed.get(node.op_type, -1) + 1
            name = f"{node.op_type}_{number}"
        if name != RETURN and name not in self.lowered.nodes:
            return name
        self.lowered.renamed = True
        return self._unique(name, lambda wanted: wanted in self.lowered.nodes)

    def _unique(self, name: str, taken: Callable[[str], bool]) -> str:
        number = self._next.get(name, 1)
        while taken(f"{name}.{number}"):
            number += 1
        self._next[name] = number + 1
        return f"{name}.{number}"


@functools.cache
def _op_of(domain: str, op_type: str) -> tuple[str, bool]:
    """The neutral name of an op, and whether it quantises."""
    op = canonical_op(domain, op_type)
    return op, op_table().info(op).quantized


def _states(node: ir.Node, body: ir.Graph) -> Iterator[tuple[ir.Value, ir.Value]]:
    """Each state that the body of a Loop or Scan takes, with the value that it hands to the next step."""
    if node.op_type == "Loop":  # it takes number and condition before the states, and gives the condition
        return zip(body.inputs[2:], body.outputs[1:], strict=False)
    scanned = node.attributes.get("num_scan_inputs")
    count = len(body.inputs) - (scanned.value if scanned is not None else 0)
    return zip(body.inputs[:count], body.outputs[:count], strict=False)


def is_folded(node: ir.Node, model: OnnxModel) -> bool:
    """True for a node that is nothing but stored data: a dense `Constant`, or a `ConstantOfShape` with a `value`."""
    if node.domain not in ("", "ai.onnx") or node.op_type not in FOLDED or len(node.outputs) != 1:
        return False
    known = model.type_of(node.outputs[0])
    stored = "value" in node.attributes or "value_float" in node.attributes or "value_floats" in node.attributes
    return stored and known.tensor and known.dtype is not None


def _is_quantizing(node: ir.Node) -> bool:
    """True for the ops between floating-point and quantised values."""
    return node.domain in ("", "ai.onnx", "com.microsoft") and node.op_type in _QUANTIZING


def module_of(name: str, props: Mapping[str, str]) -> tuple[str, str]:
    """Module and its class as exporters leave them: torch's metadata, or a path as name (`/encoder/layer.0/MatMul`)."""
    scopes = _listed(props.get("pkg.torch.onnx.name_scopes", "")) if props else []
    if scopes:  # of all modules around a node, and of itself
        classes = _listed(props.get("pkg.torch.onnx.class_hierarchy", ""))
        return ("", "", *scopes)[-2], ("", "", *classes)[-2].rpartition(".")[2]
    return ".".join(name.strip("/").split("/")[:-1]) if name.startswith("/") else "", ""


def _listed(text: str) -> list[str]:
    """A list of names that was written out."""
    return [part.strip(" '\"") for part in text.strip("[]").split(",")] if text else []


def attributes_of(held: Mapping[str, ir.Attr]) -> dict[str, Attr]:
    """The attributes of a node that are numbers and strings, or lists of them."""
    attributes: dict[str, Attr] = {}
    kinds = ir.AttributeType
    for name, attribute in held.items():
        if attribute.type in (kinds.INT, kinds.FLOAT, kinds.STRING):
            attributes[name] = attribute.value
        elif attribute.type in (kinds.INTS, kinds.FLOATS, kinds.STRINGS):
            attributes[name] = tuple(attribute.value)
    return attributes
