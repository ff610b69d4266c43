"""Parameters of batch norms that must have one type: `passes/onnx_plan/pin_batch_norms.py` says which, and why."""

from __future__ import annotations

import onnx_ir as ir

from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.onnx.lowering.lowered import Lowered
from amp_compiler.onnx.model.data import convert, tensor_of
from amp_compiler.onnx.model.edit import names_of, unique, with_data
from amp_compiler.onnx.model.types import ir_type, neutral_type
from amp_compiler.passes.onnx_plan.pin_batch_norms import norms_in_one_type
from amp_compiler.passes.onnx_plan.pinning import Walker
from amp_compiler.planner.typing import LOW
from amp_compiler.policy.targets import Providers


def unify_batch_norms(lowered: Lowered, plan: PrecisionPlan, target: Providers | None) -> None:
    """Round the FP32 parameters of the low batch norms behind a `MatMul`, with a target of all. Changes the model.

    Args:
        lowered: the model, on which the plan has been carried out.
        plan: the plan.
        target: the execution provider that is to run the model, where it is known.
    """
    labels = plan.labels
    taken: set[str] = set()
    rounded: dict[ir.Value, ir.Value] = {}
    for neutral in norms_in_one_type(Walker(lowered.graph, lowered.low), target):
        node = lowered.nodes[neutral.name]
        if labels.get(neutral.name) != LOW:
            continue
        if not taken:
            taken = set.union(*names_of(lowered.model.graphs()))
        for index, value in enumerate(node.inputs):
            tensor = tensor_of(value) if index and value is not None else None
            if value is None or tensor is None or neutral_type(tensor.dtype.value) is not DType.FLOAT32:
                continue
            if value not in rounded:
                rounded[value] = _rounded(lowered, value, tensor, taken)
            node.replace_input_with(index, rounded[value])
    for value in rounded:
        if value.is_initializer() and not value.uses() and not value.is_graph_output() and value.graph is not None:
            value.graph.initializers.pop(value.name or "")


def _rounded(lowered: Lowered, value: ir.Value, tensor: ir.TensorProtocol, taken: set[str]) -> ir.Value:
    name = unique(f"{value.name}_{lowered.low.short}", taken)
    data = convert(tensor, lowered.low, name=name)
    result = ir.Value(name=name, type=ir.TensorType(ir_type(lowered.low)), shape=value.shape)
    producer = value.producer()
    if producer is not None and isinstance(producer.graph, ir.Graph):
        producer.graph.insert_before(producer, with_data(producer, data, result, unique(f"{producer.name}_low", taken)))
    elif value.graph is not None:
        result.const_value = data
        value.graph.register_initializer(result)
    return result
