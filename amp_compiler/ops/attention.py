"""The backward of BF16 attention on a CPU as an operator of our own.

ATen's CPU kernel is fast forward and slow backward, many times slower than its products would need: the native loops
run where they take it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amp_compiler.ops.cpu import attention as cpu_attention

ATEN_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


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
        return cpu_attention.backward(grad_out, query, key, value, out, logsumexp, is_causal, attn_mask, scale)
    rest = (logsumexp, dropout_p, is_causal)
    gradients = ATEN_BACKWARD(grad_out, query, key, value, out, *rest, attn_mask=attn_mask, scale=scale)
    return gradients[0], gradients[1], gradients[2]


@attention_backward.register_fake
def _(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return cpu_attention.gradients_like(query, key, value)


def takes_backward(
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
) -> bool:
    """Whether the native loops take a call of `attention_backward`; its arguments, as fake tensors."""
    return cpu_attention.can_run(query, key, value, dropout_p, attn_mask)
