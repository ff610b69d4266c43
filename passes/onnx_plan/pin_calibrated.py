"""`pin_calibrated`: FP32 around values that were seen to be too large or too small."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.graph import Node
from amp_compiler.passes.onnx_plan.mask_path import given_masks, mask_path
from amp_compiler.passes.onnx_plan.pinning import MARGIN, PinPass, Walker
from amp_compiler.planner.draft import Draft


@dataclass(frozen=True)
class PinCalibrated(PinPass):
    """Pin to FP32, in fp16, what makes and reads a value that lies beyond 65504 / 2 in calibration, or is all tiny.

    Calibration saw only some inputs, hence the half. Tiny is a value whose largest number is less than twice the least
    normal one of fp16, 6.1e-05: below that digits are lost, and below 6e-08 all is zero. Where the largest is a normal
    number, what is lost of the others is below its rounding. But a quotient, reciprocal, logarithm or negative power is
    steep at zero: where its result tells that a single number is as tiny, what makes that is pinned too.

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
        for node in graph.nodes.values():
            _pin_steep(walker, node, draft.ranges)
        return walker.pins


def _pin_steep(walker: Walker, node: Node, ranges: Mapping[str, float]) -> None:
    """Pin a node that is steep at zero where one number of its operand is tiny, back to what makes that number."""
    index, least = _least(walker, node, ranges)
    normal, chain = walker.low.format.smallest_normal, [node]
    while least < math.inf and (maker := walker.graph.producer(chain[-1].inputs[index].value)) is not None:
        chain.append(maker)
        index = 0
        if maker.op == "onnx.Sqrt":
            least *= least
        elif walker.scales(maker):
            index = int(walker.scalar(maker, 0) is not None)
            least /= abs(walker.scalar(maker, 1 - index) or 1.0)
        elif maker.op != "onnx.Abs" and not walker.passes(maker):
            break
    for one in chain if least < normal * MARGIN else ():
        reads = f"'{node.name}' is steep at zero, which numbers come as near as {least:.3g} in calibration"
        walker.pin(one, f"{reads}; the normal numbers of fp16 begin at {normal:.2g}")


def _least(walker: Walker, node: Node, ranges: Mapping[str, float]) -> tuple[int, float]:
    """Which operand a node is steep at, and what the least magnitude of that is below, as the largest result tells."""
    largest = ranges.get(node.outputs[0], 0.0) if node.outputs else 0.0
    if not 0 < largest < math.inf:
        return 0, math.inf
    if node.op == "onnx.Reciprocal":
        return 0, 1 / largest
    if node.op == "onnx.Div":
        return 1, (walker.largest(node.inputs[0].value, ranges) or math.inf) / largest
    if node.op == "onnx.Log" and largest > math.log(max(ranges.get(node.inputs[0].value, math.inf), 1.0)):
        return 0, math.exp(-largest)
    power = walker.scalar(node, 1) if node.op == "onnx.Pow" else None
    return 0, largest ** (1 / power) if power is not None and power < 0 and largest > 1 else math.inf


def _reason(name: str, largest: float, low: DType) -> str:
    """Why the low type does not hold a value; empty where it does."""
    if largest > low.format.max / MARGIN:
        return f"'{name}' reached {largest:.3g} in calibration; fp16 ends at {low.format.max:g}"
    normal = low.format.smallest_normal
    if 0 < largest < normal * MARGIN:
        return f"'{name}' is at most {largest:.3g} in calibration; the normal numbers of fp16 begin at {normal:.2g}"
    return ""


def _masked(draft: Draft) -> set[str]:
    """What stored masks make, and infinite numbers that hide scores and fit as they are, before a given one joins."""
    walker = Walker(draft.graph, draft.context.low)
    paths = [mask.path for mask in draft.graph.masks.values()]
    for name, numbers in walker.stored():
        if numbers.infinite and not numbers.lost and numbers.largest <= walker.low.format.max / MARGIN:
            paths.append(mask_path(walker, name)[0])
    given = {node for mask in given_masks(walker).values() for node in mask.path}
    return {name for path in paths for node in path if node not in given for name in draft.graph.nodes[node].outputs}
