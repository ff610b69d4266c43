"""The backward of BF16 attention on a CPU as an operator of our own: native loops (`cpu/attention.cpp`).

ATen's CPU kernel is fast forward and slow backward, many times slower than its products would need: the loops run where
they take it.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch
from torch import Tensor

from amp_compiler.ops.cpu import update as cpu_update
from amp_compiler.ops.cpu.build import library

ATEN_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
MASKS = {torch.float32: 1, torch.bfloat16: 2}  # types that a mask may have, by their code in C++


def can_run(query: Tensor, key: Tensor, value: Tensor, dropout: float, mask: Tensor | None) -> bool:
    """Whether the loops take it: BF16 on a CPU that multiplies it, as many heads of keys as of queries, no dropout.

    Args:
        query: [batch, heads, queries, width].
        key: [batch, heads, keys, width].
        value: [batch, heads, keys, width].
        dropout: probability of dropping an element.
        mask: added to the scores, broadcast to [batch, heads, queries, keys].
    """
    return (
        query.device.type == "cpu"
        and all(isinstance(size, int) for one in (query, key, value) for size in one.shape)  # comparing guards a symbol
        and all(one.dtype == torch.bfloat16 and one.dim() == 4 for one in (query, key, value))
        and key.shape == value.shape
        and query.shape[:2] == key.shape[:2]
        and query.shape[3] == key.shape[3]
        and min(*query.shape, *key.shape) > 0
        and dropout == 0.0
        and (mask is None or mask.dtype in MASKS)
        and cpu_update.most_inner() > 0
    )


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

    Args:
        grad_out: of `out`.
        query: as in `can_run`.
        key: as there.
        value: as there.
        out: of the forward, [batch, heads, queries, width].
        logsumexp: logarithm of the sum of each query's exponentials, FP32 [batch, heads, queries].
        dropout_p: as `dropout` there.
        is_causal: whether query i sees only the keys up to i.
        attn_mask: as `mask` there.
        scale: of the scores; `None` for 1/sqrt(width).

    Returns:
        Gradients by query, key and value, in memory as [batch, rows, heads, width].

    Source: the recomputation of Dao et al., FlashAttention, 2022, section 3.
    """
    if not can_run(query, key, value, dropout_p, attn_mask):
        rest = (logsumexp, dropout_p, is_causal)
        result = ATEN_BACKWARD(grad_out, query, key, value, out, *rest, attn_mask=attn_mask, scale=scale)
        return result[0], result[1], result[2]
    batch, heads, queries, width = query.shape
    keys = key.shape[2]
    operands = [_dense_rows(one) for one in (grad_out, query, key, value, out)]
    gradients = _gradients_like(query, key, value)
    fields = [batch, heads, queries, keys, width, int(is_causal)]
    for one in (*operands, *gradients):
        fields += [one.data_ptr(), *one.stride()[:3]]
    if attn_mask is None:
        fields += [0] * 6
    else:
        spread = attn_mask.expand(batch, heads, queries, keys)
        fields += [spread.data_ptr(), MASKS[attn_mask.dtype], *spread.stride()]
    fields += [logsumexp.data_ptr(), *logsumexp.stride()]
    numbers = (ctypes.c_int64 * len(fields))(*fields)
    factor = 1.0 / math.sqrt(width) if scale is None else scale
    library().amp_attention_backward(numbers, ctypes.c_float(factor), torch.get_num_threads())  # type: ignore[union-attr]
    return gradients


@attention_backward.register_fake
def _(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _gradients_like(query, key, value)


def _gradients_like(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the gradients, in memory as [batch, rows, heads, width]."""
    likes = (torch.empty_permuted(t.shape, (0, 2, 1, 3), dtype=t.dtype, device=t.device) for t in (query, key, value))
    return next(likes), next(likes), next(likes)


def _dense_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(3) == 1 or tensor.shape[3] == 1 else tensor.contiguous()


def takes_backward(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> bool:
    """Whether the native loops take a call of ATen's backward; its arguments, as fake tensors."""
    _, _, dropout_p, _ = rest
    return can_run(query, key, value, dropout_p, named.get("attn_mask"))
