"""How two gradients of one weight are added: the gradient of a lookup goes straight into the other one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx

from amp_compiler.fx.graph import schema_argument

_LOOKUP = torch.ops.aten.embedding_dense_backward.default


def sum_of(first: fx.Node, second: fx.Node) -> tuple[Callable[..., Tensor], list[fx.Node]]:
    """A function that adds two gradients in FP32, and the nodes that it takes.

    A table that is read by a lookup and multiplied with as well (tied embeddings) has a dense gradient from its product
    and one of few rows from the lookup. Adding those rows to the dense gradient spares a table of zeros and the sum.

    Before::

        rows = aten.embedding_dense_backward(grad, indices, 4096, -1, False)
        total = rows + product.float()

    After::

        total = aten.index_put(product.float(), [indices.view(-1)], grad.view(-1, 768).float(), accumulate=True)

    Args:
        first: a gradient.
        second: another of the same shape.
    """
    for lookup, other in ((first, second), (second, first)):
        if lookup.target is _LOOKUP and len(lookup.users) == 1 and not schema_argument(lookup, "scale_grad_by_freq"):
            skipped = schema_argument(lookup, "padding_idx")

            def scatter(dense: Tensor, grad: Tensor, indices: Tensor, skipped: int = skipped) -> Tensor:
                places = indices.reshape(-1)
                rows = grad.reshape(places.numel(), -1).float()
                if skipped >= 0:
                    rows = torch.where((places == skipped)[:, None], 0.0, rows)
                return torch.index_put(dense.float(), (places,), rows, accumulate=True)

            return scatter, [other, *lookup.args[:2]]  # type: ignore[list-item]
    return lambda a, b: a.float() + b.float(), [first, second]
