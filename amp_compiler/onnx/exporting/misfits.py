"""FX nodes that must run in FP32 for what they become in an ONNX model: by its types, or by the pins of ONNX_PLAN."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
import onnx_ir as ir

from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.onnx.lowering.lower import lower
from amp_compiler.onnx.model.model import OnnxModel, ValueType
from amp_compiler.onnx.model.types import ir_type, neutral_type
from amp_compiler.onnx.plan import pin_nodes
from amp_compiler.planner.typing import LOW
from amp_compiler.policy.rules import RuleSet

_ORIGIN = "pkg.torch.onnx.fx_node"


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
    lows = {node.name for node in plan.nodes if node.precision == LOW}
    found = {_origin(lowered.nodes[name]): node.pin for name, node in lowered.graph.nodes.items()}
    return {name: pin.reason for name, pin in found.items() if pin and pin.precision == "fp32" and name in lows}


def _origin(node: ir.Node) -> str:
    return node.metadata_props.get(_ORIGIN, "").partition(" ")[0].removeprefix("%")


def unfit_nodes(model: ir.Model, low: DType, plan: PrecisionPlan) -> dict[str, str]:
    """By FX node in the low type, why it must run in FP32: an ONNX op that it became takes no such operand.

    Args:
        model: the exported model.
        low: the 16-bit type.
        plan: the plan that was carried out.
    """
    lows = {node.name for node in plan.nodes if node.precision == LOW}
    version = model.opset_imports[""]
    reasons: dict[str, str] = {}
    for node in model.graph:
        if node.domain not in ("", "ai.onnx") or not _refuses(node, version, low):
            continue
        name = _origin(node)
        if name in lows:
            reasons[name] = f"onnx.{node.op_type} takes no {low.short} at opset {version}"
    return reasons


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
