"""Counts of binary exponents on a CUDA device, in one Triton kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amp_compiler.errors import LoweringError

_BLOCK = 4096
_ROUNDS = 8  # blocks of one program, which adds to the counts once
_BINS = 280  # as `ops.exponents.BINS`, which imports this module
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def _device_code() -> Any:
    try:
        from amp_compiler.ops.cuda import exponent_kernel
    except ImportError as cause:
        raise LoweringError(
            "the kernel that counts exponents needs Triton, which is not installed",
            mend="pip install triton (it comes with torch's CUDA builds), or profile on the CPU",
        ) from cause
    return exponent_kernel


def count(value: Tensor) -> Tensor:
    """The counts of a tensor, int64 [`BINS`]; see `ops.exponents.reference`."""
    if value.dtype not in _TYPES:
        value = value.to(torch.float32)
    dense = value if torch.ops.aten.is_non_overlapping_and_dense(value) else value.contiguous()
    flat = dense.as_strided((dense.numel(),), (1,))
    counts = torch.zeros(_BINS, dtype=torch.int64, device=value.device)
    programs = -(-flat.numel() // (_BLOCK * _ROUNDS))
    words = value.dtype == torch.bfloat16
    given = flat.view(torch.int16) if words else flat
    _device_code().count_kernel[(programs,)](
        given, counts, flat.numel(), WORDS=words, BINS=_BINS, BLOCK=_BLOCK, ROUNDS=_ROUNDS
    )
    return counts
