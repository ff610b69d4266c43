"""Types of the ops of ONNX Runtime itself, by the schemas of the installed version.

They are those of `com.microsoft`, and what it puts into the default domain beside ONNX's own: its optimizer makes
`SimplifiedLayerNormalization` of an RMSNorm, and `LayerNormalization` below opset 17, where ONNX has none.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx.shape_inference
from onnx import helper, numpy_helper
from onnx.defs import OpSchema

from amp_compiler.onnx.model.walk import DEFAULT, opset_of, proto_graphs

CONTRIB = "com.microsoft"
_SHAPE = "amp_compiler.any_shape"
_RESHAPE = 5  # opset from which it reads a shape
_LITERAL = {f"tensor({name.lower()})": number for name, number in onnx.TensorProto.DataType.items()}


@functools.cache
def contrib_schemas() -> dict[tuple[str, str], OpSchema]:
    """The schema of each op by its domain and name; none where there is no ONNX Runtime that tells them."""
    if importlib.util.find_spec("onnxruntime") is None:
        return {}
    from onnxruntime.capi import _pybind_state

    schemas: list[Any] = getattr(_pybind_state, "get_all_operator_schema", list)()
    return {
        (schema.domain, schema.name): _as_onnx(schema)
        for schema in schemas
        if schema.domain == CONTRIB
        or (not schema.domain and not onnx.defs.has(schema.name, schema.since_version, schema.domain))
    }


def contrib_schema(node: onnx.NodeProto, opset: int) -> OpSchema | None:
    """The schema of a node's op, where it is one of ONNX Runtime's alone in this opset of the default domain."""
    if node.domain == CONTRIB:
        return contrib_schemas().get((CONTRIB, node.op_type))
    own = node.domain in DEFAULT and not onnx.defs.has(node.op_type, opset, "")
    return contrib_schemas().get(("", node.op_type)) if own else None


def as_contrib(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A copy in which ops that ONNX Runtime alone has are of `com.microsoft`: onnx leaves domains of others alone."""
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    opset = opset_of(copy)
    nodes = [node for graph in proto_graphs(copy.graph) for node in graph.node if contrib_schema(node, opset)]
    for node in nodes:
        node.domain = CONTRIB
    if nodes and all(entry.domain != CONTRIB for entry in copy.opset_import):
        copy.opset_import.append(helper.make_opsetid(CONTRIB, 1))
    return copy


def _as_onnx(schema: Any) -> OpSchema:
    """A schema of ONNX Runtime as one of onnx, which has other classes for them."""
    options: Any = OpSchema.FormalParameterOption
    slots = [
        [
            OpSchema.FormalParameter(
                slot.name,
                slot.typeStr,
                param_option=options[slot.option.name],
                is_homogeneous=slot.isHomogeneous,
            )
            for slot in kind
        ]
        for kind in (schema.inputs, schema.outputs)
    ]
    limits = [(one.type_param_str, one.allowed_type_strs, "") for one in schema.type_constraints]
    return OpSchema(
        schema.name, schema.domain, schema.since_version, inputs=slots[0], outputs=slots[1], type_constraints=limits
    )


def infer_shapes(light: onnx.ModelProto, **options: bool) -> onnx.ModelProto:
    """`onnx.shape_inference.infer_shapes`, with the types, though not the shapes, of what it knows nothing of.

    That are ONNX Runtime's own ops, and those of ONNX without inference, such as `GroupNormalization`.

    Inference is given ops that it knows in their place: a `Reshape` to a shape that nobody knows has the type of its
    input, and a `ConstantOfShape` that of its value.
    """
    opset = opset_of(light)
    every = (node for graph in proto_graphs(light.graph) for node in graph.node)
    alike = {(node.domain, node.op_type, not node.attribute): node for node in every}
    if not any(_uninferred(node, opset) for node in alike.values()):
        return onnx.shape_inference.infer_shapes(light, **options)
    known = onnx.ModelProto()
    known.CopyFrom(light)
    for graph in proto_graphs(known.graph):
        nodes = [one for node in graph.node for one in _known(node, opset)]
        del graph.node[:]
        graph.node.extend(nodes)
    known.graph.input.append(helper.make_tensor_value_info(_SHAPE, onnx.TensorProto.INT64, [None]))
    inferred = onnx.shape_inference.infer_shapes(known, **options)
    result = onnx.ModelProto()
    result.CopyFrom(light)
    for into, graph in zip(proto_graphs(result.graph), proto_graphs(inferred.graph), strict=True):
        for kind in ("value_info", "output"):
            del getattr(into, kind)[:]
            getattr(into, kind).extend(getattr(graph, kind))
    return result


def _uninferred(node: onnx.NodeProto, opset: int) -> OpSchema | None:
    """The schema of a node's op that onnx infers nothing of."""
    if node.domain not in DEFAULT or opset < _RESHAPE or not onnx.defs.has(node.op_type, opset, ""):
        return contrib_schema(node, opset)
    schema: Any = onnx.defs.get_schema(node.op_type, opset, "")
    fails = node.op_type == "MeanVarianceNormalization" and not node.attribute  # its function knows no default
    return None if schema.has_type_and_shape_inference_function or (schema.has_function and not fails) else schema


def _known(node: onnx.NodeProto, opset: int) -> list[onnx.NodeProto]:
    """What makes values of the same types as a node; the node itself, where onnx infers them."""
    schema = _uninferred(node, opset)
    if schema is None:
        return [onnx.NodeProto.FromString(node.SerializeToString())]
    read = {slot.type_str: name for name in reversed(node.input) if (slot := _slot(schema.inputs, name, node.input))}
    nodes = []
    for name in node.output:
        slot = _slot(schema.outputs, name, node.output)
        if slot is None:
            continue
        allowed = [one.allowed_type_strs for one in schema.type_constraints if one.type_param_str == slot.type_str]
        only = allowed[0] if allowed else [slot.type_str]
        if slot.type_str in read:
            nodes.append(helper.make_node("Reshape", [read[slot.type_str], _SHAPE], [name], name=node.name))
        elif len(only) == 1 and only[0] in _LITERAL:
            zero = np.zeros(1, helper.tensor_dtype_to_np_dtype(_LITERAL[only[0]]))
            nodes.append(helper.make_node("ConstantOfShape", [_SHAPE], [name], value=numpy_helper.from_array(zero)))
    return nodes or [onnx.NodeProto.FromString(node.SerializeToString())]


def _slot(
    slots: Sequence[OpSchema.FormalParameter], name: str, names: Sequence[str]
) -> OpSchema.FormalParameter | None:
    """The formal parameter that a name stands for; `None` for a name left out, or where its type is open."""
    index = list(names).index(name)
    if not name or not slots or (index >= len(slots) and slots[-1].option != OpSchema.FormalParameterOption.Variadic):
        return None
    slot = slots[min(index, len(slots) - 1)]
    return slot if slot.is_homogeneous else None
