"""`ScaleProducts`: carry out `math: fp8`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from amp_compiler.errors import LoweringError
from amp_compiler.fx.graph import add_placeholder, module_of, refresh, schema_argument
from amp_compiler.fx.meta import Key
from amp_compiler.ir.arithmetic import Fp8
from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.ops.fp8 import fp8_product, no_amaxes
from amp_compiler.passes.base import InPlacePass, PassResult

AMAXES = "amaxes"  # mark of what a step keeps for delayed scaling: (it, module and number, history)


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

    Delayed scaling has a placeholder more, of which a training step writes what `differentiate` makes its gradient::

        in amaxes_0: fp32[3, 17]  # state=amaxes/fc:0/0
        linear: bf16[4, 16] = fp8_product(aten.linear.default, (x, w, b), "fp8(…)", "fp8(…)", amaxes_0)

    Left alone: everything else.

    Args:
        plan: the plan of this very graph.
        differentiable: whether gradients will be asked for.
        keeps_amaxes: whether the graph becomes that of a training step, which alone has delayed scaling.
    """

    plan: PrecisionPlan
    differentiable: bool = True
    keeps_amaxes: bool = False
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
            self._delay(node)
        if marked:
            refresh(subject)
        return PassResult(subject, bool(marked))

    def _delay(self, node: fx.Node) -> None:
        """Give a product with delayed scaling what the step keeps for it, known by its module and its number there."""
        ways = [Fp8.parse(str(text)) for text in node.args[2:4]]
        history = max(way.history for way in ways if way is not None)
        if not history:
            return
        module = module_of(node)[0]
        if not self.keeps_amaxes:
            raise LoweringError(
                f"'{node.name}'{f' in {module}' if module else ''} has delayed scaling, for which one graph of a whole"
                " training step keeps magnitudes",
                hint="use rules with 'scaling: tensorwise' here, such as rules='fp8'",
            )
        placeholders = node.graph.find_nodes(op="placeholder")
        keys = [one.meta[Key.STATE][1] for one in placeholders if Key.STATE in one.meta]
        number = sum(key.rpartition(":")[0] == module for key in keys)
        value = node.meta["val"].new_empty(no_amaxes(history).shape, dtype=torch.float32)
        meta = {"val": value, Key.STATE: (AMAXES, f"{module}:{number}", history)}
        node.args = (*node.args, add_placeholder(placeholders[-1], f"{AMAXES}_{len(keys)}", meta))
