"""Cross-entropy of a chunk of logits on a CUDA device, and its gradient in their place, as one launch.

This module can be imported on every machine; Triton is imported at the first launch. CPU tensors run under Triton's
interpreter (environment variable `TRITON_INTERPRET=1`).
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

BLOCK = 4096
_OPTIONS = {"num_warps": 8}
_TYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}


@cache
def _kernel() -> Any:
    try:
        from amp_compiler.ops.cuda.cross_entropy_kernel import cross_entropy_kernel
    except ImportError:
        return None
    return cross_entropy_kernel


def takes(logits: Tensor) -> bool:
    """Whether the kernel runs on these logits; without Triton torch's operators do the same, in more launches."""
    return logits.device.type == "cuda" and logits.dtype in _TYPES and _kernel() is not None


def run(
    logits: Tensor, target: Tensor, factor: Tensor | None, losses: Tensor, low: torch.dtype, label_smoothing: float
) -> None:
    """Write the losses of rows and, with a factor for each, the gradient of their logits into these.

    Args:
        logits: [rows, classes]; behind each row there may be room, up to the next one.
        target: int64 [rows], a class each.
        factor: FP32 [rows], the gradient of each row's loss, or `None`.
        losses: FP32 [rows], written.
        low: the type that logits and their gradient are rounded to.
        label_smoothing: as for `torch.nn.functional.cross_entropy`.
    """
    import triton.language as tl

    rows, classes = logits.shape
    if not rows:
        return
    with torch.cuda.device(logits.device) if logits.device.type == "cuda" else nullcontext():
        _kernel()[(rows,)](
            logits,
            target,
            target if factor is None else factor,
            losses,
            classes,
            logits.stride(0) if rows > 1 else classes,
            1 - label_smoothing,
            label_smoothing / classes,
            LOW=getattr(tl, _TYPES[low]),
            GRADIENT=factor is not None,
            SMOOTH=label_smoothing != 0,
            BLOCK=BLOCK,
            **_OPTIONS,
        )
