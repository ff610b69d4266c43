"""The way in: a model is lowered to a `PrecisionGraph`. `apply` carries a plan back.

The graph is planned for the device `onnx`: a file runs anywhere, and is run rather than trained. Rules may match that.

Bodies of If, Loop and Scan are written out before the node that holds them. That node reads the results of its bodies
as operands after its own (`then_branch.0`), and everything that crosses the border of a body keeps its captured type.
Bodies of Loop and Scan count as the region around them, so that a captured value is cast once, outside; each branch of
an If is a region of its own.

A sequence of tensors is a value of the type of its tensors that no cast takes (`PrecisionGraph.lists`), an empty one a
constant. Initializers, `Constant` and `ConstantOfShape` nodes are parameters and constants, whose casts cost nothing:
the stored data are rounded. An initializer that is also an input of the graph keeps its type, like a buffer that others
may write.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import onnx_ir as ir

from amp_compiler.errors import OnnxError
from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.graph import Attr, Node, Operand, Pin, PrecisionGraph, Value, ValueKind
from amp_compiler.ir.plan import RETURN
from amp_compiler.ir.value_class import value_class
from amp_compiler.onnx.lowering.pins import Demanded, Demands
from amp_compiler.onnx.model.data import examine, tensor_of
from amp_compiler.onnx.model.model import UNKNOWN, OnnxModel, PlainTypes, bodies
from amp_compiler.onnx.model.plain import PlainGraph, PlainNode
from amp_compiler.onnx.model.types import canonical_op, neutral_type
from amp_compiler.policy.op_table import op_table

FOLDED = ("Constant", "ConstantOfShape")
EMPTY_LIST = "SequenceEmpty"
LOOPS = ("Loop", "Scan")
_STORING = (*FOLDED, EMPTY_LIST)
_NO_ATTRIBUTES: dict[str, Attr] = {}  # of all nodes that have none; nothing changes those of a node
QUANTIZING = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"})
_RESULT = ValueKind.RESULT
_NO_PROPS: dict[str, str] = {}
_NO_HELD: dict[str, ir.Attr] = {}
_EXAMINED = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16, DType.FLOAT64)


@value_class
class Site:
    """Where an operand of a neutral node stands in the model: input `index` of `node`, or output `index` of a body."""

    node: ir.Node
    index: int
    body: ir.Graph | None = None


@dataclass
class Lowered:
    """A model with its neutral graph, and what leads from one to the other.

    Args:
        model: the model.
        graph: the neutral graph.
        low: the 16-bit type.
        values: the value behind each neutral one.
        nodes: the node behind each neutral one.
        sites: where the operands of neutral nodes stand that leave inputs out or have bodies; see `sites_of`.
        returned: for each output of the neutral graph, its index among the outputs of the model.
        owners: by body, the node that holds it.
        places: of a plain graph, by neutral name, the place of each node.
        late: nodes kept only since their opset does not admit the low type, with the first opset that does.
        fused: how many norms and GELUs were made one op each before the model was lowered.
        notes: what there is to say of that, in a sentence each.
        renamed: whether a node has another name here, since an earlier one has its own.
        value_names: the names of all values, where `values` holds but those that a plan may change.
        node_names: the same of nodes.
    """

    model: OnnxModel
    graph: PrecisionGraph
    low: DType
    values: dict[str, ir.Value] = field(default_factory=dict)
    nodes: dict[str, ir.Node] = field(default_factory=dict)
    sites: dict[str, list[Site]] = field(default_factory=dict)
    returned: list[int] = field(default_factory=list)
    owners: dict[ir.Graph, ir.Node] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)
    late: dict[str, int] = field(default_factory=dict)
    fused: int = 0
    notes: list[str] = field(default_factory=list)
    renamed: bool = False
    value_names: AbstractSet[str] = frozenset()
    node_names: AbstractSet[str] = frozenset()

    def sites_of(self, name: str) -> list[Site]:
        """Where the operands of a neutral node stand; none for a name that no node has."""
        known, node = self.sites.get(name), self.nodes.get(name)
        if known is None and node is not None:
            known = [Site(node, index) for index in range(len(node.inputs))]
        return known or []


def lower(
    model: OnnxModel,
    low: DType,
    *,
    named: Callable[[str, str], bool] | None = None,
    keep_io_types: bool = True,
    keep_quantized: bool = True,
) -> Lowered:
    """Lower a model.

    Args:
        model: as `model.read_model` gives it. It is not changed.
        low: the 16-bit type; which operands may have it is read from `onnx.defs` for the model's own opset.
        named: whether a rule names an op of a custom domain, by op and node name; none does without it.
        keep_io_types: outputs keep their types; else floating-point ones take the type in which they are made.
        keep_quantized: what quantises stays as it is, with what stands beside it; else the rules decide.

    Returns:
        The neutral graph and the way back. Values have their ONNX names, nodes too as far as they are unique.

    Example:
        ```python
        lowered = lower(read_model(open_model("m.onnx")), DType.FLOAT16)
        plan = make_plan(lowered.graph, load_rules("default"), DType.FLOAT16)
        ```
    """
    lowered = Lowered(model, PrecisionGraph("onnx", folds=True), low)
    main = model.ir.graph
    builder = (PlainBuilder if isinstance(main, PlainGraph) else Builder)(
        lowered, named or (lambda op, name: False), keep_quantized
    )
    builder.add_graph(main, "")
    for index, value in enumerate(main.outputs):
        name = builder.name_of(value)
        if name is None:
            continue
        if keep_io_types or name in lowered.graph.lists or lowered.graph.values[name].dtype not in (DType.FLOAT32, low):
            lowered.graph.outputs.append(name)
            lowered.returned.append(index)
    lowered.graph.magnitude_of = functools.cache(lambda name: _magnitude(lowered, name))
    return lowered


def _magnitude(lowered: Lowered, name: str) -> float | None:
    """The largest finite magnitude of what is stored under a name; `None` where that is no FP32 or 16-bit data."""
    value = lowered.values.get(name)
    tensor = tensor_of(value) if value is not None else None
    if tensor is None or tensor.size == 0 or neutral_type(tensor.dtype.value) not in _EXAMINED:
        return None
    return examine(tensor, lowered.low).largest


class Builder:
    """Adds graph after graph, each value and node under a name of its own."""

    def __init__(self, lowered: Lowered, named: Callable[[str, str], bool], keep_quantized: bool) -> None:
        self.lowered, self.model, self.graph = lowered, lowered.model, lowered.graph
        self.named, self.keep_quantized = named, keep_quantized
        self.names: dict[ir.Value, str] = {}
        ops = self._ops_of(lowered.model)
        self.quantizes = keep_quantized and not ops.isdisjoint(QUANTIZING)
        self.demands = Demanded(lowered.model, lowered.low)
        self._ops: dict[tuple[str, str], tuple[str, bool]] = {}
        self._next: dict[str, int] = {}
        self._unnamed: dict[str, int] = {}

    def _ops_of(self, model: OnnxModel) -> set[str]:
        """The types of the ops of a model. Gives values of its main graph their own names, whatever others are called.

        Values in bodies, which stand before them, may have the same names.
        """
        self.held = {graph: list(graph) for graph in model.graphs()}
        main = model.ir.graph
        made = (out for node in self.held[main] for out in node.outputs)
        values = [*main.inputs, *main.initializers.values(), *made]
        self._reserved = {value.name: value for value in values if value.name}
        return {node.op_type for nodes in self.held.values() for node in nodes}

    def name_of(self, value: ir.Value) -> str | None:
        """The neutral name of a value; `None` for one that was not added."""
        return self.names.get(value)

    def add_graph(self, graph: ir.Graph, region: str) -> None:
        """Add the inputs, initializers and nodes of a graph."""
        for value in graph.inputs:
            self._add_source(value, ValueKind.BUFFER if value.is_initializer() else ValueKind.INPUT)
        for value in graph.initializers.values():
            if value not in self.names:
                self._add_source(value, ValueKind.PARAMETER)
        self._add_nodes(graph, region)

    def _add_nodes(self, graph: ir.Graph, region: str) -> None:
        for node in self.held[graph]:
            if node.op_type in _STORING and (is_folded(node, self.model) or self._is_empty_list(node)):
                self._add_source(node.outputs[0], ValueKind.CONSTANT)
            else:
                self._add_node(node, region)

    def _add_source(self, value: ir.Value, kind: ValueKind) -> None:
        self.graph.add_value(self._value(value, kind))

    def _add_node(self, node: ir.Node, region: str) -> None:
        name = self._node_name(node)
        held = node.attributes.data
        inner = bodies(node) if held else {}
        for attribute, body in inner.items():
            self.lowered.owners[body] = node
            self.add_graph(body, region if node.op_type in LOOPS else f"{name}.{attribute}")
        op, quantizing = self._op(node)
        named = not op.startswith("onnx.") and self.named(op, name)
        quantized = self._quantized(node, quantizing) if quantizing or self.quantizes else ""
        demands = self.demands.of(node, op, named=named, quantized=quantized, inner=bool(inner))
        if demands.late is not None:
            self.lowered.late[name] = demands.late
        operands = self._operands(node, name, demands, inner)
        outputs = [self._value(out, ValueKind.RESULT) for out in node.outputs if out.name]
        props = node.metadata_props
        self.graph.add_node(
            Node(
                name,
                op,
                tuple(operands),
                tuple([value.name for value in outputs]),
                _attributes(held) if held else _NO_ATTRIBUTES,
                _module(node.name or "", props),
                source=_source(props) if props else "",
                region=region,
                pin=demands.pin,
            ),
            outputs,
        )
        self._keep_node(node, name)

    def _keep_node(self, node: ir.Node, name: str) -> None:
        """Note the node behind a neutral one."""
        self.lowered.nodes[name] = node

    def _op(self, node: ir.Node) -> tuple[str, bool]:
        """The neutral name of the op of a node, and whether it quantises."""
        key = (node.domain, node.op_type)
        found = self._ops.get(key)
        if found is None:
            op = canonical_op(*key)
            found = self._ops[key] = op, op_table().info(op).quantized
        return found

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
                f"it reads '{missing.args[0].name}', which nothing makes",
                where=f"node '{node.name}' ({node.op_type})",
                mend="run onnx.checker.check_model on the model",
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
        beside = "it stands beside a quantising op, and quantised patterns are left intact"
        return beside if self._is_beside(node) else ""

    def _is_beside(self, node: ir.Node) -> bool:
        """True for a node beside a quantising one."""
        makers = (value.producer() for value in node.inputs if value is not None)
        if any(maker is not None and is_quantizing(maker) for maker in makers):
            return True
        return any(is_quantizing(user) for out in node.outputs for user, _ in out.uses())

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


class PlainBuilder(Builder):
    """Adds a graph without bodies, whose values have names of their own."""

    def __init__(self, lowered: Lowered, named: Callable[[str, str], bool], keep_quantized: bool) -> None:
        self.plain = cast("PlainGraph", lowered.model.ir.graph)
        super().__init__(lowered, named, keep_quantized)
        self.names = cast("dict[ir.Value, str]", _OwnNames())
        lowered.values = cast("dict[str, ir.Value]", self.plain.values)
        lowered.nodes = cast("dict[str, ir.Node]", _ByPlace(self.plain, lowered.places))
        self._types = cast("PlainTypes", self.model.types).by_name
        self._alike: dict[tuple[Any, ...], _Alike] = {}

    def _ops_of(self, model: OnnxModel) -> set[str]:
        return {text[1] for text in self.plain.texts}

    def name_of(self, value: ir.Value) -> str | None:
        """Its own."""
        return value.name

    def _value_name(self, value: ir.Value) -> str:
        return value.name or ""

    def _keep_node(self, node: ir.Node, name: str) -> None:
        self.lowered.places[name] = cast("PlainNode", node).index

    def _add_nodes(self, graph: ir.Graph, region: str) -> None:
        self.graph.extend(self._made())

    def _made(self) -> Iterator[tuple[Node, Sequence[Value]]]:
        """The nodes, as far as they are like others: what is not is added beside. One loop, as a graph has many."""
        plain, places, late_nodes, alike = self.plain, self.lowered.places, self.lowered.late, self._alike
        known, values, shared, told = self._types.get, self.graph.values, not self.quantizes, plain.told
        for place, (name, op_type, domain, read, made, held) in enumerate(plain.texts):
            if not shared or not name or name in places or name == RETURN or op_type in FOLDED or "" in read:
                self._add_own(place)
                continue
            attributes: dict[str, ir.Attr] = plain.nodes[place].attributes.data if held else _NO_HELD
            kind: list[Any] = [op_type, domain, "output_dtype" in attributes, len(read)]
            operands = []
            for one in read:
                value = values[one]
                operands.append(value)
                kind.append(value.dtype)
            outputs = []
            for one in made:
                type_ = known(one, UNKNOWN)
                dtype = type_.dtype
                outputs.append(Value(one, dtype, type_.shape, type_.numel, _RESULT))  # type: ignore[arg-type]
                kind.append(dtype)
            key = tuple(kind)
            settled = alike.get(key)
            if settled is None:
                settled = alike[key] = self._look_at(plain.nodes[place], kind[4:])
            op, pin, late, slots, own = settled
            if own:
                self._add_own(place)
                continue
            if late is not None:
                late_nodes[name] = late
            inputs = []
            for value, (slot, allowed, tied) in zip(operands, slots, strict=True):
                inputs.append(Operand(value.name, slot, allowed, tied))
            attrs = _attributes(attributes) if held else _NO_ATTRIBUTES
            props = plain.nodes[place].metadata_props if told else _NO_PROPS
            module = _module(name, props) if props or name[0] == "/" else ""
            source = _source(props) if props else ""
            places[name] = place
            yield Node(name, op, tuple(inputs), made, attrs, module, "", source, "", "forward", pin), outputs

    def _add_own(self, place: int) -> None:
        """Add a node of which there may be no other alike."""
        node = cast("ir.Node", self.plain.nodes[place])
        if node.op_type in FOLDED and is_folded(node, self.model):
            self._add_source(node.outputs[0], ValueKind.CONSTANT)
        else:
            self._add_node(node, "")

    def _look_at(self, node: PlainNode, dtypes: list[DType | None]) -> _Alike:
        """What is common to all nodes that are like this one: of one op, whose values have the same types."""
        op, _ = self._op(cast("ir.Node", node))
        if not op.startswith("onnx.") or None in dtypes or DType.OTHER in dtypes:  # which may be no tensor
            return _Alike(op, None, None, (), True)
        return _Alike(op, *self.demands.of(cast("ir.Node", node), op, named=False, quantized="", inner=False))


class _Alike(NamedTuple):
    """What nodes have in common.

    Args:
        op: their neutral op.
        pin: see `Demands`, as what follows.
        late: the first opset that admits the low type.
        slots: of their operands.
        own: whether each has demands of its own.
    """

    op: str
    pin: Pin | None
    late: int | None
    slots: tuple[tuple[str, frozenset[DType] | None, bool], ...]
    own: bool


class _OwnNames(dict["ir.Value", str]):
    """The names of the values of a plain graph, which are their own."""

    def __missing__(self, value: ir.Value) -> str:
        return value.name or ""


class _ByPlace(Mapping[str, PlainNode]):
    """The nodes of a plain graph by their neutral names."""

    def __init__(self, graph: PlainGraph, places: dict[str, int]) -> None:
        self._graph, self._places = graph, places

    def __getitem__(self, name: str) -> PlainNode:
        found: PlainNode = self._graph.nodes[self._places[name]]
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def is_folded(node: ir.Node, model: OnnxModel) -> bool:
    """True for a node that is nothing but stored data: a dense `Constant`, or a `ConstantOfShape` with a `value`."""
    if node.domain not in ("", "ai.onnx") or node.op_type not in FOLDED or len(node.outputs) != 1:
        return False
    known = model.type_of(node.outputs[0])
    stored = "value" in node.attributes or "value_float" in node.attributes or "value_floats" in node.attributes
    return stored and known.tensor and known.dtype is not None


def is_quantizing(node: ir.Node) -> bool:
    """True for the ops between floating-point and quantised values."""
    return node.domain in ("", "ai.onnx", "com.microsoft") and node.op_type in QUANTIZING


def _source(props: Mapping[str, str]) -> str:
    """The line of the model that torch's exporter leaves."""
    return props.get("pkg.torch.onnx.stack_trace", "").rpartition("\n")[2][:200]


def _module(name: str, props: Mapping[str, str]) -> str:
    """The module path that exporters leave: torch's metadata, or a path as node name (`/encoder/layer.0/MatMul`)."""
    scopes = props.get("pkg.torch.onnx.name_scopes") if props else None
    if scopes:
        names = [part.strip(" '\"") for part in scopes.strip("[]").split(",")]
        return names[-2] if len(names) > 1 else ""
    return ".".join(name.strip("/").split("/")[:-1]) if name.startswith("/") else ""


def _attributes(held: Mapping[str, ir.Attr]) -> dict[str, Attr]:
    """The attributes of a node that are numbers and strings, or lists of them."""
    found: dict[str, Attr] = {}
    kinds = ir.AttributeType
    for name, attribute in held.items():
        if attribute.type in (kinds.INT, kinds.FLOAT, kinds.STRING):
            found[name] = attribute.value
        elif attribute.type in (kinds.INTS, kinds.FLOATS, kinds.STRINGS):
            found[name] = tuple(attribute.value)
    return found
