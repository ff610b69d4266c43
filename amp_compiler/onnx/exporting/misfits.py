"""Nodes of an exported model whose types ONNX does not admit, and the FX nodes that they come from."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.onnx.model.types import ir_type
from amp_compiler.planner.typing import LOW

_ORIGIN = "pkg.torch.onnx.fx_node"


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
        origin = node.metadata_props.get(_ORIGIN, "")
        name = origin.partition(" ")[0].removeprefix("%")
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
