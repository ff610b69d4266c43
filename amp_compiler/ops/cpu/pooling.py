"""Max-pooling and its backward as native loops (`cpu_pooling.cpp`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from amp_compiler.ops.cpu.build import library
from amp_compiler.ops.cpu.update import TYPES

Settings = tuple[Sequence[int], ...]  # kernel, stride, padding and dilation, each down and across


def can_run(tensor: Tensor) -> bool:
    """Whether the loops take it: images on a CPU, not empty, in a type of theirs, and the loops are compiled."""
    fits = tensor.device.type == "cpu" and tensor.dtype in TYPES and tensor.dim() == 4
    return fits and tensor.numel() > 0 and library() is not None


def pool(x: Tensor, largest: Tensor, offsets: Tensor, settings: Settings) -> None:
    """Write what `max_pool` returns.

    Args:
        x: as there.
        largest: [batch, channels, rows, columns] of any strides, for the largest pixels.
        offsets: INT8 in the same layout, for their places.
        settings: as there.
    """
    shape = (*x.shape, *largest.shape[2:], *_flat(settings))
    _call("amp_max_pool", shape, (x, largest), (x, largest, offsets))


def pool_backward(gradient: Tensor, offsets: Tensor, images: Tensor, settings: Settings) -> None:
    """Write what `max_pool_backward` returns.

    Args:
        gradient: as there.
        offsets: as there.
        images: room for it.
        settings: as there.
    """
    if offsets.stride(1) == 1 and gradient.stride(1) != 1:
        gradient = gradient.contiguous(memory_format=torch.channels_last)  # reading it across memory takes far longer
    shape = (*images.shape, *gradient.shape[2:], *_flat(settings))
    _call("amp_max_pool_backward", shape, (gradient, offsets, images), (gradient, offsets, images))


def _flat(settings: Settings) -> list[int]:
    return [number for pair in settings for number in pair]


def _call(name: str, shape: Sequence[int], laid_out: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    sizes = (ctypes.c_int64 * len(shape))(*shape)
    numbers = [step for tensor in laid_out for step in tensor.stride()]
    steps = (ctypes.c_int64 * len(numbers))(*numbers)
    given = (ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors)
    kind = ctypes.c_int64(TYPES[tensors[0].dtype])
    getattr(library(), name)(sizes, steps, kind, *given, torch.get_num_threads())
