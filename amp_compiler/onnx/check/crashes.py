"""What takes the process of ONNX Runtime down when it loads a model, so that no error can be told: found beforehand.

Seen in ONNX Runtime 1.31 and 1.32: on the CPU, `NchwcTransformer`, one of its default optimizations, crashes at an FP16
`MatMul` with stored weights of one or two dimensions whose data come from a `Transpose` of the first two of three
dimensions. Exports have it behind an LSTM. An FP32 model does not crash there, nor does another provider.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import TensorProto

from amp_compiler.onnx.model.walk import node_place, proto_graphs

CRASHING = "NchwcTransformer"
"""The optimization that crashes."""
_PERMUTATIONS = ([1, 0, 2], [1, 2, 0])


def crashing_node(proto: onnx.ModelProto) -> str:
    """The place of the first node that a session on the CPU would crash at; empty where there is none."""
    for graph in proto_graphs(proto.graph):
        if not any(node.op_type == "Transpose" for node in graph.node):
            continue
        makers = {name: node for node in graph.node for name in node.output}
        stored = {tensor.name: tensor for tensor in graph.initializer}
        for node in graph.node:
            if node.op_type == "MatMul" and len(node.input) == 2 and _is_swapped(node.input[0], makers):
                weight = stored.get(node.input[1]) or _constant(makers.get(node.input[1]))
                if weight is not None and weight.data_type == TensorProto.FLOAT16 and len(weight.dims) <= 2:
                    return node_place(node)
    return ""


def _is_swapped(name: str, makers: Mapping[str, onnx.NodeProto]) -> bool:
    maker = makers.get(name)
    while maker is not None and maker.op_type == "Identity":
        maker = makers.get(maker.input[0])
    if maker is None or maker.op_type != "Transpose":
        return False
    return any(list(attribute.ints) in _PERMUTATIONS for attribute in maker.attribute if attribute.name == "perm")


def _constant(node: onnx.NodeProto | None) -> TensorProto | None:
    if node is None or node.op_type != "Constant":
        return None
    return next((attribute.t for attribute in node.attribute if attribute.name == "value"), None)
