"""Element types of all values of an ONNX model, control-flow bodies included, without running it.

ONNX's own inference says most of them; behind a node that it does not know, the operator's schema says the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
from onnx import TensorProto, defs

from amp_compiler.errors import OnnxError
from amp_compiler.onnx.model.infer import infer, stripped
from amp_compiler.onnx.model.types import canonical_domain

Types = dict[str, int]  # TensorProto.DataType by value name; a value of unknown or no tensor type is not in it


def infer_types(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of the model, without the data of large tensors, whose `value_info` holds all types that ONNX infers."""
    light = stripped(model, external=False)
    try:
        return infer(light)
    except OnnxError:
        return light  # then the schemas must do


def graph_types(graph: onnx.GraphProto, outer: Mapping[str, int], opsets: Mapping[str, int]) -> Types:
    """Types of the values that a graph makes or reads, but for those that only its bodies make.

    Args:
        graph: a graph that `infer_types` went over.
        outer: types of the values around it.
        opsets: version by domain.
    """
    types: Types = dict(outer)
    for value in (*graph.value_info, *graph.output, *graph.input):
        if value.type.HasField("tensor_type") and value.type.tensor_type.elem_type:
            types[value.name] = value.type.tensor_type.elem_type
    types.update((tensor.name, tensor.data_type) for tensor in graph.initializer)
    for node in graph.node:
        if any(name and name not in types for name in node.output):
            _by_schema(node, types, opsets)
    return types


def opset_versions(model: onnx.ModelProto) -> dict[str, int]:
    """The version of each domain that the model imports; the default domain is `""`."""
    return {canonical_domain(opset.domain): opset.version for opset in model.opset_import}


def _by_schema(node: onnx.NodeProto, types: Types, opsets: Mapping[str, int]) -> None:
    """Add the types of a node's outputs that its schema gives from a literal type or from an input's."""
    domain = canonical_domain(node.domain)
    if domain not in opsets or not defs.has(node.op_type, domain):
        return
    try:
        schema = defs.get_schema(node.op_type, opsets[domain], domain)
    except defs.SchemaError:
        return
    bound: dict[str, int] = {}
    for index, name in enumerate(node.input):
        slot = _slot(schema.inputs, index)
        if slot is not None and slot.is_homogeneous and name in types:
            bound.setdefault(slot.type_str, types[name])
    for index, name in enumerate(node.output):
        slot = _slot(schema.outputs, index)
        if slot is None or not name or name in types:
            continue
        if slot.type_str in bound:
            types[name] = bound[slot.type_str]
        elif slot.type_str.startswith("tensor("):
            types[name] = _LITERAL.get(slot.type_str[7:-1], TensorProto.UNDEFINED)


def _slot(slots: Sequence[defs.OpSchema.FormalParameter], index: int) -> defs.OpSchema.FormalParameter | None:
    """The formal parameter of a position; the last one of a variadic list stands for all behind it."""
    if index < len(slots):
        return slots[index]
    variadic = bool(slots) and slots[-1].option == defs.OpSchema.FormalParameterOption.Variadic
    return slots[-1] if variadic else None


_LITERAL = {name.lower(): number for name, number in TensorProto.DataType.items()}
