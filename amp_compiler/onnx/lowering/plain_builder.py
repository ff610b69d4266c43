"""Making the neutral graph of a plain model, many of whose nodes are alike: most is looked up once for all of these."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import onnx_ir as ir

from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.graph import Node, Operand, Pin, Value, ValueKind
from amp_compiler.ir.plan import RETURN
from amp_compiler.onnx.lowering.builder import NO_ATTRIBUTES, Builder, attributes_of, is_folded, module_of, source_of
from amp_compiler.onnx.lowering.lowered import FOLDED, Lowered
from amp_compiler.onnx.model.model import UNKNOWN, OnnxModel, PlainTypes
from amp_compiler.onnx.model.plain import PlainGraph, PlainNode

_RESULT = ValueKind.RESULT
_NO_PROPS: dict[str, str] = {}
_NO_HELD: dict[str, ir.Attr] = {}


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
            attrs = attributes_of(attributes) if held else NO_ATTRIBUTES
            props = plain.nodes[place].metadata_props if told else _NO_PROPS
            module = module_of(name, props) if props or name[0] == "/" else ""
            source = source_of(props) if props else ""
            places[name] = place
            yield Node(name, op, tuple(inputs), made, attrs, module, "", source, "", "forward", pin), outputs

    def _add_own(self, place: int) -> None:
        """Add a node of which there may be no other alike."""
        node = cast("ir.Node", self.plain.nodes[place])
        if node.op_type in FOLDED and is_folded(node, self.model):
            self._addsource_of(node.outputs[0], ValueKind.CONSTANT)
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
