"""`pin_whole_numbers`: FP32 for whole numbers that became floating-point ones and may be beyond fp16."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.graph import Node
from amp_compiler.passes.onnx_plan.mask_path import mask_path
from amp_compiler.passes.onnx_plan.pinning import MARGIN, PinPass, Walker
from amp_compiler.planner.draft import Draft
from amp_compiler.planner.numbers import find_numbers

_Bounds = tuple[float, float]
_ANY: _Bounds = (-math.inf, math.inf)
_BY_TYPE: dict[DType, _Bounds] = {
    DType.BOOL: (0, 1), DType.INT8: (-128, 127), DType.UINT8: (0, 255), DType.INT16: (-32768, 32767),
    DType.UINT16: (0, 65535), DType.INT32: _ANY, DType.UINT32: _ANY, DType.INT64: _ANY, DType.UINT64: _ANY,
}  # fmt: skip
_MAKERS = frozenset({"onnx.Cast", "onnx.CastLike", "onnx.Range", "onnx.ReduceSum"})
_COUNTING = frozenset({"onnx.Size", "onnx.Shape", "onnx.ArgMax", "onnx.ArgMin", "onnx.TopK", "onnx.NonZero"})
_KEEPING = frozenset({"onnx.Add", "onnx.Sub", "onnx.Sum", "onnx.Max", "onnx.Min", "onnx.Clip", "onnx.Abs", "onnx.Neg",
                      "onnx.Relu", "onnx.ReduceSum", "onnx.ReduceMean", "onnx.ReduceMax"})  # fmt: skip
_DEPTH = 16  # nodes behind a value that are looked at


@dataclass(frozen=True)
class PinWholeNumbers(PinPass):
    """Pin to FP32, in fp16, what reads floating-point numbers that were whole ones and may be beyond fp16.

    Sizes, positions, lengths, ids, samples and counts of Booleans are such numbers. Sums, differences and products of
    nothing but them, and products of matrices and convolutions with them, are as large, and so what reads these is
    pinned too, up to what scales or bounds them. What is kept as it was captured (`find_numbers`) is not touched, nor
    what reads numbers that calibration has seen to stay below 65504 / 2. The rules' `keep: {powers: false}` leaves it
    to the rules.

    Before:

        input n: i64[2, 1]
        f = onnx.Cast(input=n) {to=1} -> fp32[2, 1]  pin=cast "the model's own cast"
        y = onnx.Div(A=x, B=f) -> fp32[2, 8]

    After:

        y = … pin=fp32 "it reads what 'f' makes, whole numbers that may be beyond fp16"

    Left alone: numbers whose type or size bounds them; zeros and ones that hide scores from a softmax; all in bf16.
    """

    def pins(self, draft: Draft) -> Mapping[str, str]:
        """Those of each such number, in execution order."""
        if draft.context.low is not DType.FLOAT16 or not draft.rules.keeps("powers"):
            return {}
        small = {name for name, most in draft.ranges.items() if most <= draft.context.low.format.max / MARGIN}
        pins = _WholeNumbers(draft.graph, draft.context.low).unbounded(small)
        kept = find_numbers(draft.graph, draft.rules).kept if pins else {}
        return {name: reason for name, reason in pins.items() if name not in kept}


class _WholeNumbers(Walker):
    def unbounded(self, small: Collection[str]) -> dict[str, str]:
        """The pins, by node; values that are known to be small need none."""
        for node in self.graph.nodes.values():
            if node.op not in _MAKERS or not self.makes_floats(node) or not self._may_overflow(node):
                continue
            reason = f"it reads what '{node.name}' makes, whole numbers that may be beyond {self.low.short}"
            pending = [name for name in node.outputs if name not in small]
            wide = set(pending)
            while pending:
                for user, _ in self.graph.users(pending.pop()):
                    self.pin(user, reason)
                    if self.passes(user) or user.op in _KEEPING or self._multiplies(user, wide):
                        pending += [name for name in user.outputs if name not in wide and name not in small]
                        wide.update(pending)
        return self.pins

    def _multiplies(self, node: Node, wide: set[str]) -> bool:
        """True for a product of nothing but such numbers and stored ones of at least 1, or one of matrices."""
        operands = enumerate(node.inputs) if node.op == "onnx.Mul" else ()
        scales = [one.value in wide or abs(self.scalar(node, index) or 0.0) >= 1 for index, one in operands]
        return all(scales) if scales else self.info(node).family in ("matmul", "convolution")

    def _may_overflow(self, node: Node) -> bool:
        """True for what makes floating-point numbers of whole ones that FP16 may not hold."""
        if node.op == "onnx.Range":
            ends = [self.scalar(node, index) for index in range(2)]
            return any(end is None or abs(end) > self.low.format.max for end in ends)
        name = node.inputs[0].value
        terms = self._terms(node) if node.op == "onnx.ReduceSum" else 1.0
        name = name if terms == 1 else self._source(name)
        if self.graph.values[name].dtype not in _BY_TYPE:
            return False
        return max(map(abs, self._bounds(name))) * terms > self.low.format.max and not self._hides(name)

    def _terms(self, node: Node) -> float:
        """How many elements a sum adds up; infinite where a size of them is open."""
        before, after = self._shape(node.inputs[0].value), self._shape(node.outputs[0])
        if "unknown" in before or not all(isinstance(size, int) or size in after for size in before):
            return math.inf
        sizes, left = ([size for size in shape if isinstance(size, int)] for shape in (before, after))
        return math.prod(sizes) / max(math.prod(left), 1)

    # ---- what numbers they may be

    def _bounds(self, name: str, depth: int = _DEPTH) -> _Bounds:
        """The least and the largest number that a value may hold, as far as its type and the graph say it."""
        dtype, maker = self.graph.values[name].dtype, self.graph.producer(name)
        known = _ANY
        if self.holds_data(name):
            numbers = self.graph.stored_numbers(name)
            if numbers is not None and not numbers.infinite:
                known = numbers.least, numbers.most
        elif maker is not None and depth:
            known = self._made_by(maker, depth - 1)
        least, largest = _BY_TYPE.get(dtype, _ANY)
        return max(least, known[0]), min(largest, known[1])

    def _made_by(self, node: Node, depth: int) -> _Bounds:
        """The same of what a node makes."""
        read = [operand.value for operand in node.inputs]
        if node.op in _COUNTING:
            sizes = [size if isinstance(size, int) else math.inf for size in self._shape(read[0])]
            return 0, math.prod(sizes) if node.op == "onnx.Size" else max(sizes, default=0)
        moves = self.info(node).moves
        if moves == "index" and (size := self._one_size(node)) is not None:
            return size, size
        if moves in ("shape", "index") or (node.op == "onnx.Cast" and self.graph.values[read[0]].dtype in _BY_TYPE):
            return self._bounds(read[0], depth)
        if moves == "place" or node.op in ("onnx.Max", "onnx.Min"):
            least, largest = zip(*(self._bounds(name, depth) for name in read), strict=True)
            return min(least), max(largest)
        if node.op in ("onnx.Add", "onnx.Sub", "onnx.Mul"):
            return _combined(node.op, self._bounds(read[0], depth), self._bounds(read[1], depth))
        return _ANY

    def _shape(self, name: str) -> tuple[int | str, ...]:
        shape = self.graph.values[name].shape
        return ("unknown",) if shape is None else shape

    def _one_size(self, node: Node) -> int | None:
        """The size that is picked of a shape; `None` where it is open, or something else is picked."""
        maker, index = self.graph.producer(node.inputs[0].value), self.scalar(node, 1)
        if maker is None or maker.op != "onnx.Shape" or maker.attrs or index is None:
            return None
        shape = self._shape(maker.inputs[0].value)
        size = shape[int(index)] if -len(shape) <= index < len(shape) else None
        return size if isinstance(size, int) else None

    # ---- masks

    def _hides(self, name: str) -> bool:
        """True for zeros and ones that say what an attention sees: a multiple of them is added before a softmax."""
        pending = [self._source(name)]
        seen = set(pending)
        while pending:
            for node, index in self.graph.users(pending.pop()):
                scale = self.scalar(node, 1 - index) if len(node.inputs) == 2 else None
                if node.op == "onnx.Mul" and scale is not None and mask_path(self, node.outputs[0])[0]:
                    return True
                if self._gives_on(node) or (node.op == "onnx.Sub" and scale == 1):
                    pending += [output for output in node.outputs if output not in seen]
                    seen.update(node.outputs)
        return False

    def _gives_on(self, node: Node) -> bool:
        return node.op == "onnx.Cast" or (self.info(node).moves == "shape" and len(node.outputs) == 1)

    def _source(self, name: str) -> str:
        """The value behind casts and views."""
        while (maker := self.graph.producer(name)) is not None and self._gives_on(maker):
            name = maker.inputs[0].value
        return name


def _combined(op: str, one: _Bounds, other: _Bounds) -> _Bounds:
    """The bounds of a sum, difference or product."""
    if op == "onnx.Add":
        return one[0] + other[0], one[1] + other[1]
    if op == "onnx.Sub":
        return one[0] - other[1], one[1] - other[0]
    ends = [a * b if a and b else 0.0 for a in one for b in other]  # zero times an unknown number is zero
    return min(ends), max(ends)
