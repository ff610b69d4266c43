"""`math: fp32` in an ONNX model: `Cast` nodes around what does not compute in FP32 by itself."""

from __future__ import annotations

import onnx_ir as ir

from amp_compiler.ir.dtypes import DType, dtype_from_short
from amp_compiler.ir.graph import Node
from amp_compiler.ir.plan import PlannedNode, PrecisionPlan
from amp_compiler.onnx.lowering.lowered import Lowered
from amp_compiler.onnx.model.edit import cast_node, names_of, set_type, take_place, unique
from amp_compiler.onnx.model.types import ir_type
from amp_compiler.policy.marks import error_at
from amp_compiler.policy.op_table import op_table


def widen_math(lowered: Lowered, plan: PrecisionPlan) -> bool:
    """Let every low node with `math: fp32` compute in FP32 between 16-bit operands and results, in place.

    A `Cast` stands in front of each 16-bit operand and one behind each 16-bit result, which keeps the name that it had.
    Left alone is what the op table says of: ops whose kernels compute in FP32 inside (`accumulates`), and ops with
    which rounding commutes (`exact`).

    Args:
        lowered: the model, on which the plan has been carried out.
        plan: the plan.

    Returns:
        Whether anything was inserted.

    Raises:
        RuleError: ONNX does not define the op for FP32.
    """
    ops = op_table()
    writer: _Writer | None = None
    for planned in plan.nodes:
        if planned.math != "fp32" or planned.precision != "low":
            continue
        info = ops.info(planned.op)
        if info.exact or info.accumulates_on("onnx"):
            continue
        writer = writer or _Writer(lowered, plan)
        writer.widen(planned, lowered.graph.nodes[planned.name], info.any)
    return writer is not None and writer.changed


class _Writer:
    def __init__(self, lowered: Lowered, plan: PrecisionPlan) -> None:
        self.lowered, self.low = lowered, lowered.low
        self.changed = False
        self.types = plan.types
        casts = (cast for cast in plan.casts if not cast.explicit)
        self.casts = {user: dtype_from_short(cast.dst) for cast in casts for user in cast.users}
        self.value_names, self.node_names = names_of(lowered.model.graphs)

    def widen(self, planned: PlannedNode, neutral: Node, untouched: frozenset[str]) -> None:
        """Put casts around one node."""
        node = self.lowered.nodes[planned.name]
        upcasts: dict[ir.Value, ir.Value] = {}
        for index, (operand, site) in enumerate(zip(neutral.inputs, self.lowered.sites_of(planned.name), strict=True)):
            value = node.inputs[site.index] if site.body is None else None
            captured = self.lowered.graph.values[operand.value].dtype
            dtype = self.casts.get((planned.name, index), self.types.get(operand.value, captured))
            if value is None or operand.slot in untouched or dtype is not self.low:
                continue
            if operand.allowed is not None and DType.FLOAT32 not in operand.allowed:
                raise error_at(
                    planned.math_rule,
                    f"'math: fp32' cannot be carried out on node '{planned.name}': {node.op_type} takes no fp32 there",
                    f"except it by a later rule, 'match: {{op: {planned.op}}}', with a precision and no 'math'",
                )
            if value not in upcasts:
                upcasts[value] = self._cast(value, DType.FLOAT32, node, before=True).outputs[0]
            node.replace_input_with(site.index, upcasts[value])
        if not upcasts:
            return
        self.changed = True
        for name, short in planned.outputs:
            if dtype_from_short(short) is self.low:
                self._round(self.lowered.values[name], node)

    def _round(self, result: ir.Value, node: ir.Node) -> None:
        """Let the readers of a result read it rounded, under the name that it had."""
        cast = self._cast(result, self.low, node, before=False)
        rounded = cast.outputs[0]
        take_place(result, rounded, cast, unique(f"{result.name or 'value'}_fp32", self.value_names))
        set_type(rounded, self.low)
        set_type(result, DType.FLOAT32)

    def _cast(self, source: ir.Value, dtype: DType, node: ir.Node, *, before: bool) -> ir.Node:
        base = f"{source.name or 'value'}_{dtype.short}"
        names = unique(base, self.value_names), unique(f"{base}_math", self.node_names)
        cast = cast_node(source, ir_type(dtype), *names)
        if before:
            node.prepend(cast)
        else:
            node.append(cast)
        return cast
