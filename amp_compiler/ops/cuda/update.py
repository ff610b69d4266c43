"""The update operators on a CUDA device: each function launches Triton kernels over all tensors of a group.

This module can be imported on every machine; Triton is imported at the first launch. They give what the functions of
the same names in `ops/update/reference.py` give. They never wait for the device and can
be captured in a CUDA graph once they have run outside of one. On CPU tensors they run under Triton's interpreter
(environment variable `TRITON_INTERPRET=1`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from amp_compiler.errors import LoweringError
from amp_compiler.ops.cuda.pointer_tables import Group, TableCache
from amp_compiler.ops.layout import is_dense, laid_out_like
from amp_compiler.ops.update.fused import FusedOptimizer, Tensors, Update
from amp_compiler.ops.update.reference import advance, step_numbers
from amp_compiler.ops.update.rounding import Storage

BLOCK = 1024
CHECK_BLOCK = 4096
# Without a bound ptxas aims at ten programs of 128 threads on a multiprocessor for some combinations of options, and
# spills. 64 registers let eight run.
_OPTIONS = {"num_warps": 4, "maxnreg": 64, "enable_fp_fusion": False}
_WATCHING = {**_OPTIONS, "num_warps": 8}  # four warps that sum bits too spill
_CHECK_OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}
TABLES = TableCache()


@cache
def _device_code() -> Any:
    try:
        from amp_compiler.ops.cuda import triton_kernels
    except ImportError as cause:
        raise LoweringError(
            "the update kernels need Triton, which is not installed",
            hint="pip install triton (it comes with torch's CUDA builds), or keep the training step on the CPU",
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
        raise LoweringError(f"the update kernels have no element type {dtype}", hint="use fp16, bf16 or fp32")
    return known[dtype]


def _group_options(group: Group, mode: int) -> dict[str, Any]:
    """What a launch over one group is compiled for."""
    grad, weight, extra, first = (_triton_type(dtype) for dtype in group.types[:4])
    if len({*group.types[3:]} - {None}) > 1:
        raise LoweringError("the moments of one tensor are of several types", hint="keep all of them in one type")
    types = {"GRAD_TYPE": grad, "WEIGHT_TYPE": weight, "EXTRA_TYPE": extra, "MOMENT_TYPE": first}
    return {**types, "MODE": int(mode), "ALIGNED": group.aligned, "BLOCK": BLOCK}


def grad_check(grads: Tensors, inv_scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.grad_check`. Sums are made per block of 4096 elements, then in a fixed order."""
    device, code = inv_scale.device, _device_code()
    with _on(device):
        dense = [grad if is_dense(grad) else grad.contiguous() for grad in grads]
        groups = TABLES.groups([dense], device, CHECK_BLOCK) if dense else []
        blocks = sum(len(group.blocks) for group in groups)
        partials = torch.empty(blocks, dtype=torch.float32, device=device)
        bad_places = torch.empty(blocks, dtype=torch.int32, device=device)
        start = 0
        for group in groups:
            programs = len(group.blocks)
            if programs:
                code.check_kernel[(programs,)](
                    group.rows, group.blocks, inv_scale, partials[start:], bad_places[start:],
                    GRAD_TYPE=_triton_type(group.types[0]), ALIGNED=group.aligned, BLOCK=CHECK_BLOCK, **_CHECK_OPTIONS,
                )  # fmt: skip
            start += programs
        flags = torch.zeros(len(grads) + 1, dtype=torch.uint8, device=device).index_fill_(0, bad_places.long(), 1)[1:]
    return partials.sum().sqrt(), flags.any().float(), flags


def new_stale(sizes: Sequence[int], device: torch.device) -> Tensor:
    """What `Update.stale` is before the first update, on the host: on a GPU int64, else flags.

    For these kernels it is of each tensor a flag and where its sums begin; then the sums.

    Of each block of masters the sum of the bits that an update wrote is kept, and is zero where others may have written
    them since. The next update compares it with the sum of what it reads, for which it reads nothing more.

    Args:
        sizes: elements of each master; 0 of one that takes what its copy has, which is read and compared.
        device: where the update runs.
    """
    if device.type != "cuda":
        return torch.zeros(len(sizes), dtype=torch.uint8)
    places = [*accumulate((-(-size // BLOCK) for size in sizes), initial=2 * len(sizes))]
    table = torch.zeros(places[-1], dtype=torch.int64)
    table[1 : 2 * len(sizes) : 2] = torch.tensor(places[:-1])
    return table


def update(optimizer: FusedOptimizer, args: Update) -> None:
    """See `reference.update`."""
    device, code = args.skip.device, _device_code()
    if any(one.dtype != torch.float32 for one in args.steps):
        raise LoweringError("a step count is not fp32", hint="keep every step count as an fp32 tensor")
    with _on(device):
        if args.weights:
            kernel = getattr(code, f"{optimizer.name}_kernel")
            # The kernels of an optimizer that counts no steps make its numbers themselves.
            numbers = step_numbers(optimizer, args.steps, args.hyper) if optimizer.counts else args.hyper
            options: dict[str, Any] = {flag.upper(): value for flag, value in args.flags.items()}
            options |= _OPTIONS if args.stale is None else _WATCHING
            # Beside a weight stands the copy of a master, or the rounding error of a weight without one.
            beside = args.low_weights or (args.compensations if args.mode == Storage.KAHAN else [])
            columns = [laid_out_like(args.grads, args.weights), args.weights, beside, *args.states]
            for group in TABLES.groups(columns, device, BLOCK):
                if len(group.blocks):
                    kernel[(len(group.blocks),)](
                        group.rows, group.blocks, numbers, args.coef, args.skip, args.started, args.rng,
                        args.stale, TAKES=args.takes, **_group_options(group, args.mode), **options,
                    )  # fmt: skip
        if args.steps:
            one = (args.skip == 0).float()
            torch._foreach_add_(list(args.steps), [one] * len(args.steps))  # a lone tensor would be read by the host
        advance(args)
