"""`pin_calibrated`: FP32 around values that were seen to be too large or too small."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from amp_compiler.ir.dtypes import DType
from amp_compiler.passes.onnx_plan.mask_path import mask_path
from amp_compiler.passes.onnx_plan.pinning import MARGIN, PinPass, Walker
from amp_compiler.planner.draft import Draft


@dataclass(frozen=True)
class PinCalibrated(PinPass):
    """Pin to FP32, in fp16, what makes and reads a value that lies beyond 65504 / 2 in calibration, or is all tiny.

    Calibration saw only some inputs, hence the half. Tiny is a value whose largest number is less than twice the least
    normal one of fp16, 6.1e-05: below that digits are lost, and below 6e-08 all is zero. Where the largest is a normal
    number, what is lost of the others is below its rounding.

    Before (`y` reached 40000 in calibration):

        y = onnx.MatMul(A=x, B=w) -> fp32[2, 8]

    After:

        y = onnx.MatMul(A=x, B=w) -> fp32[2, 8]  pin=fp32 "'y' reached 4e+04 in calibration; fp16 ends at 65504"

    Of one that is tiny: "'y' is at most 1e-06 in calibration; the normal numbers of fp16 begin at 6.1e-05".

    Left alone: what a mask makes, whose magnitude is that of the mask; all in bf16.
    """

    name: ClassVar[str] = "pin_calibrated"
    idempotent: ClassVar[bool] = True

    def pins(self, draft: Draft) -> Mapping[str, str]:
        """Those of each value, in the order of the ranges."""
        low, graph = draft.context.low, draft.graph
        if low is not DType.FLOAT16 or not draft.ranges:
            return {}
        walker, masked = Walker(graph, low), _masked(draft)
        for name, largest in draft.ranges.items():
            value = graph.values.get(name)
            reason = _reason(name, largest, low)
            if value is None or value.dtype is not DType.FLOAT32 or not reason or name in masked:
                continue
            maker = graph.producer(name)
            for node in ([maker] if maker is not None else []) + [user for user, _ in graph.users(name)]:
                walker.pin(node, reason)
        return walker.pins


def _reason(name: str, largest: float, low: DType) -> str:
    """Why the low type does not hold a value; empty where it does."""
    if largest > low.format.max / MARGIN:
        return f"'{name}' reached {largest:.3g} in calibration; fp16 ends at {low.format.max:g}"
    normal = low.format.smallest_normal
    if 0 < largest < normal * MARGIN:
        return f"'{name}' is at most {largest:.3g} in calibration; the normal numbers of fp16 begin at {normal:.2g}"
    return ""


def _masked(draft: Draft) -> set[str]:
    """What masks make: those of the graph, and infinite numbers that hide scores and fit as they are."""
    walker = Walker(draft.graph, draft.context.low)
    paths = [mask.path for mask in draft.graph.masks.values()]
    for name, numbers in walker.stored():
        if numbers.infinite and not numbers.lost and numbers.largest <= walker.low.format.max / MARGIN:
            paths.append(mask_path(walker, name)[0])
    return {name for path in paths for node in path for name in draft.graph.nodes[node].outputs}
