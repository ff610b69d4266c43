"""Normalisation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from amp_compiler.onnx.importing.ops.registry import op


@op("BatchNormalization", many=True)
def _batch_norm(
    x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, *, opset: int, outputs: int,
    epsilon: float = 1e-5, momentum: float = 0.9, training_mode: int = 0, spatial: int = 1, is_test: int = 1,
) -> tuple[Tensor, ...]:  # fmt: skip
    if not training_mode:
        return (F.batch_norm(x, mean, variance, scale, bias, False, 0.0, epsilon),)
    axes = [axis for axis in range(x.dim()) if axis != 1]
    seen = x.mean(axes)
    spread = x.var(axes, correction=0)
    result = F.batch_norm(x, None, None, scale, bias, True, 0.0, epsilon)
    return (
        result,
        mean * momentum + seen.to(mean.dtype) * (1 - momentum),
        variance * momentum + spread.to(variance.dtype) * (1 - momentum),
    )


@op("InstanceNormalization")
def _instance_norm(x: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = 1e-5) -> Tensor:
    return F.instance_norm(x, weight=scale, bias=bias, eps=epsilon)


@op("GroupNormalization")
def _group_norm(
    x: Tensor, scale: Tensor, bias: Tensor, *, num_groups: int, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    if scale.shape[0] != x.shape[1]:  # opset 18 has one scale per group
        scale = scale.repeat_interleave(x.shape[1] // scale.shape[0])
        bias = bias.repeat_interleave(x.shape[1] // bias.shape[0])
    return F.group_norm(x, num_groups, scale, bias, epsilon)


@op("LayerNormalization", many=True)
def _layer_norm(
    x: Tensor, scale: Tensor, bias: Tensor | None = None, *, outputs: int, axis: int = -1, epsilon: float = 1e-5,
    stash_type: int = 1,
) -> tuple[Tensor, ...]:  # fmt: skip
    sizes = list(x.shape[axis % x.dim() :])
    whole = list(scale.shape) == sizes and (bias is None or list(bias.shape) == sizes)
    if whole:
        result = F.layer_norm(x, sizes, scale, bias, epsilon)
    else:
        result = F.layer_norm(x, sizes, None, None, epsilon) * scale
        result = result if bias is None else result + bias
    if outputs == 1:
        return (result,)
    axes = list(range(axis % x.dim(), x.dim()))
    mean = x.mean(axes, keepdim=True)
    variance = (x - mean).square().mean(axes, keepdim=True)
    return result, mean, torch.rsqrt(variance + epsilon)


@op("RMSNormalization")
def _rms_norm(x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1) -> Tensor:
    sizes = list(x.shape[axis % x.dim() :])
    if list(scale.shape) == sizes:
        return F.rms_norm(x, sizes, scale, epsilon)
    return F.rms_norm(x, sizes, None, epsilon) * scale


@op("LRN")
def _lrn(x: Tensor, *, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0) -> Tensor:
    low, high = (size - 1) // 2, size // 2
    square = F.pad(x * x, [0, 0] * (x.dim() - 2) + [low, high])
    total = sum(square.narrow(1, shift, x.shape[1]) for shift in range(size))
    return x / (bias + alpha / size * total) ** beta


@op("LpNormalization")
def _lp_norm(x: Tensor, *, axis: int = -1, p: int = 2) -> Tensor:
    norm = x.abs().sum(axis, keepdim=True) if p == 1 else (x * x).sum(axis, keepdim=True).sqrt()
    return torch.where(norm == 0, torch.zeros_like(x), x / norm)
