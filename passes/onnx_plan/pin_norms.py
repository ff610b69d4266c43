"""`pin_norms`: FP32 for the whole of a norm, or of a mean, of which a part is FP32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.graph import GELU, Node
from amp_compiler.passes.onnx_plan.pinning import PinPass
from amp_compiler.passes.onnx_plan.summed_squares import Squares
from amp_compiler.planner.draft import Draft
from amp_compiler.policy.matching import RuleMatcher
from amp_compiler.policy.rules import Precision

_SUM = "onnx.ReduceSum"
_OFF_ZERO = frozenset({"onnx.Clip", "onnx.Max", "onnx.Add"})  # what keeps a divisor off zero


@dataclass(frozen=True)
class PinNorms(PinPass):
    """Pin to FP32 the whole of a norm or GELU that is written out, and of a sum of squares, where a part is FP32.

    ONNX Runtime fuses such parts to one op of one type, and refuses the model where their types differ. What stands
    between a sum of squares and its root would undo what the FP32 sum is for. So would, in fp16, what makes a mean of a
    sum that is FP32, and what divides masked probabilities by their sum; the rules' `keep: {powers: false}` leaves that
    to the rules.

    Before:

        q = onnx.Mul(A=x, B=x) -> fp32[2, 8]
        m = onnx.ReduceMean(data=q) -> fp32[2, 1]  pin=fp32 "…"
        r = onnx.Sqrt(X=m) -> fp32[2, 1]
        s = onnx.ReduceSum(data=x) -> fp32[2, 1]  pin=fp32 "…"
        y = onnx.Mul(A=s, B=c) -> fp32[2, 1]
        compound q, m, r

    After:

        q = … pin=fp32 "part of one normalisation with 'm', which is FP32"
        r = … pin=fp32 "part of one normalisation with 'm', which is FP32"
        y = … pin=fp32 "it brings the sum 's' back into the range of fp16"

    Left alone: a norm of which neither a pin nor a rule asks for FP32 in any part; quotients of a sum by anything but a
    stored number or another sum.
    """

    def pins(self, draft: Draft) -> Mapping[str, str]:
        """Those of each norm, with the first part that is FP32 as the reason; of means the last reason stands."""
        graph, fp32, finder = draft.graph, Precision.FP32, _Finder(draft.graph, draft.context.low)
        norms = [*graph.compounds, *finder.sums_of_squares()]
        means = draft.context.low is DType.FLOAT16 and draft.rules.keeps("powers")
        totals = [node for node in graph.nodes.values() if means and node.op == _SUM]
        pins: dict[str, str] = {}
        if not norms and not totals:
            return pins
        matcher = RuleMatcher(draft.rules, graph, draft.context, draft.ranges)

        def is_fp32(name: str) -> bool:
            node = graph.nodes[name]
            if node.pin is not None or name in pins:
                return name in pins or (node.pin is not None and node.pin.precision == fp32.value)
            decision = matcher.decide(node)
            return decision is not None and decision.precision is fp32

        for norm in norms:
            cause = next(filter(is_fp32, norm), None)
            for name in norm if cause is not None else ():
                if graph.nodes[name].pin is None and name != cause:
                    what = "GELU" if graph.nodes[name].part == GELU else "normalisation"
                    pins.setdefault(name, f"part of one {what} with '{cause}', which is FP32")
        brought_back: dict[str, str] = {}
        for total in totals:
            makers = [node.name for node in finder.brought_back(total) if node.pin is None and node.name not in pins]
            if makers and is_fp32(total.name):
                reason = f"it brings the sum '{total.name}' back into the range of fp16"
                brought_back.update(dict.fromkeys(makers, reason))
            for node in finder.renormalised(total):
                if node.pin is None:
                    brought_back[node.name] = f"it is divided by the sum '{total.name}' of what a mask left of it"
        return {**pins, **brought_back}


class _Finder(Squares):
    def brought_back(self, total: Node) -> Iterator[Node]:
        """What divides a sum by another one or by a stored number, or multiplies it by one: it makes a mean of it."""
        for user in self.users(total):
            divisor = self._divisor(user) if user.op == "onnx.Div" and self.behind(user, 0) is total else None
            if divisor is not None or self.scales(user):
                yield user
                yield from divisor or ()
            elif self.passes(user):
                yield from self.brought_back(user)

    def renormalised(self, total: Node) -> list[Node]:
        """Probabilities that a mask leaves, of which all may be tiny, with the quotients by their sum."""
        masked = self.behind(total, 0)
        factors = [self.behind(masked, index) for index in range(2)] if masked and masked.op == "onnx.Mul" else []
        squashing = [one for one in factors if one is not None and self.info(one).squashes]
        quotients = [user for user in self.users(masked) if user.op == "onnx.Div"] if masked and squashing else []
        divisors = [self._divisor(quotient) for quotient in quotients]
        if masked is None or not any(divisor is not None for divisor in divisors):
            return []
        return [*squashing, masked, *quotients, *(node for divisor in divisors for node in divisor or ())]

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
