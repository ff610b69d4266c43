"""Masks of attention that are inputs of the model get a lower bound, where some of their way to the softmax is low."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from amp_compiler.ir.dtypes import DType
from amp_compiler.onnx.model.edit import KeptTypes, keeps, names_of, unique
from amp_compiler.onnx.model.model import OnnxModel, ValueType
from amp_compiler.onnx.model.types import neutral_type

FIRST_OPSET = 9  # in which `Where` is


def bound_masks(model: OnnxModel, floors: Mapping[str, float], keep_io_types: KeptTypes) -> None:
    """Raise inputs of a model to a least number, but for minus infinity. Changes the model, before it is lowered.

    A row that minus infinity masks whole is no number in FP32, or zeros by fused attention: it stays so. Which elements
    are minus infinity is asked in FP32, where the lowest number is not. What compares an input reads it as it is.

    Args:
        model: the model, of opset 9 at least.
        floors: by name of an input of the graph, its least number.
        keep_io_types: as `kept_types` gives it; an input that is to become 16-bit gets no bound, which has its type.
    """
    graph = model.ir.graph
    values, nodes = names_of(model.graphs if floors else ())
    added: list[ir.Node] = []

    def stored(name: str, number: float) -> ir.Value:
        data = ir.tensor(np.array(number, np.float32), name=unique(name, values))
        value = ir.Value(name=data.name, const_value=data, type=ir.TensorType(data.dtype), shape=ir.Shape([]))
        graph.register_initializer(value)
        model.types[value] = ValueType(DType.FLOAT32, ())
        return value

    def add(op: str, reads: list[ir.Value], name: str, kind: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
        """A node that makes something of the shape of what it reads last but one."""
        source = reads[-2]
        result = ir.Value(name=unique(name, values), type=ir.TensorType(kind), shape=source.shape)
        model.types[result] = ValueType(neutral_type(kind.value), model.type_of(source).shape)
        added.append(ir.Node("", op, reads, outputs=[result], name=unique(name, nodes)))
        return result

    for value in graph.inputs:
        name = value.name or ""
        if name not in floors or not keeps(keep_io_types, value):
            continue
        uses = [use for use in value.uses() if use.node.op_type != "Less"]
        lowest = stored(f"{name}_lowest", float(np.finfo(np.float32).min))
        infinite = add("Less", [value, lowest], f"{name}_infinite", ir.DataType.BOOL)
        raised = add("Max", [value, stored(f"{name}_floor", floors[name])], f"{name}_raised")
        bounded = add("Where", [infinite, value, raised], f"{name}_bounded")
        for use in uses:
            use.node.replace_input_with(use.idx, bounded)
    if added:
        graph.insert_before(graph[0], added)
