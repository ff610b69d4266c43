"""`pin_norms`: FP32 for the whole of a norm of which a part is FP32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from amp_compiler.ir.graph import GELU
from amp_compiler.passes.onnx_plan.pinning import PinPass
from amp_compiler.passes.onnx_plan.summed_squares import Squares
from amp_compiler.planner.draft import Draft
from amp_compiler.policy.matching import RuleMatcher
from amp_compiler.policy.rules import Precision


@dataclass(frozen=True)
class PinNorms(PinPass):
    """Pin to FP32 the whole of a norm or GELU that is written out, and of a sum of squares, where a part is FP32.

    ONNX Runtime fuses such parts to one op of one type, and refuses the model where their types differ. What stands
    between a sum of squares and its root would undo what the FP32 sum is for.

    Before:

        q = onnx.Mul(A=x, B=x) -> fp32[2, 8]
        m = onnx.ReduceMean(data=q) -> fp32[2, 1]  pin=fp32 "…"
        r = onnx.Sqrt(X=m) -> fp32[2, 1]
        compound q, m, r

    After:

        q = … pin=fp32 "part of one normalisation with 'm', which is FP32"
        r = … pin=fp32 "part of one normalisation with 'm', which is FP32"

    Left alone: a norm of which neither a pin nor a rule asks for FP32 in any part.
    """

    name: ClassVar[str] = "pin_norms"
    idempotent: ClassVar[bool] = True

    def pins(self, draft: Draft) -> Mapping[str, str]:
        """Those of each norm, with the first part that is FP32 as the reason."""
        graph, fp32 = draft.graph, Precision.FP32
        norms = [*graph.compounds, *Squares(graph, draft.context.low).sums_of_squares()]
        pins: dict[str, str] = {}
        if not norms:
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
        return pins
