"""How tensors lie in memory: whether they are dense, whether two lie alike, and new ones that do."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def as_real(tensor: Tensor) -> Tensor:
    """A complex tensor as real and imaginary parts in a last dimension of 2, in the same memory; others as they are."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def from_real(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """What `as_real` gave of a tensor of `dtype`: complex again where that is, in the same memory."""
    return torch.view_as_complex(tensor) if dtype.is_complex else tensor


def same_layout(first: Tensor, second: Tensor) -> bool:
    """Whether equal positions in memory hold equal elements, for two tensors of one shape."""
    if first.stride() == second.stride():
        return True
    strides = zip(first.stride(), second.stride(), first.shape, strict=True)
    return first.numel() == 0 or all(a == b for a, b, size in strides if size != 1)


def laid_out_like(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """The tensors with the strides of the others, which are dense and of the same shapes; copied where they differ.

    Updates walk over memory, so gradients must lie there as their weights do.
    """
    return [
        tensor if same_layout(tensor, other) else empty_laid_out_like(other, tensor.dtype).copy_(tensor)
        for tensor, other in zip(tensors, others, strict=True)
    ]


def empty_laid_out_like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A new dense tensor of the same shape and device, with the same strides where the given one is dense."""
    return torch.empty_like(tensor, dtype=dtype, requires_grad=False, memory_format=torch.preserve_format)


def is_laid_out_like(tensor: Tensor, other: Tensor) -> bool:
    """Whether a tensor is where and as `empty_laid_out_like(other, …)` would make it."""
    if tensor.shape != other.shape or tensor.device != other.device:
        return False
    return tensor.stride() == other.stride() or same_layout(tensor, other) or not is_dense(other)


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one block of memory without gaps or overlap, in any order of dimensions."""
    if tensor.numel() == 0 or tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
