"""What a model's own text demands of a node, kept in the node's meta until the graph is lowered."""

from __future__ import annotations

from typing import Any

from amp_compiler.ir.graph import Pin

PIN = "amp_pin"  # key in node.meta; the value is a Pin
MATH = "amp_math"  # key in node.meta of a node that is to compute in FP32: `file:line` of the rule that asks for it
BACKWARD_MATH = "amp_backward_math"  # the same for its gradients


def region_pin(device: Any, source: str) -> Pin:
    """The pin of a node that stands in an `autocast(enabled=False)` region of the model."""
    return Pin("fp32", f"the model's autocast('{device}', enabled=False) region{f' at {source}' if source else ''}")
