"""Patches of BF16 images on a CPU, with which a convolution is a matrix product, and the way back for gradients.

Both are native loops (`cpu/patches.cpp`) where these are compiled.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from amp_compiler.errors import LoweringError
from amp_compiler.ops.cpu.build import library


def can_run(tensor: Tensor) -> bool:
    """Whether the loops take it: BF16 on a CPU, not empty, and the loops are compiled."""
    fits = tensor.dtype == torch.bfloat16 and tensor.device.type == "cpu" and tensor.numel() > 0
    return fits and library() is not None


@torch.library.custom_op("amp_compiler::patches", mutates_args=())
def patches(x: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]) -> Tensor:
    """What each pixel of a convolution's result is computed from, as the rows of a matrix.

    Args:
        x: images, BF16 [batch, channels, height, width].
        kernel: rows and columns of a patch.
        stride: pixels from one patch to the next, down and across.
        padding: pixels of zeros above and below, left and right.
        dilation: pixels from one element of a patch to the next.

    Returns:
        [batch * rows * columns, channels * kernel[0] * kernel[1]], in the order of a weight's dimensions.

    Raises:
        LoweringError: a patch is larger than an image with its padding.

    Example:
        >>> x = torch.arange(4, dtype=torch.bfloat16).reshape(1, 1, 2, 2)
        >>> patches(x, [2, 2], [1, 1], [0, 0], [1, 1]).tolist()
        [[0.0, 1.0, 2.0, 3.0]]
    """
    rows, columns = _places(x.shape, kernel, stride, padding, dilation)
    matrix = x.new_empty(x.shape[0] * rows * columns, x.shape[1] * kernel[0] * kernel[1])
    if can_run(x):
        _call("amp_unfold", x, matrix, (rows, columns), (kernel, stride, padding, dilation))
    elif matrix.numel():
        matrix.copy_(torch.ops.aten.im2col(x, kernel, dilation, padding, stride).transpose(1, 2).flatten(0, 1))
    return matrix


@patches.register_fake
def _(x: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]) -> Tensor:
    rows, columns = _places(x.shape, kernel, stride, padding, dilation)
    return x.new_empty(x.shape[0] * rows * columns, x.shape[1] * kernel[0] * kernel[1])


@torch.library.custom_op("amp_compiler::fold_patches", mutates_args=())
def fold_patches(
    gradient: Tensor, size: list[int], kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]
) -> Tensor:
    """The gradient of `patches`: each pixel's is the sum over the patches that it is in, in FP32, rounded once.

    Args:
        gradient: of the result of `patches`.
        size: shape of the images.
        kernel: as there.
        stride: as there.
        padding: as there.
        dilation: as there.

    Returns:
        The gradient of the images, with channels last in memory.

    Raises:
        LoweringError: the gradient has another shape than the patches of such images.
    """
    rows, columns = _places(size, kernel, stride, padding, dilation)
    expected = (size[0] * rows * columns, size[1] * kernel[0] * kernel[1])
    if gradient.shape != expected:
        raise LoweringError(
            f"patches of images {list(size)} have the shape {list(expected)}, not {list(gradient.shape)}",
            where="amp_compiler.fold_patches",
            hint="give it the gradient of what `patches` made of such images, with the same settings",
        )
    if can_run(gradient):
        images = torch.empty_permuted(size, (0, 2, 3, 1), dtype=gradient.dtype, device=gradient.device)
        _call("amp_fold", images, gradient.contiguous(), (rows, columns), (kernel, stride, padding, dilation))
        return images
    columns_of_patches = gradient.float().reshape(size[0], rows * columns, gradient.shape[1]).transpose(1, 2)
    summed: Tensor = torch.ops.aten.col2im(columns_of_patches, size[2:], kernel, dilation, padding, stride)
    return summed.to(gradient.dtype, memory_format=torch.channels_last)


@fold_patches.register_fake
def _(
    gradient: Tensor, size: list[int], kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]
) -> Tensor:
    return torch.empty_permuted(size, (0, 2, 3, 1), dtype=gradient.dtype, device=gradient.device)


def _places(size: Sequence[int], *settings: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a convolution's result."""
    rows, columns = (_along(size[2 + dim], *(pair[dim] for pair in settings)) for dim in (0, 1))
    if rows < 1 or columns < 1:
        raise LoweringError(
            f"a patch of {settings[0]} with dilation {settings[3]} does not fit into images {list(size)}",
            where="amp_compiler.patches",
            hint="use a smaller kernel, or more padding",
        )
    return rows, columns


def _along(pixels: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """How many patches there are along one dimension of an image; below 1 where none fits."""
    return (pixels + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def _call(name: str, images: Tensor, rows: Tensor, places: tuple[int, int], settings: Sequence[Sequence[int]]) -> None:
    numbers = [*images.shape, *images.stride(), *places, *(number for pair in settings for number in pair)]
    shape = (ctypes.c_int64 * len(numbers))(*numbers)
    addresses = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (images, rows))
    getattr(library(), name)(shape, *addresses, torch.get_num_threads())


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.size, ctx.settings = list(inputs[0].shape), inputs[1:]


def _backward(ctx: Any, gradient: Tensor) -> Any:
    return torch.ops.amp_compiler.fold_patches(gradient, ctx.size, *ctx.settings), None, None, None, None


patches.register_autograd(_backward, setup_context=_save)
