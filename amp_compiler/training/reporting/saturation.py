"""Operands of FP8 products that are larger than their scale, which follows from the steps before, can hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from amp_compiler.fx.finiteness import is_forward, planned_for
from amp_compiler.fx.graph import node_tensor
from amp_compiler.fx.meta import Key
from amp_compiler.ir.arithmetic import Fp8
from amp_compiler.ir.nonfinite import NonfiniteNode, ValueRange
from amp_compiler.ir.plan import PlannedNode, PrecisionPlan
from amp_compiler.ops.fp8 import FP8

_LARGEST_MANTISSA = 1.75  # of both formats
_SHARED = (torch.ops.aten._to_copy.default, torch.ops.aten.view.default)


def saturated(
    graph: fx.Graph, ranges: Mapping[fx.Node, ValueRange], plan: PrecisionPlan, names: Mapping[str, str]
) -> tuple[tuple[str, str], ...]:
    """The products with an operand that saturates: the name of each, and in words what its operand is and may be.

    Delayed scaling alone is looked at: a scale of what an operand is now holds it.

    Args:
        graph: forward and backward, with FP8 products traced.
        ranges: of its values.
        plan: of the forward.
        names: what the placeholders are, in words.
    """
    planned = {node.name: node for node in plan.nodes}
    result = []
    for clamp in graph.find_nodes(op="call_function", target=torch.ops.aten.clamp.default):
        product = planned.get(str(clamp.meta.get(Key.PLANNED, "")))
        dtype = next((one.dtype for user in clamp.users if (one := node_tensor(user)) is not None), None)
        if product is None or dtype not in FP8 or not _is_delayed(product):
            continue
        scaled: Any = clamp.args[0]
        largest, format_ = ranges[scaled].greatest, torch.finfo(dtype)
        # What is rounded down to the largest number is held.
        if largest <= format_.max * (1 + format_.eps / 2 / _LARGEST_MANTISSA):
            continue
        operand = scaled
        while operand.meta.get(Key.PLANNED) == product.name or _is_shared(operand, planned):
            operand = operand.all_input_nodes[0]
        phase = "forward" if is_forward(operand) else "backward"
        made_by = planned_for(operand, planned)
        name = names.get(made_by, f"'{made_by}'") if phase == "forward" else "the gradient"
        title = NonfiniteNode(product.name, product.op, product.module, phase, product.source).title
        held = ranges[operand].greatest * format_.max / largest
        words = f"{name}, {ranges[operand]}, in the FP8 product {title}: its scale of the steps before holds {held:.3g}"
        result.append((product.name, words))
    return tuple(dict.fromkeys(result))


def _is_shared(node: fx.Node, planned: Mapping[str, PlannedNode]) -> bool:
    """Whether a node casts or flattens an operand for several FP8 products, and so is of the first of them."""
    owner = planned.get(str(node.meta.get(Key.PLANNED, "")))
    return node.target in _SHARED and owner is not None and _is_delayed(owner)


def _is_delayed(node: PlannedNode) -> bool:
    return any(way is not None and way.history for way in map(Fp8.parse, (node.math, node.backward_math)))
