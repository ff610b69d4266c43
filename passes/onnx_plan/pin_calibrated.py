"""`pin_calibrated`: FP32 around values that were seen to be too large or too small."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.facts import Magnitudes
from amp_compiler.ir.graph import Node
from amp_compiler.passes.onnx_plan.mask_path import input_masks, mask_path
from amp_compiler.passes.onnx_plan.pinning import MARGIN, PinPass, Walker
from amp_compiler.planner.draft import Draft

_COMPARING = frozenset({"onnx.Greater", "onnx.GreaterOrEqual", "onnx.Less", "onnx.LessOrEqual", "onnx.Equal"})
STEEP: Mapping[str, tuple[int, ...]] = {  # operands at which an op tells tiny numbers apart, or from zero
    "onnx.Log": (0,),
    "onnx.Reciprocal": (0,),
    "onnx.Div": (1,),
    "onnx.Pow": (0,),
    "onnx.Sign": (0,),
    "onnx.Cast": (0,),
    **dict.fromkeys(_COMPARING, (0, 1)),
}
PRODUCTS = frozenset(f"onnx.{op}" for op in ("Mul", "Div", "Abs", "Neg", "Sqrt", "Pow", "ReduceProd"))
_FLAT = 0.5  # a power of at least this makes a number that FP16 loses as small as the rounding of others


@dataclass(frozen=True)
class PinCalibrated(PinPass):
    """Pin to FP32, in fp16, what makes and reads a value that lies beyond 65504 / 2 in calibration, or is all tiny.

    Calibration saw only some inputs, hence the half. Tiny is a value whose largest number is less than twice the least
    normal one of fp16, 6.1e-05: below that digits are lost, and below 6e-08 all is zero. Where the largest is a normal
    number, what is lost of the others is below its rounding. But a quotient, reciprocal, logarithm or power below half
    is steep at zero, and a sign or a comparison with zero jumps there: where a single number is as tiny (for a jump,
    one that fp16 makes zero), what reads and makes it is pinned too, back through products.

    Before (`y` reached 40000 in calibration):

        y = onnx.MatMul(A=x, B=w) -> fp32[2, 8]

    After:

        y = onnx.MatMul(A=x, B=w) -> fp32[2, 8]  pin=fp32 "'y' reached 4e+04 in calibration; fp16 ends at 65504"

    Of one that is tiny: "'y' is at most 1e-06 in calibration; the normal numbers of fp16 begin at 6.1e-05".

    Left alone: what a mask makes, whose magnitude is that of the mask; all in bf16.
    """

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
        seen = {name: one for name, one in draft.ranges.items() if isinstance(one, Magnitudes)}
        for node in graph.nodes.values():
            for index in STEEP.get(node.op, ()) if seen else ():
                _pin_steep(walker, node, index, seen)
        return walker.pins


def _pin_steep(walker: Walker, node: Node, index: int, ranges: Mapping[str, Magnitudes]) -> None:
    """Pin what reads and makes tiny numbers, from an operand at which a node is steep back through products."""
    limit, normal = _limit(walker, node, index), walker.low.format.smallest_normal
    pending, seen = [(node, index)], set[str]()
    while pending and limit:
        reader, place = pending.pop()
        name = reader.inputs[place].value
        maker = walker.graph.producer(name)
        if name in seen or name not in ranges:
            continue
        seen.add(name)
        if (least := ranges[name].least) < limit:
            near = f"'{node.name}' is steep at zero, which numbers come as near as {least:.3g} in calibration"
            for one in filter(None, (reader, maker)):
                walker.pin(one, f"{near}; the normal numbers of fp16 begin at {normal:.2g}")
        if maker is not None and (maker.op in PRODUCTS or walker.passes(maker)):
            pending += [(maker, operand) for operand in range(len(maker.inputs))]


def _limit(walker: Walker, node: Node, index: int) -> float:
    """The magnitude below which a single number of an operand changes what a node gives; 0 where none does."""
    fmt, power = walker.low.format, walker.scalar(node, 1) if node.op == "onnx.Pow" else None
    if node.op in _COMPARING and walker.scalar(node, 1 - index) != 0:
        return 0.0
    if node.op == "onnx.Pow" and (power is None or not (power < 0 or 0 < power < _FLAT)):
        return 0.0
    if node.op == "onnx.Cast" and walker.graph.values[node.outputs[0]].dtype is not DType.BOOL:
        return 0.0
    tells_zero = node.op in _COMPARING or node.op in ("onnx.Sign", "onnx.Cast")
    return fmt.smallest_subnormal / 2 if tells_zero else fmt.smallest_normal * MARGIN


def _reason(name: str, largest: float, low: DType) -> str:
    """Why the low type does not hold a value; empty where it does."""
    if largest > low.format.max / MARGIN:
        return f"'{name}' reached {largest:.3g} in calibration; fp16 ends at {low.format.max:g}"
    normal = low.format.smallest_normal
    if 0 < largest < normal * MARGIN:
        return f"'{name}' is at most {largest:.3g} in calibration; the normal numbers of fp16 begin at {normal:.2g}"
    return ""


def _masked(draft: Draft) -> set[str]:
    """What stored masks make, and infinite numbers that hide scores and fit, where no mask that is an input joins."""
    walker = Walker(draft.graph, draft.context.low)
    paths = [mask.path for mask in draft.graph.masks.values()]
    for name, numbers in walker.stored():
        if numbers.infinite and not numbers.lost and numbers.largest <= walker.low.format.max / MARGIN:
            paths.append(mask_path(walker, name)[0])
    joined = {node for mask in input_masks(walker).values() for node in mask.path}
    return {name for path in paths for node in path if node not in joined for name in draft.graph.nodes[node].outputs}
