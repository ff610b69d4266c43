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
from typing import Any

import torch
from torch import Tensor

from amp_compiler.errors import LoweringError
from amp_compiler.ops.cuda.pointer_tables import Group, TableCache
from amp_compiler.ops.layout import is_dense, laid_out_like
from amp_compiler.ops.update.fused import FusedOptimizer, Tensors, Update
from amp_compiler.ops.update.rounding import Storage

BLOCK = 1024
CHECK_BLOCK = 4096
# Without a bound ptxas aims at ten programs of 128 threads on a multiprocessor for some combinations of options, and
# spills. 64 registers let eight run, and 56, with which most updates do, nine: with Kahan's errors not with every
# compiler.
_OPTIONS = {"num_warps": 4, "maxnreg": 64, "enable_fp_fusion": False}
_UPDATE_OPTIONS = {**_OPTIONS, "maxnreg": 56}
_CHECK_OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}
TABLES = TableCache()
_WORDS = {1: torch.int8, 2: torch.int16}


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
    return {**types, "MODE": int(mode), "ALIGNED": group.aligned, "BLOCK": BLOCK, **update_options(mode)}


def update_options(mode: int) -> dict[str, Any]:
    """How an update is compiled, by how weights are stored."""
    return _OPTIONS if mode == Storage.KAHAN else _UPDATE_OPTIONS


def grad_check(grads: Tensors, inv_scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.grad_check`. Sums are made per block of 4096 elements, then in a fixed order."""
    device, code = inv_scale.device, _device_code()
    with _on(device):
        dense = [grad if is_dense(grad) else grad.contiguous() for grad in grads]
        groups = TABLES.groups([dense], device, CHECK_BLOCK) if dense else []
        norm = torch.empty((), dtype=torch.float32, device=device)
        nonfinite = torch.empty_like(norm)
        flags = torch.empty(len(grads), dtype=torch.uint8, device=device)
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
        code.check_finish_kernel[(1,)](
            partials, bad_places, blocks, flags, len(grads), norm, nonfinite, **finish_options(blocks)
        )
    return norm, nonfinite, flags


def gather_check(
    sums: Tensors, grads: Tensors, inv_scale: Tensor, last: bool
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """See `reference.gather_check`: added by torch, then checked in one launch."""
    totals = [torch.empty_like(one) for one in sums] if last else []
    if grads:
        torch._foreach_add_(list(sums), list(grads))
    found = grad_check(sums, inv_scale)
    if totals:
        torch._foreach_copy_(totals, list(sums))
        torch._foreach_zero_(list(sums))
    return *found, totals


def finish_options(count: int) -> dict[str, Any]:
    """How many threads add up the results of `count` blocks: one program, as wide as they fill, up to 1024 threads.

    85,000 blocks (350 million elements) are 11 rounds of eight numbers a thread; 128 threads would make 83.
    """
    block = min(max(1 << max(count - 1, 0).bit_length(), 1024), 8192)
    return {"BLOCK": block, **_OPTIONS, "num_warps": block // 256}


def commit(skip: Tensor, targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """See `operators.commit`: in one launch for all targets of 4 or 8 bytes an element."""
    device, code = skip.device, _device_code()
    with _on(device):
        loose = [place for place, target in enumerate(targets) if not is_dense(target)]
        for place in loose:  # a kernel walks over memory, and here it has gaps
            targets[place].copy_(torch.where(skip != 0, targets[place], values[place]))
        pairs = [(t, v.to(t.dtype)) for t, v in zip(targets, values, strict=True) if is_dense(t)]
        written = [target for target, _ in pairs]
        given = laid_out_like([value for _, value in pairs], written)
        columns = [list(map(_words, given)), list(map(_words, written))]
        for group in TABLES.groups(columns, device, BLOCK) if pairs else []:
            if len(group.blocks):
                code.commit_kernel[(len(group.blocks),)](
                    group.rows, group.blocks, skip,
                    TYPE=_word_type(group.types[0]), ALIGNED=group.aligned, BLOCK=BLOCK, **_OPTIONS,
                )  # fmt: skip


def _words(tensor: Tensor) -> Tensor:
    """A dense tensor's memory as whole numbers of 4 bytes, or of 2 or 1 where its elements are that small."""
    words = _WORDS.get(tensor.element_size(), torch.int32)
    return tensor.as_strided((tensor.numel(),), (1,)).view(words)


@cache
def _word_type(dtype: torch.dtype | None) -> Any:
    import triton.language as tl

    return {torch.int8: tl.int8, torch.int16: tl.int16, torch.int32: tl.int32}[dtype]  # type: ignore[index]


def update(optimizer: FusedOptimizer, given: Update) -> None:
    """See `reference.update`."""
    device, code = given.skip.device, _device_code()
    with _on(device):
        if given.weights:
            kernel = getattr(code, f"{optimizer.name}_kernel")
            numbers = _prepared(optimizer, given, device)
            options = {flag.upper(): value for flag, value in given.flags.items()}
            columns = [laid_out_like(given.grads, given.weights), given.weights, _extras(given), *given.states]
            for group in TABLES.groups(columns, device, BLOCK):
                if len(group.blocks):
                    kernel[(len(group.blocks),)](
                        group.rows, group.blocks, numbers, given.coef, given.skip, given.started, given.rng,
                        **_group_options(group, given.mode), **options,
                    )  # fmt: skip
        _advance(given)


def _extras(given: Update) -> Tensors:
    """What is written beside a weight: the copy of a master, or the rounding error of a weight without one."""
    return given.lows or (given.compensations if given.mode == Storage.KAHAN else [])


def _prepared(optimizer: FusedOptimizer, given: Update, device: torch.device) -> Tensor:
    """The numbers of every tensor's step; the hyperparameters themselves where no steps are counted."""
    if not optimizer.counts:
        return given.hyper
    numbers = torch.empty(len(given.weights), len(optimizer.numbers._fields), dtype=torch.float32, device=device)
    prepare = getattr(_device_code(), f"{optimizer.name}_prepare_kernel")
    for group in TABLES.groups([given.steps], device, 1):
        if group.types != (torch.float32,):
            raise LoweringError("a step count is not fp32", hint="keep every step count as an fp32 tensor")
        prepare[(-(-len(given.steps) // 128),)](
            group.rows, len(given.steps), given.hyper, given.skip, numbers, BLOCK=128, **_OPTIONS
        )
    return numbers


def _advance(given: Update) -> None:
    has_rng = given.rng is not None and given.mode == Storage.STOCHASTIC
    if given.started is not None or has_rng:
        _device_code().advance_kernel[(1,)](
            given.started, given.rng, given.skip, HAS_STARTED=given.started is not None, HAS_RNG=has_rng, num_warps=1
        )
