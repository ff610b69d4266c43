"""The update operators on a CUDA device: each function launches Triton kernels over all tensors of a group.

This module can be imported on every machine; Triton is imported at the first launch. The functions have the signatures
of the operators; arguments are documented in `ops/update/reference.py`. They never wait for the device and can
be captured in a CUDA graph once they have run outside of one. On CPU tensors they run under Triton's interpreter
(environment variable `TRITON_INTERPRET=1`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from amp_compiler.errors import LoweringError
from amp_compiler.ops.cuda.pointer_tables import Group, TableCache
from amp_compiler.ops.layout import is_dense, laid_out_like
from amp_compiler.ops.update.formulas import AdamScalars
from amp_compiler.ops.update.rounding import Storage

Tensors = Sequence[Tensor]

BLOCK = 1024
CHECK_BLOCK = 4096
# 64 registers for 128 threads: eight programs fit on a multiprocessor. Without the bound ptxas aims at ten for some
# combinations of options and spills.
_UPDATE_OPTIONS = {"num_warps": 4, "maxnreg": 64, "enable_fp_fusion": False}
_CHECK_OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}
_TABLES = TableCache()


@cache
def _device_code() -> Any:
    try:
        from amp_compiler.ops.cuda import triton_kernels
    except ImportError as cause:
        raise LoweringError(
            "the update kernels need Triton, which is not installed",
            mend="pip install triton (it comes with torch's CUDA builds), or keep the training step on the CPU",
        ) from cause
    return triton_kernels


def _on(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cache
def _triton_type(dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return None
    import triton.language as tl

    known = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
    if dtype not in known:
        raise LoweringError(f"the update kernels have no element type {dtype}", mend="use fp16, bf16 or fp32")
    return known[dtype]


def _group_options(group: Group, mode: int) -> dict[str, Any]:
    """What a launch over one group is compiled for."""
    grad, weight, extra, first = (_triton_type(dtype) for dtype in group.types[:4])
    if len({*group.types[3:]} - {None}) > 1:
        raise LoweringError("the moments of one tensor are of several types", mend="keep all of them in one type")
    types = {"GRAD_TYPE": grad, "WEIGHT_TYPE": weight, "EXTRA_TYPE": extra, "MOMENT_TYPE": first}
    return {**types, "MODE": int(mode), "ALIGNED": group.aligned, "BLOCK": BLOCK, **_UPDATE_OPTIONS}


def grad_check(grads: Tensors, inv_scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.grad_check`. Sums are made per block of 4096 elements, then in a fixed order."""
    device, code = inv_scale.device, _device_code()
    with _on(device):
        norm = torch.empty((), dtype=torch.float32, device=device)
        nonfinite = torch.empty_like(norm)
        flags = torch.zeros(len(grads), dtype=torch.uint8, device=device)
        grads = [grad if is_dense(grad) else grad.contiguous() for grad in grads]
        groups = _TABLES.groups([grads], device, CHECK_BLOCK) if grads else []
        count = sum(len(group.blocks) for group in groups)
        partials = torch.empty(count, dtype=torch.float32, device=device)
        start = 0
        for group in groups:
            programs = len(group.blocks)
            if programs:
                code.check_kernel[(programs,)](
                    group.rows, group.blocks, inv_scale, partials[start:], flags,
                    GRAD_TYPE=_triton_type(group.types[0]), ALIGNED=group.aligned, BLOCK=CHECK_BLOCK, **_CHECK_OPTIONS,
                )  # fmt: skip
            start += programs
        code.check_finish_kernel[(1,)](
            partials, count, flags, len(grads), norm, nonfinite, BLOCK=1024, **_UPDATE_OPTIONS
        )  # fmt: skip
    return norm, nonfinite, flags


def adam_update(
    masters: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    max_exp_avg_sqs: Tensors,
    lows: Tensors,
    steps: Tensors,
    hyper: Tensor,
    coef: Tensor,
    skip: Tensor,
    amsgrad: bool,
    maximize: bool,
    decoupled: bool,
) -> None:
    """See `reference.adam_update`."""
    moments = (exp_avgs, exp_avg_sqs, max_exp_avg_sqs)
    options = {"AMSGRAD": amsgrad, "MAXIMIZE": maximize, "DECOUPLED": decoupled}
    _adam(masters, grads, moments, lows, steps, None, hyper, coef, skip, Storage.NEAREST, options)


def adam_update_low(
    weights: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    max_exp_avg_sqs: Tensors,
    compensations: Tensors,
    steps: Tensors,
    rng: Tensor,
    hyper: Tensor,
    coef: Tensor,
    skip: Tensor,
    mode: int,
    amsgrad: bool,
    maximize: bool,
    decoupled: bool,
) -> None:
    """See `reference.adam_update_low`."""
    moments = (exp_avgs, exp_avg_sqs, max_exp_avg_sqs)
    options = {"AMSGRAD": amsgrad, "MAXIMIZE": maximize, "DECOUPLED": decoupled}
    extras = compensations if mode == Storage.KAHAN else []
    _adam(weights, grads, moments, extras, steps, rng, hyper, coef, skip, mode, options)


def _adam(
    weights: Tensors,
    grads: Tensors,
    moments: tuple[Tensors, Tensors, Tensors],
    extras: Tensors,
    steps: Tensors,
    rng: Tensor | None,
    hyper: Tensor,
    coef: Tensor,
    skip: Tensor,
    mode: int,
    options: dict[str, bool],
) -> None:
    if not weights:
        return
    device, code = weights[0].device, _device_code()
    largest = moments[2] if options["AMSGRAD"] else []
    with _on(device):
        scalars = torch.empty(len(weights), len(AdamScalars._fields), dtype=torch.float32, device=device)
        for group in _TABLES.groups([steps], device, 1):
            if group.types != (torch.float32,):
                raise LoweringError("a step count is not fp32", mend="keep every step count as an fp32 tensor")
            code.adam_prepare_kernel[(-(-len(steps) // 128),)](
                group.rows, len(steps), hyper, skip, scalars, BLOCK=128, **_UPDATE_OPTIONS
            )
        columns = [laid_out_like(grads, weights), weights, extras, *moments[:2], largest]
        for group in _TABLES.groups(columns, device, BLOCK):
            if len(group.blocks):
                code.adam_kernel[(len(group.blocks),)](
                    group.rows, group.blocks, scalars, coef, skip, rng, **_group_options(group, mode), **options
                )
        _advance(None, rng, skip, mode)


def sgd_update(
    masters: Tensors,
    grads: Tensors,
    momentum_buffers: Tensors,
    lows: Tensors,
    started: Tensor,
    hyper: Tensor,
    coef: Tensor,
    skip: Tensor,
    nesterov: bool,
    maximize: bool,
) -> None:
    """See `reference.sgd_update`."""
    options = {"NESTEROV": nesterov, "MAXIMIZE": maximize}
    _sgd(masters, grads, momentum_buffers, lows, started, None, hyper, coef, skip, Storage.NEAREST, options)


def sgd_update_low(
    weights: Tensors,
    grads: Tensors,
    momentum_buffers: Tensors,
    compensations: Tensors,
    started: Tensor,
    rng: Tensor,
    hyper: Tensor,
    coef: Tensor,
    skip: Tensor,
    mode: int,
    nesterov: bool,
    maximize: bool,
) -> None:
    """See `reference.sgd_update_low`."""
    options = {"NESTEROV": nesterov, "MAXIMIZE": maximize}
    extras = compensations if mode == Storage.KAHAN else []
    _sgd(weights, grads, momentum_buffers, extras, started, rng, hyper, coef, skip, mode, options)


def _sgd(
    weights: Tensors,
    grads: Tensors,
    buffers: Tensors,
    extras: Tensors,
    started: Tensor,
    rng: Tensor | None,
    hyper: Tensor,
    coef: Tensor,
    skip: Tensor,
    mode: int,
    options: dict[str, bool],
) -> None:
    device, code = started.device, _device_code()
    with _on(device):
        columns = [laid_out_like(grads, weights), weights, extras, buffers]
        for group in _TABLES.groups(columns, device, BLOCK) if weights else []:
            if len(group.blocks):
                code.sgd_kernel[(len(group.blocks),)](
                    group.rows, group.blocks, hyper, coef, skip, started, rng, **_group_options(group, mode), **options
                )
        _advance(started, rng, skip, mode)


def _advance(started: Tensor | None, rng: Tensor | None, skip: Tensor, mode: int) -> None:
    has_rng = rng is not None and mode == Storage.STOCHASTIC
    if started is not None or has_rng:
        _device_code().advance_kernel[(1,)](
            started, rng, skip, HAS_STARTED=started is not None, HAS_RNG=has_rng, num_warps=1
        )
