"""The backward of BF16 attention on a CPU as native loops (`attention.cpp`)."""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from amp_compiler.ops.cpu import update as cpu_update
from amp_compiler.ops.cpu.build import library

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


def gradients_like(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the gradients, in memory as [batch, rows, heads, width]."""
    likes = (torch.empty_permuted(t.shape, (0, 2, 1, 3), dtype=t.dtype, device=t.device) for t in (query, key, value))
    return next(likes), next(likes), next(likes)


def backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    causal: bool,
    mask: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by query, key and value, in memory as [batch, rows, heads, width].

    Args:
        gradient: of `out`.
        query: as in `can_run`.
        key: as there.
        value: as there.
        out: of the forward, [batch, heads, queries, width].
        logsumexp: logarithm of the sum of each query's exponentials, FP32 [batch, heads, queries].
        causal: whether query i sees only the keys up to i.
        mask: as there.
        scale: of the scores; `None` for 1/sqrt(width).

    Source: the recomputation of Dao et al., FlashAttention, 2022, section 3.
    """
    batch, heads, queries, width = query.shape
    keys = key.shape[2]
    operands = [_dense_rows(one) for one in (gradient, query, key, value, out)]
    gradients = gradients_like(query, key, value)
    fields = [batch, heads, queries, keys, width, int(causal)]
    for one in (*operands, *gradients):
        fields += [one.data_ptr(), *one.stride()[:3]]
    if mask is None:
        fields += [0] * 6
    else:
        spread = mask.expand(batch, heads, queries, keys)
        fields += [spread.data_ptr(), MASKS[mask.dtype], *spread.stride()]
    fields += [logsumexp.data_ptr(), *logsumexp.stride()]
    attention = (ctypes.c_int64 * len(fields))(*fields)
    factor = 1.0 / math.sqrt(width) if scale is None else scale
    library().amp_attention_backward(attention, ctypes.c_float(factor), torch.get_num_threads())  # type: ignore[union-attr]
    return gradients


def _dense_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(3) == 1 or tensor.shape[3] == 1 else tensor.contiguous()
