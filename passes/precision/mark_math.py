"""`MarkMath`: what a plan says of arithmetic, noted on the nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from amp_compiler.fx.meta import Key
from amp_compiler.ir.arithmetic import Fp8
from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.passes.base import InPlacePass, PassResult


@dataclass(frozen=True)
class MarkMath(InPlacePass):
    """Note on each node that a rule lets compute in FP32 which rule it is, for `type_backward` and `widen_math`.

    Before (plan: gelu low, math fp32)::

        gelu: bf16[4, 8] = aten.gelu.default(x)

    After::

        gelu: bf16[4, 8] = aten.gelu.default(x)  # math

    Left alone: nodes of which the plan says nothing, and those that run in FP32 anyway.

    Args:
        plan: the plan of this very graph.
        differentiable: whether gradients will be asked for.
    """

    plan: PrecisionPlan
    differentiable: bool = True
    name: ClassVar[str] = "mark_math"
    exact: ClassVar[bool] = True
    idempotent: ClassVar[bool] = True

    def run(self, subject: fx.GraphModule) -> PassResult[fx.GraphModule]:
        """Mark in place."""
        planned = {node.name: node for node in self.plan.nodes if node.math or node.backward_math}
        modified = False
        for node in subject.graph.nodes:
            verdict = planned.get(node.name) if node.op == "call_function" else None
            if verdict is None:
                continue
            in_fp8 = Fp8.parse(verdict.math) is not None  # whose gradients `scale_products` makes
            requested = {
                Key.MATH: verdict.math == "fp32" and verdict.precision != "fp32",
                Key.BACKWARD_MATH: verdict.backward_math == "fp32" and self.differentiable and not in_fp8,
            }
            for key in [key for key, wanted in requested.items() if wanted]:
                modified |= key not in node.meta
                node.meta[key] = verdict.math_rule
        return PassResult(subject, modified)
