"""Masks of attention that are inputs of the model get a lower bound, where some of their way to the softmax is low."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from amp_compiler.ir.dtypes import DType
from amp_compiler.onnx.model.edit import names_of, unique
from amp_compiler.onnx.model.model import OnnxModel, ValueType

BROADCASTING_MAX = 8  # the first opset in which `Max` broadcasts


def bound_masks(model: OnnxModel, floors: Mapping[str, float]) -> None:
    """Let a `Max` stand behind inputs of a model, for all that reads them. Changes the model, before it is lowered.

    Args:
        model: the model, of opset 8 at least.
        floors: by name of an input of the graph, its least number.
    """
    graph = model.ir.graph
    values, nodes = names_of(model.graphs())
    for value in graph.inputs:
        if value.name not in floors:
            continue
        title = unique(f"{value.name}_floor", values)
        data = ir.tensor(np.array(floors[value.name], np.float32), name=title)
        floor = ir.Value(name=title, const_value=data, type=ir.TensorType(data.dtype), shape=data.shape)
        graph.register_initializer(floor)
        bounded = ir.Value(name=unique(f"{value.name}_bounded", values), type=value.type, shape=value.shape)
        model.types[floor] = ValueType(DType.FLOAT32, ())
        model.types[bounded] = model.type_of(value)
        ir.convenience.replace_all_uses_with(value, bounded)
        name = unique(bounded.name or "", nodes)
        graph.insert_before(graph[0], ir.Node("", "Max", [value, floor], outputs=[bounded], name=name))
