"""Parameters that must be rounded, or not be: those of batch norms behind products, and scales of quantising ops.

ONNX lets a `BatchNormalization` of 16-bit data keep its statistics, and from opset 15 on its scale and bias, in FP32.
ONNX Runtime merges one that reads a `MatMul` into its weight, with one type for all of them, and refuses the model
where they have two (seen in ONNX Runtime 1.31). So there the parameters are rounded too, and where they cannot be,
the norm runs in FP32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.graph import Node, Pin
from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.onnx.lowering.lowered import Lowered
from amp_compiler.onnx.lowering.walk import Walker
from amp_compiler.onnx.model.data import array_of, convert, tensor_of
from amp_compiler.onnx.model.edit import names_of, unique, with_data
from amp_compiler.onnx.model.types import ir_type, neutral_type
from amp_compiler.planner.typing import LOW

_OP = "onnx.BatchNormalization"
_PRODUCT = "onnx.MatMul"
_QUANTISING = ("onnx.QuantizeLinear", "onnx.DequantizeLinear")


def pin_batch_norms(lowered: Lowered) -> None:
    """Pin to FP32 the batch norms behind a `MatMul` whose parameters the low type does not hold.

    Changes `lowered.graph`.
    It holds a number that is 0, or of a magnitude between its smallest normal and its largest one.
    """
    for node in _behind_products(lowered):
        unfit = next((name for name in _parameters(node) if not _fits(lowered, name)), None)
        if unfit is not None and node.pin is None:
            reason = (
                f"ONNX Runtime merges it into the MatMul before it, in one type, and '{unfit}' holds numbers that"
                f" {lowered.low.short} does not hold"
            )
            lowered.graph.nodes[node.name] = replace(node, pin=Pin("fp32", reason))


def pin_scales(lowered: Lowered) -> None:
    """Pin to FP32 what quantises by a stored scale that the low type does not hold. Changes `lowered.graph`.

    A scale among the subnormal numbers has few digits: everything that is scaled by it would be off as a whole.
    """
    walker = Walker(lowered, {})
    for node in list(lowered.graph.nodes.values()):
        if node.op not in _QUANTISING or node.pin is not None or len(node.inputs) < 2:
            continue
        scale = node.inputs[1].value
        if walker.holds_data(scale) and not _fits(lowered, scale):
            reason = f"its scale '{scale}' holds numbers that {lowered.low.short} does not hold to all its digits"
            lowered.graph.nodes[node.name] = replace(node, pin=Pin("fp32", reason))


def unify_batch_norms(lowered: Lowered, plan: PrecisionPlan) -> None:
    """Round the FP32 parameters of the low batch norms behind a `MatMul`. Changes the model.

    Args:
        lowered: the model, on which the plan has been carried out.
        plan: the plan.
    """
    labels = plan.labels
    taken: set[str] = set()
    made: dict[ir.Value, ir.Value] = {}
    for neutral in _behind_products(lowered):
        node = lowered.nodes[neutral.name]
        if labels.get(neutral.name) != LOW:
            continue
        if not taken:
            taken = names_of(lowered.model.graphs())
        for index, value in enumerate(node.inputs):
            tensor = tensor_of(value) if index and value is not None else None
            if value is None or tensor is None or neutral_type(tensor.dtype.value) is not DType.FLOAT32:
                continue
            if value not in made:
                made[value] = _rounded(lowered, value, tensor, taken)
            node.replace_input_with(index, made[value])
    for value in made:
        if value.is_initializer() and not value.uses() and not value.is_graph_output() and value.graph is not None:
            value.graph.initializers.pop(value.name or "")


def _behind_products(lowered: Lowered) -> Iterator[Node]:
    """The batch norms that read a `MatMul`, moves of elements looked through, and whose parameters are stored."""
    walker = Walker(lowered, {})
    for node in list(lowered.graph.nodes.values()):
        if node.op != _OP:
            continue
        maker = walker.behind(node, 0)
        if maker is not None and maker.op == _PRODUCT and all(map(walker.holds_data, _parameters(node))):
            yield node


def _parameters(node: Node) -> list[str]:
    return [operand.value for operand in node.inputs[1:]]


def _fits(lowered: Lowered, name: str) -> bool:
    tensor = tensor_of(lowered.values[name])
    if tensor is None:
        return False
    size = np.abs(np.asarray(array_of(tensor), np.float64))
    fmt = lowered.low.format
    return bool(((size == 0) | ((size >= fmt.smallest_normal) & (size <= fmt.max))).all())


def _rounded(lowered: Lowered, value: ir.Value, tensor: ir.TensorProtocol, taken: set[str]) -> ir.Value:
    name = unique(f"{value.name}_{lowered.low.short}", taken)
    data = convert(tensor, lowered.low, name=name)
    made = ir.Value(name=name, type=ir.TensorType(ir_type(lowered.low)), shape=value.shape)
    producer = value.producer()
    if producer is not None and isinstance(producer.graph, ir.Graph):
        producer.graph.insert_before(producer, with_data(producer, data, made, unique(f"{producer.name}_low", taken)))
    elif value.graph is not None:
        made.const_value = data
        value.graph.register_initializer(made)
    return made
