"""`MarkBackward`: what a plan says of gradients, noted on the nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from amp_compiler.fx.graph import torch_dtype
from amp_compiler.fx.meta import Key
from amp_compiler.ir.dtypes import dtype_from_short
from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.passes.base import InPlacePass, PassResult


@dataclass(frozen=True)
class MarkBackward(InPlacePass):
    """Note on each node the type that the plan gives its gradients, for `type_backward`.

    Before (plan: linear low, backward fp32)::

        linear: bf16[4, 8] = aten.linear.default(x, w)

    After::

        linear: bf16[4, 8] = aten.linear.default(x, w)  # backward=fp32

    Left alone: nodes of which the plan says nothing: their gradients have their own type.

    Args:
        plan: the plan of this very graph.
    """

    plan: PrecisionPlan
    name: ClassVar[str] = "mark_backward"
    exact: ClassVar[bool] = True
    idempotent: ClassVar[bool] = True

    def run(self, subject: fx.GraphModule) -> PassResult[fx.GraphModule]:
        """Mark in place."""
        types = {"low": torch_dtype(dtype_from_short(self.plan.dtype)), "fp32": torch.float32}
        planned = {node.name: node for node in self.plan.nodes if node.backward}
        modified = False
        for node in subject.graph.nodes:
            if node.op == "call_function" and node.name in planned:
                requested = types[planned[node.name].backward]
                modified |= node.meta.get(Key.BACKWARD) is not requested
                node.meta[Key.BACKWARD] = requested
                node.meta[Key.BACKWARD_RULE] = planned[node.name].rule
        return PassResult(subject, modified)
