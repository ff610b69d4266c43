"""The backward of attention on a CPU as an operator of our own: the native loops where they take it, else ATen's.

ATen's CPU kernel is fast forward and slow backward, many times slower than its products would need.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from amp_compiler.ops.cpu import attention as cpu_attention

# Of `use_native_backward`, for Inductor's cache: this file and what decides with it.
IDENTITY = hashlib.sha256(
    b"".join(Path(module).read_bytes() for module in (__file__, cpu_attention.__file__))
).hexdigest()
_ATEN = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@torch.library.custom_op("amp_compiler::attention_backward", mutates_args=())
def attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `aten._scaled_dot_product_flash_attention_for_cpu_backward`, argument by argument.

    Returns:
        Gradients by query, key and value, in memory as [batch, rows, heads, width].
    """
    if cpu_attention.can_run(query, key, value, dropout_p, attn_mask):
        rest = (out, logsumexp, is_causal, attn_mask, scale)
        return cpu_attention.backward(grad_out, query, key, value, *rest)
    made = _ATEN(
        grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )  # fmt: skip
    return made[0], made[1], made[2]


@attention_backward.register_fake
def _(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return cpu_attention.gradients_like(query, key, value)


def use_native_backward(graph: fx.Graph) -> None:
    """Replace ATen's backward of attention by `attention_backward` wherever the native loops take it.

    Args:
        graph: an ATen graph whose nodes carry their fake tensors as `meta["val"]`; changed in place.
    """
    for node in graph.find_nodes(op="call_function", target=_ATEN):
        query, key, value = (node.args[place].meta["val"] for place in (1, 2, 3))
        mask = node.kwargs.get("attn_mask", node.args[8] if len(node.args) > 8 else None)
        known = None if mask is None else mask.meta["val"]
        if cpu_attention.can_run(query, key, value, node.args[6], known):
            node.target = torch.ops.amp_compiler.attention_backward.default
