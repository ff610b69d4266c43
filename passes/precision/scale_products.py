"""`ScaleProducts`: carry out `math: fp8`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from amp_compiler.fx.graph import refresh, schema_argument
from amp_compiler.ir.arithmetic import Fp8
from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.ops.fp8 import fp8_product
from amp_compiler.passes.base import InPlacePass, PassResult


@dataclass(frozen=True)
class ScaleProducts(InPlacePass):
    """Compute each node of which the plan says `math: fp8` of operands that are scaled and rounded to FP8.

    What flows between nodes stays 16-bit. The operands' scales follow from their largest magnitudes, in the graph; a
    trace of `fp8_product` holds them and the casts as operators of their own, which a compiler fuses with what makes
    the operands.

    Before (plan: linear low, math fp8)::

        linear: bf16[4, 16] = aten.linear.default(x, w, b)

    After::

        linear: bf16[4, 16] = fp8_product(aten.linear.default, (x, w, b), "fp8(hybrid, …)", "fp8(hybrid, …)")

    Left alone: everything else.

    Args:
        plan: the plan of this very graph.
        differentiable: whether gradients will be asked for.
    """

    plan: PrecisionPlan
    differentiable: bool = True
    name: ClassVar[str] = "scale_products"
    exact: ClassVar[bool] = False
    idempotent: ClassVar[bool] = True

    def run(self, subject: fx.GraphModule) -> PassResult[fx.GraphModule]:
        """Rewrite in place."""
        planned = {node.name: node for node in self.plan.nodes if Fp8.parse(node.math) is not None}
        marked = [node for node in subject.graph.nodes if node.name in planned and node.target is not fp8_product]
        for node in marked:
            verdict = planned[node.name]
            args = tuple(schema_argument(node, one.name) for one in node.target._schema.arguments)
            gradients = verdict.backward_math or verdict.math  # of which nothing is said are as the node is
            backward = gradients if self.differentiable and Fp8.parse(gradients) is not None else ""
            node.args, node.kwargs, node.target = (node.target, args, verdict.math, backward), {}, fp8_product
        if marked:
            refresh(subject)
        return PassResult(subject, bool(marked))
