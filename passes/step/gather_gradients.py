"""`GatherGradients`: the gradients of several batches are added, in FP32, before there is an update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from amp_compiler.fx.graph import add_placeholder, call_before, results_of, trace_before
from amp_compiler.fx.meta import Key
from amp_compiler.passes.base import RewritePass

_SUM = "sum"  # column of the sums that a step keeps


@dataclass(frozen=True)
class GatherGradients(RewritePass):
    """Add the gradients of a batch to sums that the step keeps, or the sums to the gradients of the last batch.

    Before (`gather="use"`)::

        mul: bf16[4] = aten.mul.Tensor(w, x)
        return loss, mul

    After::

        in sum_w_0: fp32[4]
        mul: bf16[4] = aten.mul.Tensor(w, x)
        _to_copy: fp32[4] = aten._to_copy.default(mul, dtype=torch.float32)
        add: fp32[4] = aten.add.Tensor(sum_w_0, _to_copy)
        zero_ = aten.zero_.default(sum_w_0)
        return loss, add

    Left alone: a step of one batch.

    Args:
        updated: the weight of each gradient at the end of the graph's outputs.
        gather: `"add"` adds the gradients to the sums; `"use"` adds the sums to the gradients, and clears them; empty
            for neither.
    """

    updated: tuple[str, ...]
    gather: str = ""
    exact: ClassVar[bool] = False

    def requires(self, subject: fx.GraphModule) -> str | None:
        """There is an output for each weight."""
        count = len(results_of(subject.graph))
        wrong = f"the graph returns {count} values, and there are {len(self.updated)} gradients"
        return wrong if count < len(self.updated) else super().requires(subject)

    def rewrite(self, graph: fx.Graph) -> bool:
        """Rewrite in place."""
        if not self.gather:
            return False
        placeholders = {node.name: node for node in graph.find_nodes(op="placeholder")}
        outputs, output = results_of(graph), graph.output_node()
        first, last = len(outputs) - len(self.updated), list(placeholders.values())[-1]
        totals = []
        for number, (name, gradient) in enumerate(zip(self.updated, outputs[first:], strict=True)):
            key, value = (_SUM, name, number), torch.empty_like(placeholders[name].meta["val"], dtype=torch.float32)
            last = add_placeholder(last, "_".join(map(str, key)), {"val": value, Key.STATE: key})
            totals += trace_before(output, lambda a, b: a + b.float(), [last, gradient], "update")
            if self.gather == "add":
                call_before(output, torch.ops.aten.copy_.default, [last, totals[-1]], "update")
            else:
                call_before(output, torch.ops.aten.zero_.default, [last], "update")
        output.args = ((*outputs[:first], *totals),)
        return True
