"""Counts of binary exponents on a CUDA device, in one Triton kernel.

This module can be imported on every machine; Triton is imported at the first launch. CPU tensors run under Triton's
interpreter (environment variable `TRITON_INTERPRET=1`).
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

_BLOCK = 4096
_ROUNDS = 8  # blocks of one program, which adds to the counts once
_BINS = 280  # as `ops.exponents.BINS`, which imports this module
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@cache
def kernel() -> Any:
    """The kernel; `None` where there is no Triton."""
    try:
        from amp_compiler.ops.cuda.exponent_kernel import count_kernel
    except ImportError:
        return None
    return count_kernel


def takes(value: Tensor) -> bool:
    """Whether the kernel counts this tensor; without Triton torch's operators do the same, in more launches."""
    return value.device.type == "cuda" and value.numel() > 0 and kernel() is not None


def count(value: Tensor) -> Tensor:
    """The counts of a tensor that is not empty, int64 [`BINS`]; see `ops.exponents.reference`."""
    if value.dtype not in _TYPES:
        value = value.to(torch.float32)
    dense = value if torch.ops.aten.is_non_overlapping_and_dense(value) else value.contiguous()
    flat = dense.as_strided((dense.numel(),), (1,))
    counts = torch.zeros(_BINS, dtype=torch.int64, device=value.device)
    programs = -(-flat.numel() // (_BLOCK * _ROUNDS))
    words = value.dtype == torch.bfloat16
    given = flat.view(torch.int16) if words else flat
    with torch.cuda.device(value.device) if value.device.type == "cuda" else nullcontext():
        kernel()[(programs,)](given, counts, flat.numel(), WORDS=words, BINS=_BINS, BLOCK=_BLOCK, ROUNDS=_ROUNDS)
    return counts
