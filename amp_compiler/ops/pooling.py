"""Max-pooling on a CPU whose backward needs one byte for each result, and no pixels.

ATen notes the place of each largest pixel in its image, in eight bytes, and Inductor adds the gradients up in FP32 with
a scatter. The operators here note its place in the window, in one byte, and each pixel gathers its gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from amp_compiler.ops.cpu import arena
from amp_compiler.ops.cpu import pooling as cpu_pooling
from amp_compiler.ops.windows import windows_along

_POOL = torch.ops.aten.max_pool2d_with_indices.default
MOST = 127  # elements of a window, whose places fit into a byte
_LIBRARY = torch.library.Library("amp_compiler", "FRAGMENT")
_SETTINGS = "int[] kernel, int[] stride, int[] padding, int[] dilation"
for _schema in (
    f"max_pool(Tensor x, {_SETTINGS}, bool ceil_mode) -> (Tensor, Tensor)",
    f"max_pool_backward(Tensor gradient, Tensor offsets, int[] size, {_SETTINGS}) -> Tensor",
):
    _LIBRARY.define(_schema, tags=(torch.Tag.flexible_layout,))


def max_pool(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    ceil_mode: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The largest pixel of each window, and where it stands there.

    Args:
        x: images [batch, channels, height, width].
        kernel: rows and columns of a window, at most 127 elements.
        stride: pixels from one window to the next, down and across.
        padding: pixels around the image that no window takes, above and below, left and right.
        dilation: pixels from one element of a window to the next.
        ceil_mode: whether a window may reach over the last pixel and its padding.

    Returns:
        The pixels, [batch, channels, rows, columns], and their places in the windows, row by row, in INT8; both with
        channels last in memory where those of `x` are. Of equal pixels it is the first; a NaN is larger than any other.

    Example:
        >>> x = torch.tensor([[[[1.0, 4.0], [3.0, 2.0]]]])
        >>> [one.tolist() for one in max_pool(x, [2, 2], [2, 2], [0, 0], [1, 1], False)]
        [[[[[4.0]]]], [[[[1]]]]]
    """
    settings = (kernel, stride, padding, dilation)
    largest, offsets = _results(x, settings, ceil_mode)
    if cpu_pooling.can_run(x):
        cpu_pooling.pool(x, largest, offsets, settings)
    else:
        made, indices = _POOL(x, *settings, ceil_mode)
        largest.copy_(made)
        offsets.copy_(_offsets(indices, x.shape, settings))
    return largest, offsets


def max_pool_backward(
    gradient: Tensor, offsets: Tensor, size: Sequence[int], kernel: Sequence[int], stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int],
) -> Tensor:  # fmt: skip
    """The gradient of `max_pool`'s images: each pixel's is the sum over the windows that took it, rounded once.

    Args:
        gradient: of the pixels that were taken.
        offsets: their places in the windows.
        size: shape of the images.
        kernel: as there.
        stride: as there.
        padding: as there.
        dilation: as there.

    Returns:
        The gradient, with channels last in memory where those of `offsets` are.
    """
    settings = (kernel, stride, padding, dilation)
    made = _like(offsets, size, gradient.dtype)
    if cpu_pooling.can_run(gradient):
        cpu_pooling.pool_backward(gradient, offsets, made, settings)
        return made
    indices = _indices(offsets, size, settings).flatten(2)
    given = torch.where(indices < 0, 0.0, gradient.float().flatten(2))
    added = torch.zeros(*size[:2], size[2] * size[3]).scatter_add_(2, indices.clamp(min=0), given)
    return made.copy_(added.view(list(size)))


def _results(x: Tensor, settings: cpu_pooling.Settings, ceil_mode: bool) -> tuple[Tensor, Tensor]:
    windows = (
        windows_along(x.shape[2 + dim], *(pair[dim] for pair in settings), ceil_mode=ceil_mode) for dim in (0, 1)
    )
    size = [*x.shape[:2], *windows]
    return _like(x, size, x.dtype), _like(x, size, torch.int8)


def _like(images: Tensor, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Room for images with their channels where those of others are."""
    last = images.stride(1) == 1 and not images.is_contiguous()
    order = (0, 2, 3, 1) if last else (0, 1, 2, 3)
    return arena.empty(size, order, dtype, images.device)


def _pixels(places: Sequence[int], size: Sequence[int], settings: cpu_pooling.Settings) -> tuple[Tensor, ...]:
    """For each window and element the index of its pixel, [rows, columns, elements], and whether there is one."""
    (rows, inside_rows), (columns, inside_columns) = (
        _along(places[dim], size[2 + dim], *(pair[dim] for pair in settings)) for dim in (0, 1)
    )
    index = rows[:, None, :, None] * size[3] + columns[None, :, None, :]
    inside = inside_rows[:, None, :, None] & inside_columns[None, :, None, :]
    return index.flatten(2), inside.flatten(2)


def _along(places: int, pixels: int, kernel: int, stride: int, padding: int, dilation: int) -> tuple[Tensor, Tensor]:
    at = torch.arange(places)[:, None] * stride - padding + torch.arange(kernel) * dilation
    return at, (at >= 0) & (at < pixels)


def _offsets(indices: Tensor, size: Sequence[int], settings: cpu_pooling.Settings) -> Tensor:
    """The element of each window that has an index; -1 where the window has no pixel."""
    index, inside = _pixels(indices.shape[2:], size, settings)
    same = (index == indices[..., None]) & inside
    return torch.where(inside.any(-1), same.int().argmax(-1), -1)


def _indices(offsets: Tensor, size: Sequence[int], settings: cpu_pooling.Settings) -> Tensor:
    """The way back: the index of the element that was taken; -1 for none."""
    index, _ = _pixels(offsets.shape[2:], size, settings)
    wide = offsets.long()
    found = index.expand(*wide.shape, -1).gather(-1, wide.clamp(min=0)[..., None]).squeeze(-1)
    return torch.where(wide < 0, -1, found)


def _fake_pool(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    return _results(x, arguments[:4], arguments[4])


def _fake_pool_backward(gradient: Tensor, offsets: Tensor, size: Sequence[int], *settings: Any) -> Tensor:
    return _like(offsets, size, gradient.dtype)


for _name, _function, _fake in (
    ("max_pool", max_pool, _fake_pool),
    ("max_pool_backward", max_pool_backward, _fake_pool_backward),
):
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"amp_compiler::{_name}", _fake, lib=_LIBRARY)
