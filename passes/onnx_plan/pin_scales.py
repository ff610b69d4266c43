"""`pin_scales`: FP32 for what quantises by a scale that the low type does not hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from amp_compiler.passes.onnx_plan.pinning import PinPass, Walker
from amp_compiler.planner.draft import Draft

_QUANTISING = ("onnx.QuantizeLinear", "onnx.DequantizeLinear")


@dataclass(frozen=True)
class PinScales(PinPass):
    """Pin to FP32 what quantises by a stored scale that the low type does not hold to all its digits.

    A scale among the subnormal numbers has few digits: everything that is scaled by it would be off as a whole.

    Before (low type fp16):

        const s: fp32[] number=1e-06 subnormal
        q = onnx.QuantizeLinear(x=x, y_scale=s) -> u8[2, 8]

    After:

        q = … pin=fp32 "its scale 's' holds numbers that fp16 does not hold to all its digits"

    Left alone: what the model has pinned, as the patterns of a quantised model; scales that are computed, or that fit.
    """

    name: ClassVar[str] = "pin_scales"
    idempotent: ClassVar[bool] = True

    def pins(self, draft: Draft) -> Mapping[str, str]:
        """Those of the nodes that are not pinned."""
        walker = Walker(draft.graph, draft.context.low)
        for node in draft.graph.nodes.values():
            if node.op in _QUANTISING and len(node.inputs) > 1:
                scale = node.inputs[1].value
                if node.pin is None and walker.holds_data(scale) and not walker.fits(scale):
                    message = (
                        f"its scale '{scale}' holds numbers that {walker.low.short} does not hold to all its digits"
                    )
                    walker.pin(node, message)
        return walker.pins
