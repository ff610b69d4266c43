"""`TwoMatrices`: products with a matrix are products of two matrices, never of a batch of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from amp_compiler.fx.graph import node_tensor
from amp_compiler.passes.base import RewritePass

_PRODUCTS = (torch.ops.aten.linear.default, torch.ops.aten.matmul.default)
_CONTIGUOUS = torch.ops.aten.contiguous.default


@dataclass(frozen=True)
class TwoMatrices(RewritePass):
    """Make the left operand of a product with a matrix contiguous, so that torch flattens it to a matrix.

    Where it is not contiguous, such as the output of a recurrent layer with the batch first, torch makes a batched
    product of it wherever no gradient goes through, and copies the matrix for each element of the batch.

    Before::

        x: bf16[6, 5, 8]{8, 48, 1}
        linear: bf16[6, 5, 4] = aten.linear.default(x, w)

    After::

        contiguous: bf16[6, 5, 8] = aten.contiguous.default(x)
        linear: bf16[6, 5, 4] = aten.linear.default(contiguous, w)

    Left alone: a left operand that is contiguous already, a matrix or a vector on the left, a batch on the right.
    """

    exact: ClassVar[bool] = False
    idempotent: ClassVar[bool] = True
    skippable: ClassVar[bool] = True

    def rewrite(self, graph: fx.Graph) -> bool:
        """Insert the copies in place."""
        matches = [node for node in graph.nodes if _is_batched(node)]
        for node in matches:
            left = node.args[0]
            with graph.inserting_before(node):
                copy = graph.create_node("call_function", _CONTIGUOUS, (left,), name="contiguous")
            copy.meta = {**node.meta, "val": left.meta["val"].contiguous()}
            node.args = (copy, *node.args[1:])
        return bool(matches)


def _is_batched(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target not in _PRODUCTS:
        return False
    left, right = (node_tensor(operand) for operand in node.args[:2])  # type: ignore[arg-type]
    if left is None or right is None or left.dim() < 3 or right.dim() != 2:
        return False
    known = all(isinstance(size, int) for size in left.shape)  # asking a symbolic size would put a bound on it
    return not (left.is_contiguous() if known else node.args[0].target is _CONTIGUOUS)  # type: ignore[union-attr]
