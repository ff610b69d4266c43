"""`pin_means`: FP32 for what makes a mean of a sum that is FP32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.graph import Node
from amp_compiler.passes.onnx_plan.pinning import PinPass, Walker
from amp_compiler.planner.draft import Draft
from amp_compiler.policy.matching import RuleMatcher
from amp_compiler.policy.rules import Precision

_SUM = "onnx.ReduceSum"
_OFF_ZERO = frozenset({"onnx.Clip", "onnx.Max", "onnx.Add"})  # what keeps a divisor off zero


@dataclass(frozen=True)
class PinMeans(PinPass):
    """Pin to FP32, in fp16, what makes a mean of a sum that is FP32, and may be beyond fp16.

    The rules' `keep: {powers: false}` leaves it to the rules.

    Before, with a rule that asks for FP32 in `s`:

        s = onnx.ReduceSum(data=x) -> fp32[2, 1]
        y = onnx.Mul(A=s, B=c) -> fp32[2, 1]

    After:

        y = onnx.Mul(A=s, B=c) -> fp32[2, 1]  pin=fp32 "it brings the sum 's' back into the range of fp16"

    Left alone: quotients by anything but a stored number or another sum; sums that run low; all in bf16.
    """

    name: ClassVar[str] = "pin_means"
    idempotent: ClassVar[bool] = True

    def pins(self, draft: Draft) -> Mapping[str, str]:
        """Those of each sum; the last reason stands."""
        pins: dict[str, str] = {}
        if draft.context.low is not DType.FLOAT16 or not draft.rules.keeps("powers"):
            return pins
        finder = _Finder(draft.graph, draft.context.low)
        matcher = RuleMatcher(draft.rules, draft.graph, draft.context, draft.ranges)
        for total in [node for node in draft.graph.nodes.values() if node.op == _SUM]:
            makers = [node for node in finder.brought_back(total) if node.pin is None]
            decision = matcher.decide(total) if total.pin is None and makers else None
            requested = total.pin.precision if total.pin is not None else decision and decision.precision.value
            if requested == Precision.FP32.value:
                reason = f"it brings the sum '{total.name}' back into the range of fp16"
                pins.update((node.name, reason) for node in makers)
        return pins


class _Finder(Walker):
    def brought_back(self, total: Node) -> Iterator[Node]:
        """What divides a sum by another one or by a stored number, or multiplies it by one: it makes a mean of it."""
        for user in self.users(total):
            divisor = self._divisor(user) if user.op == "onnx.Div" and self.behind(user, 0) is total else None
            if divisor is not None or self.scales(user):
                yield user
                yield from divisor or ()
            elif self.passes(user):
                yield from self.brought_back(user)

    def _divisor(self, quotient: Node) -> list[Node] | None:
        """What lies between a sum and the quotient by it; nothing for a stored number, `None` for anything else."""
        if self.scalar(quotient, 1) is not None:
            return []
        divisors: list[Node] = []
        maker = self.graph.producer(quotient.inputs[1].value)
        while maker is not None and (maker.op in _OFF_ZERO or self.passes(maker)):
            divisors.append(maker)
            maker = self.graph.producer(maker.inputs[0].value)
        return divisors if maker is not None and maker.op == _SUM else None
