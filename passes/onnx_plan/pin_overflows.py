"""`pin_overflows`: FP32 for ops that are known to leave the range of fp16."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.graph import GELU, Node
from amp_compiler.passes.onnx_plan.pinning import PinPass
from amp_compiler.passes.onnx_plan.summed_squares import PRODUCTS, Squares
from amp_compiler.planner.draft import Draft

_SUMMING = frozenset({"onnx.ReduceSumSquare", "onnx.ReduceL2"})
_WATCHED = frozenset({"onnx.Pow", "onnx.Mul", "onnx.Exp", *_SUMMING, *PRODUCTS})  # what may overflow


@dataclass(frozen=True)
class PinOverflows(PinPass):
    """Pin to FP32, in fp16, powers, sums of squares and exponentials, with what works on their results.

    That is all up to the root, quotient or logarithm that brings them back into range, and a sum with its scales.
    Products of a value with itself, also of its rows, count where they are summed, or end there: magnitudes such as
    `sqrt(re * re + im * im)`. Exponentials of differences to a maximum are at most one. The rules' `keep: {powers:
    false}` leaves all of it to the rules.

    Before:

        q = onnx.Mul(A=x, B=x) -> fp32[2, 8]
        s = onnx.ReduceSum(data=q) -> fp32[2, 1]
        r = onnx.Sqrt(X=s) -> fp32[2, 1]

    After: all three have a pin. That of `s`:

        pin=fp32 "it works on the result of 'q': its squares are summed, which leaves the range of fp16"

    Left alone: the cube of a GELU that is written out, which is the argument of a tanh; all in bf16.
    """

    def pins(self, draft: Draft) -> Mapping[str, str]:
        """Those of each node that may overflow, in execution order."""
        if draft.context.low is not DType.FLOAT16 or not draft.rules.keeps("powers"):
            return {}
        finder = _Finder(draft.graph, draft.context.low)
        for node in draft.graph.nodes.values():
            if node.op in _WATCHED and node.part != GELU:
                finder.look_at(node)
        return finder.pins


class _Finder(Squares):
    def look_at(self, node: Node) -> None:
        """Pin a node that overflows, up to the op that brings its numbers back into range."""
        if node.op == "onnx.Pow" and (self.scalar(node, 1) or 0) >= 2:
            self._overflows(node, "powers leave the range of fp16")
        elif node.op in _SUMMING:
            self._overflows(node, "sums of squares leave the range of fp16")
        elif self.sums_squares(node):
            self._overflows(node, "its squares are summed, which leaves the range of fp16")
        elif node.op == "onnx.Exp" and not self._is_bounded(node):
            self._overflows(node, "exponentials of more than 11 leave the range of fp16")

    def _overflows(self, node: Node, reason: str) -> None:
        self.pin(node, reason)
        behind = f"it works on the result of '{node.name}': {reason}"
        data = {self.origin(operand.value) for operand in node.inputs}
        for end in [self.graph.nodes[name] for name in self.to_end(node)]:
            self.pin(end, behind)
            above = self.behind(end, 0) if end.op == "onnx.Div" else None
            if above is not None and above.op in PRODUCTS and data & {self.origin(one.value) for one in above.inputs}:
                self.pin(above, behind)  # a cosine: products of the same data
        for total in self.to_sum(node) if node.op not in _SUMMING else [node]:
            for part in self.reach(total, lambda user: self.passes(user) or self.scales(user)):
                self.pin(part, behind)

    def _is_bounded(self, node: Node) -> bool:
        """True for the exponential of a difference to a maximum, which is at most one."""
        maker = self.behind(node, 0)
        if maker is None or maker.op != "onnx.Sub":
            return False
        taken = self.behind(maker, 1)
        return taken is not None and taken.op == "onnx.ReduceMax" and self._origin(maker) == self._origin(taken)

    def _origin(self, node: Node) -> str:
        """The value behind the first operand, casts looked through."""
        name = node.inputs[0].value
        while (maker := self.graph.producer(name)) is not None and maker.op == "onnx.Cast":
            name = maker.inputs[0].value
        return name
