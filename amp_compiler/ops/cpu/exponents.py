"""Counts of binary exponents on a CPU as native loops (`exponents.cpp`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from amp_compiler.ops.cpu.build import library

_CODES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}  # of the types, in C++


def can_run(value: Tensor) -> bool:
    """Whether the loops take it: FP32 or a 16-bit type on a CPU, and the loops are compiled."""
    return value.device.type == "cpu" and value.dtype in _CODES and library() is not None


def count(values: Sequence[Tensor], counts: Tensor) -> None:
    """Add the counts of tensors.

    Args:
        values: of any shapes.
        counts: int64 [number of values, `BINS`], contiguous; added to.
    """
    dense = [one if torch.ops.aten.is_non_overlapping_and_dense(one) else one.contiguous() for one in values]
    rows = [number for one in dense for number in (one.data_ptr(), _CODES[one.dtype], one.numel())]
    library().amp_count_exponents(  # type: ignore[union-attr]
        (ctypes.c_int64 * len(rows))(*rows),
        ctypes.c_int64(len(dense)),
        ctypes.c_void_p(counts.data_ptr()),
        torch.get_num_threads(),
    )


def count_update(before: Tensor, after: Tensor, counts: Tensor, found: Tensor) -> None:
    """Add the counts of an update; see `ops.exponents.count_update`.

    Args:
        before: FP32, contiguous.
        after: the same.
        counts: int64 [`BINS`]; added to.
        found: int64 [3]; added to.
    """
    pointers = (ctypes.c_void_p(one.data_ptr()) for one in (before, after))
    library().amp_count_update(  # type: ignore[union-attr]
        *pointers,
        ctypes.c_int64(before.numel()),
        ctypes.c_void_p(counts.data_ptr()),
        ctypes.c_void_p(found.data_ptr()),
        torch.get_num_threads(),
    )


def copy(target: Tensor, source: Tensor) -> None:
    """Copy what is read late, past the caches.

    Args:
        target: of the type and the strides of the source.
        source: on a CPU, dense.
    """
    library().amp_copy_past_caches(  # type: ignore[union-attr]
        *(ctypes.c_void_p(one.data_ptr()) for one in (target, source)), ctypes.c_int64(source.nbytes)
    )
