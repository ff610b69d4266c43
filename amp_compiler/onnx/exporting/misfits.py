"""FX nodes that must run in FP32 for what they become: by types of ONNX or of a target, or by the pins of ONNX_PLAN."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
import onnx_ir as ir

from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.onnx.exporting.exporter import ORIGIN
from amp_compiler.onnx.lowering.lower import lower
from amp_compiler.onnx.model.model import OnnxModel, ValueType
from amp_compiler.onnx.model.types import canonical_op, ir_type, neutral_type
from amp_compiler.onnx.plan import pin_nodes
from amp_compiler.planner.typing import LOW
from amp_compiler.policy.rules import RuleSet
from amp_compiler.policy.targets import Providers


def pinned_nodes(
    model: ir.Model, low: DType, rules: RuleSet, plan: PrecisionPlan, ranges: Mapping[str, float]
) -> dict[str, str]:
    """By FX node in the low type, why it must run in FP32: the pipeline ONNX_PLAN pins an ONNX op that it became.

    Args:
        model: the exported model, which is read as if nothing in it had the low type.
        low: the 16-bit type.
        rules: the rules.
        plan: the plan that was carried out.
        ranges: calibrated largest magnitude by name of the FX node, which the exporter gives to its value.
    """
    known = OnnxModel(onnx.ModelProto(), model)
    values = [value for node in model.graph.all_nodes() for value in node.outputs]
    for value in (*model.graph.inputs, *model.graph.initializers.values(), *values):
        if value.dtype is not None:
            dtype = DType.FLOAT32 if value.dtype is ir_type(low) else neutral_type(value.dtype.value)
            sizes = (
                None if value.shape is None else [size if isinstance(size, int) else str(size) for size in value.shape]
            )
            known.types[value] = ValueType(dtype, None if sizes is None else tuple(sizes))
    lowered = lower(known, low)
    pin_nodes(lowered, rules, {name: most for name, most in ranges.items() if name in lowered.graph.values})
    low_nodes = {node.name for node in plan.nodes if node.precision == LOW}
    pins = {lowered.nodes[name].meta.get(ORIGIN): node.pin for name, node in lowered.graph.nodes.items()}
    return {name: pin.reason for name, pin in pins.items() if pin and pin.precision == "fp32" and name in low_nodes}


def unfit_nodes(model: ir.Model, low: DType, plan: PrecisionPlan, target: Providers | None) -> dict[str, str]:
    """By FX node in the low type, why it must run in FP32: an ONNX op that it became takes no such operand.

    Args:
        model: the exported model.
        low: the 16-bit type.
        plan: the plan that was carried out.
        target: the execution provider that is to run it, where it is known: it must have a kernel.
    """
    low_nodes = {node.name for node in plan.nodes if node.precision == LOW}
    version = model.opset_imports[""]
    reasons: dict[str, str] = {}
    for node in model.graph:
        if node.domain not in ("", "ai.onnx"):
            continue
        op, reason = canonical_op("", node.op_type), None
        if _refuses(node, version, low):
            reason = f"{op} takes no {low.short} at opset {version}"
        elif target is not None and _touches(node, low):
            reason = target.obstacle(op, version, low)
            if node.op_type == "BatchNormalization" and _touches(node, DType.FLOAT32):
                reason = f"{target.name} has it in one type, and its parameters are FP32"
        if reason is not None and node.meta.get(ORIGIN) in low_nodes:
            reasons[node.meta[ORIGIN]] = reason
    return reasons


def _touches(node: ir.Node, dtype: DType) -> bool:
    """Whether it computes in a type: reads or makes such a value, and is neither a cast nor a constant."""
    values = [value for value in (*node.inputs, *node.outputs) if value is not None]
    return node.op_type not in ("Cast", "Constant") and any(value.dtype is ir_type(dtype) for value in values)


def _refuses(node: ir.Node, version: int, low: DType) -> bool:
    schema = onnx.defs.get_schema(node.op_type, version, "")
    allowed = {constraint.type_param_str: constraint.allowed_type_strs for constraint in schema.type_constraints}
    wanted = f"tensor({ir_type(low).name.lower()})"
    for index, value in enumerate(node.inputs):
        if value is None or value.dtype is not ir_type(low) or not schema.inputs:
            continue
        formal = schema.inputs[min(index, len(schema.inputs) - 1)]
        if wanted not in allowed.get(formal.type_str, [formal.type_str]):
            return True
    return False
