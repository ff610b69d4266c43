"""Unfolding BF16 images into patches and folding gradients back, as native loops (`patches.cpp`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from amp_compiler.ops.cpu.build import library


def can_run(tensor: Tensor) -> bool:
    """Whether the loops take it: BF16 on a CPU, not empty, and the loops are compiled."""
    fits = tensor.dtype == torch.bfloat16 and tensor.device.type == "cpu" and tensor.numel() > 0
    return fits and library() is not None


def unfold(x: Tensor, places: tuple[int, int], *settings: Sequence[int]) -> Tensor:
    """As `patches`.

    Args:
        x: as there, of any strides.
        places: rows and columns of patches in an image.
        settings: kernel, stride, padding and dilation.
    """
    elements = x.shape[1] * settings[0][0] * settings[0][1]
    rows = x.new_empty(x.shape[0] * places[0] * places[1], elements)
    _call("amp_unfold", x, rows, places, settings)
    return rows


def fold(gradient: Tensor, size: Sequence[int], places: tuple[int, int], *settings: Sequence[int]) -> Tensor:
    """As `fold_patches`.

    Args:
        gradient: as there, contiguous.
        size: as there.
        places: as in `unfold`.
        settings: as in `unfold`.
    """
    images = torch.empty_permuted(list(size), (0, 2, 3, 1), dtype=gradient.dtype, device=gradient.device)
    _call("amp_fold", images, gradient, places, settings)
    return images


def _call(name: str, images: Tensor, rows: Tensor, places: tuple[int, int], settings: Sequence[Sequence[int]]) -> None:
    numbers = [*images.shape, *images.stride(), *places, *(number for pair in settings for number in pair)]
    shape = (ctypes.c_int64 * len(numbers))(*numbers)
    addresses = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (images, rows))
    getattr(library(), name)(shape, *addresses, torch.get_num_threads())
