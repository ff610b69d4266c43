"""Small ONNX models for tests, and a naive conversion that knows no rules: every float value becomes 16-bit."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FLOAT = TensorProto.FLOAT


@functools.cache
def node_tests() -> tuple[Any, ...]:
    """ONNX's own tests of single nodes. Making them takes seconds."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the reference divides by zero on purpose
        return tuple(case for case in collect_testcases(None) if case.model is not None)


def value(name: str, shape: Sequence[int | str] | None, kind: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def make_model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    weights: dict[str, np.ndarray] | None = None,
    opset: int = 17,
    functions: Sequence[onnx.FunctionProto] = (),
    domains: Sequence[str] = (),
) -> onnx.ModelProto:
    tensors = [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()]
    graph = helper.make_graph(list(nodes), "g", list(inputs), list(outputs), tensors)
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in domains)]
    # The oldest IR version that the opset goes with, so that any onnxruntime of the time reads it.
    ir_version = helper.find_min_ir_version_for([imports[0]], ignore_unknown=True)
    return helper.make_model(graph, opset_imports=imports, ir_version=max(ir_version, 8), functions=list(functions))


def naive(model: onnx.ModelProto, kind: int, keep_io: bool = True) -> onnx.ModelProto:
    """The main graph in the 16-bit type: initializers rounded, inputs cast down, outputs cast up."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    graph = made.graph
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    for tensor in graph.initializer:
        if tensor.data_type == FLOAT:
            with np.errstate(over="ignore"):
                low = numpy_helper.to_array(tensor).astype(dtype)
            tensor.CopyFrom(numpy_helper.from_array(low, tensor.name))
    renamed = {}
    first, last = [], []
    for put, values, casts in (("in", graph.input, first), ("out", graph.output, last)):
        for info in values:
            if info.type.tensor_type.elem_type != FLOAT:
                continue
            if not keep_io:
                info.type.tensor_type.elem_type = kind
                continue
            inner = f"{info.name}_inner"
            renamed[info.name] = inner
            ends = (info.name, inner, kind) if put == "in" else (inner, info.name, FLOAT)
            casts.append(helper.make_node("Cast", [ends[0]], [ends[1]], name=f"cast_{info.name}", to=ends[2]))
    for node in graph.node:
        for names in (node.input, node.output):
            for index, name in enumerate(names):
                names[index] = renamed.get(name, name)
        for attribute in node.attribute:
            if attribute.name == "to" and attribute.i == FLOAT:
                attribute.i = kind
    nodes = [*first, *graph.node, *last]
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:], graph.value_info[:]
    graph.node.extend(copies)
    return made
