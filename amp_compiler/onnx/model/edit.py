"""Small edits of an `onnx_ir` graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import onnx
import onnx_ir as ir

from amp_compiler.errors import LoweringError, OnnxError
from amp_compiler.ir.dtypes import DType
from amp_compiler.onnx.model.types import ir_type
from amp_compiler.onnx.model.walk import DEFAULT
from amp_compiler.policy.marks import nearest

KeptTypes = bool | frozenset[str]
"""Which inputs and outputs of a graph keep their types: all, none, or those of some names."""


def kept_types(keep_io_types: bool | Iterable[str], graph: onnx.GraphProto) -> KeptTypes:
    """Which inputs and outputs keep their types, each name being one of them.

    Raises:
        OnnxError: a name is none of an input or output.
    """
    if isinstance(keep_io_types, bool):
        return keep_io_types
    where = "keep_io_types"
    if not isinstance(keep_io_types, Iterable):
        raise OnnxError(f"{keep_io_types!r} is no list of names", where=where, hint="give True, False or names")
    names = [keep_io_types] if isinstance(keep_io_types, str) else list(keep_io_types)
    ends = [info.name for info in (*graph.input, *graph.output)]
    for name in names:
        if name not in ends:
            raise OnnxError(f"{name!r} is no input or output", where=where, hint=nearest(str(name), ends))
    return frozenset(names)


def keeps(kept: KeptTypes, value: ir.Value) -> bool:
    """Whether an input or output keeps its type."""
    return kept if isinstance(kept, bool) else value.name in kept


def with_data(node: ir.Node, held: ir.Attr, output: ir.Value, name: str) -> ir.Node:
    """A copy of a `Constant` or `ConstantOfShape` with other data, or of a `SequenceEmpty` with another type."""
    kept = [entry for key, entry in node.attributes.items() if key not in (held.name, "value_float", "value_floats")]
    return ir.Node(
        node.domain,
        node.op_type,
        list(node.inputs),
        [*kept, held],
        outputs=[output],
        name=name,
        doc_string=node.doc_string,
        metadata_props=dict(node.metadata_props),
    )


def set_data(node: ir.Node, data: ir.TensorProtocol) -> None:
    """Give a `Constant` or `ConstantOfShape` other data."""
    for name in ("value_float", "value_floats"):
        node.attributes.pop(name, None)
    node.attributes["value"] = ir.AttrTensor("value", data)


def set_type(value: ir.Value, dtype: DType) -> None:
    """Change the element type of a value that has a type."""
    if isinstance(value.type, ir.SequenceType):
        value.type = ir.SequenceType(ir.TensorType(ir_type(dtype)))
    elif value.type is not None:
        value.type = ir.TensorType(ir_type(dtype), denotation=value.type.denotation)


def take_place(value: ir.Value, other: ir.Value, reader: ir.Node, rest: str) -> None:
    """Let what reads a value, but for one node, read another one that takes its name, type and shape.

    Args:
        value: the value.
        other: what takes its place.
        reader: goes on reading the value, as its first input.
        rest: what the value is called from then on.
    """
    value.replace_all_uses_with(other, replace_graph_outputs=True)
    reader.replace_input_with(0, value)
    other.type, other.shape, other.doc_string = value.type, value.shape, value.doc_string
    other.name, value.name = value.name, rest


def names_of(graphs: Iterable[ir.Graph]) -> tuple[set[str], set[str]]:
    """The names of all values of some graphs, and of all nodes."""
    values, nodes = {""}, {""}
    for graph in graphs:
        values.update(value.name or "" for value in (*graph.inputs, *graph.initializers.values()))
        held = list(graph)
        nodes.update([node.name or "" for node in held])
        values.update([value.name or "" for node in held for value in node.outputs])
    return values, nodes


def drop_unread(value: ir.Value, views: Collection[str]) -> None:
    """Take away stored data that nothing reads any more, with the nodes of some ops that hand them on."""
    if value.uses() or value.is_graph_output() or value.is_graph_input():
        return
    maker = value.producer()
    if maker is None:
        if value.graph is not None:
            value.graph.initializers.pop(value.name or "", None)
    elif maker.op_type in views and maker.domain in DEFAULT and isinstance(maker.graph, ir.Graph):
        before = [one for one in maker.inputs if one is not None]
        maker.graph.remove(maker, safe=True)
        for one in before:
            drop_unread(one, views)


def new_node(op: str, inputs: list[ir.Value], value: str, name: str, attributes: Sequence[ir.Attr] = ()) -> ir.Node:
    """A node of ONNX's own domain that stands in no graph yet.

    Args:
        op: its op.
        inputs: what it reads.
        value: name of its result.
        name: its name.
        attributes: its attributes.
    """
    return ir.Node("", op, inputs, attributes, outputs=[ir.Value(name=value)], name=name)


def cast_node(source: ir.Value, to: ir.DataType, value: str, name: str) -> ir.Node:
    """A cast, as `new_node` makes it."""
    return new_node("Cast", [source], value, name, [ir.AttrInt64("to", to.value)])


def graph_of(node: ir.Node) -> ir.Graph:
    """The graph that a node stands in.

    Raises:
        LoweringError: there is none, or it is a function.
    """
    if not isinstance(node.graph, ir.Graph):
        raise LoweringError(f"node '{node.name}' stands in no graph", hint="plan this model again")
    return node.graph


def unique(name: str, taken: set[str]) -> str:
    """`name`, with a number after it where it is taken; it counts as taken from then on."""
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    taken.add(free)
    return free
