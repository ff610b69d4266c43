"""`SumGradients`: one gradient for each weight, whatever forms of it the loss was differentiated by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from amp_compiler.fx.alias import source_of
from amp_compiler.fx.graph import results_of, schema_argument, trace_before
from amp_compiler.ops.update.operators import ADD_ROWS
from amp_compiler.passes.base import RewritePass

_LOOKUP = torch.ops.aten.embedding_dense_backward.default


@dataclass(frozen=True)
class SumGradients(RewritePass):
    """Sum, in FP32, the gradients of the FP32 and the 16-bit form of a weight, and leave one gradient a weight.

    A table that is read by a lookup and multiplied with as well (tied embeddings) has a dense gradient from its product
    and one of few rows from the lookup. Adding those rows to the dense gradient spares a table of zeros and the sum.
    A gradient that is an input of the graph is copied: the derivative by a summand is the loss scale itself, and the
    update writes a new scale where the gradient is still to be read.

    Before (`owner=("w", "w")`: an FP32 table `w` with a 16-bit copy)::

        embedding: fp32[32, 64] = aten.embedding_dense_backward.default(grad, ids, 32, -1, False)
        return loss, embedding, product

    After::

        to: fp32[32, 64] = aten._to_copy.default(product, dtype=torch.float32)
        add_rows: fp32[32, 64] = amp_compiler.add_rows.default(to, grad, ids, -1)
        return loss, add_rows

    Left alone: weights with one gradient. Those without any are dropped from what the graph returns, but for those that
    other batches have gathered gradients of, whose own here is zero.

    Args:
        owner: for each gradient at the end of the graph's outputs the weight that it belongs to.
        absent: the weights without a gradient here that get one of zeros, behind the others.
    """

    owner: tuple[str, ...]
    absent: tuple[str, ...] = ()
    exact: ClassVar[bool] = False

    def requires(self, subject: fx.GraphModule) -> str | None:
        """There is an output for each owner, and something before them."""
        count = len(results_of(subject.graph))
        wrong = f"the graph returns {count} values, and there are {len(self.owner)} gradients"
        return wrong if count <= len(self.owner) else super().requires(subject)

    def rewrite(self, graph: fx.Graph) -> bool:
        """Rewrite in place."""
        outputs, output = results_of(graph), graph.output_node()
        first = len(outputs) - len(self.owner)
        merged: dict[str, fx.Node] = {}
        for owner, gradient in zip(self.owner, outputs[first:], strict=True):
            if not isinstance(gradient, fx.Node):
                continue
            if source_of(gradient).op == "placeholder":
                (gradient,) = trace_before(output, torch.clone, [gradient], "update")
            if owner in merged:
                function, parts = sum_of(merged[owner], gradient)
                (gradient,) = trace_before(output, function, parts, "update")
            merged[owner] = gradient
        weights = {node.name: node for node in graph.find_nodes(op="placeholder")} if self.absent else {}
        for name in self.absent:
            (merged[name],) = trace_before(output, _zeros, [weights[name]], "update")
        results = [*outputs[:first], *merged.values()]
        if results == outputs:
            return False
        output.args = (tuple(results),)
        for gradient in dict.fromkeys(outputs[first:]):
            if isinstance(gradient, fx.Node) and gradient.op == "call_function" and not gradient.users:
                graph.erase_node(gradient)  # it was added in another way
        return True


def _zeros(weight: Tensor) -> Tensor:
    return torch.zeros_like(weight, dtype=torch.float32)


def sum_of(first: fx.Node, second: fx.Node) -> tuple[Callable[..., Any], list[fx.Node]]:
    """A function that adds two gradients in FP32, and the nodes that it takes.

    Args:
        first: a gradient.
        second: another of the same shape.
    """
    for lookup, other in ((first, second), (second, first)):
        if lookup.target is _LOOKUP and len(lookup.users) == 1 and not schema_argument(lookup, "scale_grad_by_freq"):
            skipped = schema_argument(lookup, "padding_idx")

            def scatter(dense: Tensor, grad: Tensor, indices: Tensor, skipped: int = skipped) -> Any:
                return ADD_ROWS(dense.float(), grad.float(), indices, skipped)

            return scatter, [other, *lookup.args[:2]]  # type: ignore[list-item]
    return lambda a, b: a.float() + b.float(), [first, second]


def owners_with_gradient(joint: fx.GraphModule, owner: tuple[str, ...]) -> tuple[str, ...]:
    """The weights that a joint graph has a gradient for, in the order in which `SumGradients` returns them."""
    outputs = results_of(joint.graph)
    gradients = outputs[len(outputs) - len(owner) :]
    return tuple(
        dict.fromkeys(name for name, gradient in zip(owner, gradients, strict=True) if isinstance(gradient, fx.Node))
    )
