"""`ZeroHiddenRows`: rows of an attention that a mask hides whole are zeros in the file too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from amp_compiler.fx.graph import call_before, schema_argument
from amp_compiler.fx.meta import source_of
from amp_compiler.passes.base import RewritePass

aten = torch.ops.aten


@dataclass(frozen=True)
class ZeroHiddenRows(RewritePass):
    """Put zeros where a mask of truth values hides a whole row of `scaled_dot_product_attention`.

    Torch computes zeros there. Its ONNX exporter writes the mask as huge negative numbers that are added, of which
    the softmax of such a row makes an average.

    Before::

        attend: fp32[1, 2, 4, 16] = aten.scaled_dot_product_attention.default(q, k, v, mask)
        return attend

    After::

        attend: fp32[1, 2, 4, 16] = aten.scaled_dot_product_attention.default(q, k, v, mask)
        any_dim: bool[1, 1, 4, 1] = aten.any.dim(mask, -1, True)
        logical_not_default: bool[1, 1, 4, 1] = aten.logical_not.default(any_dim)
        masked_fill_scalar: fp32[1, 2, 4, 16] = aten.masked_fill.Scalar(attend, logical_not_default, 0.0)
        return masked_fill_scalar

    Left alone: attention without a mask, or with one of numbers.
    """

    exact: ClassVar[bool] = True

    def rewrite(self, graph: fx.Graph) -> bool:
        """Rewrite in place."""
        modified = False
        for attend in graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default):
            mask = schema_argument(attend, "attn_mask")
            if isinstance(mask, fx.Node) and mask.meta["val"].dtype is torch.bool:
                users = list(attend.users)
                seen = _behind(attend, aten.any.dim, mask, -1, True)
                hidden = _behind(seen, aten.logical_not.default, seen)
                result = _behind(hidden, aten.masked_fill.Scalar, attend, hidden, 0.0)
                for user in users:
                    user.replace_input_with(attend, result)
                modified = True
        return modified


def _behind(place: fx.Node, op: Callable[..., Any], *args: Any) -> fx.Node:
    """A call behind a node, with its fake result."""
    node = call_before(place.next, op, args, "")
    node.meta.update(source_of(place))
    return node
