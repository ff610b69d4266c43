"""Attention on a CPU as operators of our own: in FP16 both ways, else the backward alone.

ATen's CPU kernel is fast forward and slow backward, many times slower than its products would need: the native loops
run where they take it. FP16 is emulated: the kernel runs in FP32 on the rounded operands, and what the backward reads
of its result is rounded, as an FP16 kernel's own would be.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from amp_compiler.ops.cpu import attention as cpu_attention

ATEN_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
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
    """As `aten._scaled_dot_product_flash_attention_for_cpu_backward`, argument by argument, but for FP16: in FP32.

    Returns:
        Gradients by query, key and value, in memory as [batch, rows, heads, width].
    """
    if cpu_attention.can_run(query, key, value, dropout_p, attn_mask):
        return cpu_attention.backward(grad_out, query, key, value, out, logsumexp, is_causal, attn_mask, scale)
    rest = (logsumexp, dropout_p, is_causal)
    if query.dtype is not torch.float16:
        gradients = ATEN_BACKWARD(grad_out, query, key, value, out, *rest, attn_mask=attn_mask, scale=scale)
        return gradients[0], gradients[1], gradients[2]
    wide = (one.float() for one in (grad_out, query, key, value, out))
    gradients = ATEN_BACKWARD(*wide, *rest, attn_mask=_float_mask(attn_mask), scale=scale)
    d_query, d_key, d_value = cpu_attention.gradients_like(query, key, value)
    return d_query.copy_(gradients[0]), d_key.copy_(gradients[1]), d_value.copy_(gradients[2])


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


@torch.library.custom_op("amp_compiler::emulated_attention", mutates_args=())
def emulated_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """ATen's fused attention for a CPU, in FP32 on FP16 operands.

    Args:
        query: [batch, heads, rows, width], FP16.
        key: [batch, heads, columns, width], FP16.
        value: as `key`.
        attn_mask: bool or floating, as for `torch.nn.functional.scaled_dot_product_attention`; needs no gradient.
        is_causal: as there.
        scale: as there.

    Returns:
        The result, FP16 and in memory as the query, and the logarithms of the sums of the
        exponentials, FP32 [batch, heads, rows].
    """
    wide = query.float(), key.float(), value.float()
    out, logsumexp = ATEN_FORWARD(*wide, 0.0, is_causal, attn_mask=_float_mask(attn_mask), scale=scale)
    results = _results(query)
    return results[0].copy_(out), results[1].copy_(logsumexp)


def _results(query: Tensor) -> tuple[Tensor, Tensor]:
    """Room for what the kernel makes."""
    return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)


@emulated_attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    return _results(query)


def _float_mask(mask: Tensor | None) -> Tensor | None:
    """A mask as the kernel takes it: FP32 numbers to add."""
    if mask is None or mask.dtype is not torch.bool:
        return mask if mask is None else mask.float()
    return torch.zeros(mask.shape, dtype=torch.float32, device=mask.device).masked_fill_(~mask, -math.inf)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    query, key, value, mask, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, mask, *output)


def _backward(ctx: Any, gradient: Tensor | None, _: Tensor | None) -> Any:
    query, key, value, mask, out, logsumexp = ctx.saved_tensors
    if gradient is None:
        return (None,) * 6
    if torch.is_grad_enabled():  # this backward may be differentiated itself, which ATen's fused kernel cannot
        return *_by_products(query, key, value, mask, gradient, ctx), None, None, None
    gradients = torch.ops.amp_compiler.attention_backward(
        gradient, query, key, value, out, logsumexp, 0.0, ctx.causal, mask, ctx.scale
    )
    return *gradients, None, None, None


def _by_products(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, gradient: Tensor, ctx: Any
) -> list[Tensor | None]:
    """Gradients through attention that is written out, in FP32."""
    needs = ctx.needs_input_grad[:3]
    read = [one.view_as(one) for one in (query, key, value)]  # one may stand there twice
    wide = [one.float() for one in read]
    out, _ = torch.ops.aten._scaled_dot_product_attention_math.default(
        *wide, _float_mask(mask), 0.0, ctx.causal, None, scale=ctx.scale
    )
    wanted = [one for one, needed in zip(read, needs, strict=True) if needed]
    gradients = iter(torch.autograd.grad(out.to(query.dtype), wanted, gradient, create_graph=True))
    return [next(gradients) if needed else None for needed in needs]


emulated_attention.register_autograd(_backward, setup_context=_save)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`amp_compiler.attention`: traced and differentiated as what it is made of; in FP32 where that is not fused."""
    if dropout_p == 0 and _is_fused(query, key, value, attn_mask):
        return torch.ops.amp_compiler.emulated_attention(query, key, value, attn_mask, is_causal, scale)[0]  # type: ignore[no-any-return]
    wide, mask = [one.float() for one in (query, key, value)], _float_mask(attn_mask)
    if query.shape[1] == 0:  # torch 2.11's own kernel divides by the number of heads, which ends the process
        empty, _ = torch.ops.aten._scaled_dot_product_attention_math.default(*wide, mask, 0.0, is_causal, scale=scale)
        return empty.to(query.dtype)  # type: ignore[no-any-return]
    options = {"scale": scale, "enable_gqa": enable_gqa}
    out = torch.ops.aten.scaled_dot_product_attention.default(*wide, mask, dropout_p, is_causal, **options)
    return out.to(query.dtype)  # type: ignore[no-any-return]


def _is_fused(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether ATen's fused kernel takes operands; `aten._fused_sdp_choice` does not tell of fake tensors."""
    batch, heads, rows, width = query.shape
    alike = (
        key.shape == value.shape == (batch, heads, key.shape[2], width) and heads > 0 and rows > 0 and key.shape[2] > 0
    )
    dense = all(one.stride(-1) == 1 for one in (query, key, value)) and torch.backends.cuda.flash_sdp_enabled()
    if not alike or not dense or mask is None:
        return alike and dense
    whole = tuple(mask.shape[-2:]) == (rows, key.shape[2]) and not mask.requires_grad
    first = tuple(mask.shape[:-2])
    return whole and (not first or (len(first) == 2 and first[0] in (1, batch) and first[1] in (1, heads)))


_LIBRARY = torch.library.Library("amp_compiler", "FRAGMENT")
_LIBRARY.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0,"
    " bool is_causal=False, *, float? scale=None, bool enable_gqa=False) -> Tensor"
)
_LIBRARY.impl("attention", _attention, "CompositeImplicitAutograd")


def takes_forward(query: Tensor, key: Tensor, value: Tensor, *rest: Any, enable_gqa: bool = False, **more: Any) -> bool:
    """Whether `amp_compiler.attention` takes a call of `scaled_dot_product_attention`: all of it in FP16."""
    return not enable_gqa and query.dim() == 4 and {one.dtype for one in (query, key, value)} == {torch.float16}
