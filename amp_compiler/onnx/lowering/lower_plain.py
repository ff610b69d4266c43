"""Lowering a plain graph: from the text of its nodes, without an object for each.

Nodes of one op and alike types share what the model demands of them. Others go the way of `lower`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, cast

from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.graph import Node, Operand, Value, ValueKind
from amp_compiler.ir.plan import RETURN
from amp_compiler.onnx.lowering.lower import (
    FOLDED,
    NO_ATTRIBUTES,
    Builder,
    Lowered,
    attributes_of,
    is_folded,
    module_of,
    source_of,
)
from amp_compiler.onnx.lowering.pins import Demands
from amp_compiler.onnx.model.model import UNKNOWN, OnnxModel, PlainTypes
from amp_compiler.onnx.model.plain import PlainGraph, PlainNode

if TYPE_CHECKING:
    import onnx_ir as ir

_RESULT = ValueKind.RESULT  # members of an enum are looked up slowly


class PlainBuilder(Builder):
    """Adds a graph without bodies, whose values have names of their own."""

    def __init__(self, lowered: Lowered, named: Callable[[str, str], bool], keep_quantized: bool) -> None:
        self.plain = cast("PlainGraph", lowered.model.ir.graph)
        super().__init__(lowered, named, keep_quantized)
        self.names = cast("dict[ir.Value, str]", _OwnNames())
        lowered.values = cast("dict[str, ir.Value]", self.plain.values)
        lowered.nodes = cast("dict[str, ir.Node]", _ByPlace(self.plain, lowered.places))
        self._types = cast("PlainTypes", self.model.types).by_name
        self._alike: dict[tuple[object, ...], tuple[str, Demands]] = {}

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
        plain, places, shared = self.plain, self.lowered.places, not self.quantizes
        for place, (name, op_type, _, read, _, _) in enumerate(plain.texts):
            usual = name and name not in places and name != RETURN and "" not in read and op_type not in FOLDED
            if usual and shared and self._add_alike(place):
                continue
            node = cast("ir.Node", plain.nodes[place])
            if op_type in FOLDED and is_folded(node, self.model):
                self._add_source(node.outputs[0], ValueKind.CONSTANT)
            else:
                self._add_node(node, region)

    def _add_alike(self, place: int) -> bool:
        """Add a node by what is known of one alike; false where its demands are its own."""
        plain, types = self.plain, self._types
        name, op_type, domain, read, made, held = plain.texts[place]
        attributes = plain.nodes[place].attributes.data if held else None
        known = [types.get(value, UNKNOWN) for value in made]
        kind = (
            op_type, domain, held and "output_dtype" in attributes, len(read),
            *[types.get(value, UNKNOWN).kind for value in read], *[one.kind for one in known],
        )  # fmt: skip
        settled = self._alike.get(kind)
        if settled is None:
            node = cast("ir.Node", plain.nodes[place])
            op, _ = self._op(node)
            demands = self.demands.of(node, op, named=False, quantized="", inner=False)
            if not op.startswith("onnx.") or demands.own:
                return False
            settled = self._alike[kind] = op, demands
        op, (pin, late, slots, _) = settled
        if late is not None:
            self.lowered.late[name] = late
        values = self.graph.values
        operands = [
            Operand(values[value].name, slot, allowed, tied)
            for value, (slot, allowed, tied) in zip(read, slots, strict=True)
        ]
        outputs = [
            Value(value, one.dtype or DType.OTHER, one.shape, one.numel, _RESULT)
            for value, one in zip(made, known, strict=True)
        ]
        props = plain.nodes[place].metadata_props if plain.told else None
        self.graph.append(
            Node(
                name, op, tuple(operands), made, attributes_of(attributes) if attributes else NO_ATTRIBUTES,
                module_of(name, props) if props or name[0] == "/" else "", "", source_of(props) if props else "",
                "", "forward", pin,
            ),
            outputs,
        )  # fmt: skip
        self.lowered.places[name] = place
        return True


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
