"""The Triton kernels behind the update operators; imported by `ops.cuda.update` only where they are needed.

Every kernel walks over many tensors in one launch. `rows` is an int64 table with one row per tensor: number of
elements, place in the group, then the addresses of its gradient, weight, extra (low copy or compensation), first moment
or momentum, second moment and its maximum. `blocks` says for every program which row (upper 32 bits) and which block
of it (lower 32 bits) it works on.

The arithmetic is that of `ops/update/`, operation for operation: `tl.fma` where that rounds once,
`div_rn` and `sqrt_rn` for division and square root. The compiler must not contract other products and sums, so every
launch passes `enable_fp_fusion=False`. Offsets inside a tensor are int64.
"""

# ruff: noqa: SIM108
# A conditional expression on a compile-time constant or on a runtime scalar would evaluate both sides.

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Parameters are values on the device, which have no Python types.

from __future__ import annotations

import triton
import triton.language as tl

from amp_compiler.ops.cuda.triton_parts import (
    COLUMNS,
    FIRST,
    GRAD,
    LARGEST,
    PLACE,
    SECOND,
    SIZE,
    add_l1,
    address,
    load_weight,
    read,
    saturated,
    store_weight,
    write,
)

ADAM_NUMBERS = tl.constexpr(9)  # per tensor, the fields of AdamNumbers


@triton.jit
def _adam_block(
    row, start, size, scalars, coef, rng, stale,
    GRAD_TYPE: tl.constexpr, WEIGHT_TYPE: tl.constexpr, MOMENT_TYPE: tl.constexpr, EXTRA_TYPE: tl.constexpr,
    MODE: tl.constexpr, TAKES: tl.constexpr, AMSGRAD: tl.constexpr, MAXIMIZE: tl.constexpr, DECOUPLED: tl.constexpr,
    ALIGNED: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offsets = tl.arange(0, BLOCK)
    inside = offsets < size - start
    first = address(row, FIRST, MOMENT_TYPE, start, ALIGNED)
    second = address(row, SECOND, MOMENT_TYPE, start, ALIGNED)
    grad = read(address(row, GRAD, GRAD_TYPE, start, ALIGNED), offsets, inside, FULL) * coef
    weight = load_weight(row, start, offsets, inside, stale, WEIGHT_TYPE, EXTRA_TYPE, MODE, TAKES, ALIGNED, FULL, BLOCK)
    m = read(first, offsets, inside, FULL)
    v = read(second, offsets, inside, FULL)
    scalars += tl.load(row + PLACE) * ADAM_NUMBERS
    shrink, l2, l1 = tl.load(scalars), tl.load(scalars + 1), tl.load(scalars + 2)
    weight1, beta2, weight2 = tl.load(scalars + 3), tl.load(scalars + 4), tl.load(scalars + 5)
    eps, root, neg_step = tl.load(scalars + 6), tl.load(scalars + 7), tl.load(scalars + 8)
    if MAXIMIZE:
        grad = -grad
    grad = add_l1(grad, weight, l1)
    if DECOUPLED:
        weight = weight * shrink
    else:
        grad = tl.where(l2 != 0.0, tl.fma(weight, l2, grad), grad)
    difference = grad - m
    m = tl.where(weight1 < 0.5, tl.fma(difference, weight1, m), tl.fma(difference, weight1 - 1.0, grad))
    v = tl.fma(grad * weight2, grad, v * beta2)
    write(first, offsets, saturated(m, MOMENT_TYPE), inside, FULL)
    write(second, offsets, saturated(v, MOMENT_TYPE), inside, FULL)
    if AMSGRAD:
        largest = address(row, LARGEST, MOMENT_TYPE, start, ALIGNED)
        v = tl.maximum(read(largest, offsets, inside, FULL), v, propagate_nan=tl.PropagateNan.ALL)
        write(largest, offsets, saturated(v, MOMENT_TYPE), inside, FULL)
    denominator = tl.div_rn(tl.sqrt_rn(v), root) + eps
    new = weight + tl.div_rn(m * neg_step, denominator)
    store_weight(
        row, start, offsets, inside, new, rng, stale, WEIGHT_TYPE, EXTRA_TYPE, MODE, TAKES, ALIGNED, FULL, BLOCK
    )


@triton.jit
def adam_kernel(
    rows, blocks, scalars, coef, skip, started, rng, stale,
    GRAD_TYPE: tl.constexpr, WEIGHT_TYPE: tl.constexpr, MOMENT_TYPE: tl.constexpr, EXTRA_TYPE: tl.constexpr,
    MODE: tl.constexpr, TAKES: tl.constexpr, AMSGRAD: tl.constexpr, MAXIMIZE: tl.constexpr, DECOUPLED: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One Adam step over all tensors of the table."""
    if tl.load(skip) == 0.0:
        work = tl.load(blocks + tl.program_id(0))
        row = rows + (work >> 32) * COLUMNS
        start = (work & 0xFFFFFFFF) * BLOCK
        size = tl.load(row + SIZE)
        if size - start >= BLOCK:
            _adam_block(
                row, start, size, scalars, tl.load(coef), rng, stale, GRAD_TYPE, WEIGHT_TYPE, MOMENT_TYPE, EXTRA_TYPE,
                MODE, TAKES, AMSGRAD, MAXIMIZE, DECOUPLED, ALIGNED, True, BLOCK,
            )  # fmt: skip
        else:
            _adam_block(
                row, start, size, scalars, tl.load(coef), rng, stale, GRAD_TYPE, WEIGHT_TYPE, MOMENT_TYPE, EXTRA_TYPE,
                MODE, TAKES, AMSGRAD, MAXIMIZE, DECOUPLED, ALIGNED, False, BLOCK,
            )  # fmt: skip


@triton.jit
def _sgd_block(
    row, start, size, hyper, coef, started, rng, stale,
    GRAD_TYPE: tl.constexpr, WEIGHT_TYPE: tl.constexpr, MOMENT_TYPE: tl.constexpr, EXTRA_TYPE: tl.constexpr,
    MODE: tl.constexpr, TAKES: tl.constexpr, NESTEROV: tl.constexpr, MAXIMIZE: tl.constexpr,
    ALIGNED: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offsets = tl.arange(0, BLOCK)
    inside = offsets < size - start
    grad = read(address(row, GRAD, GRAD_TYPE, start, ALIGNED), offsets, inside, FULL) * coef
    weight = load_weight(row, start, offsets, inside, stale, WEIGHT_TYPE, EXTRA_TYPE, MODE, TAKES, ALIGNED, FULL, BLOCK)
    neg_lr = (-tl.load(hyper)).to(tl.float32)
    momentum = tl.load(hyper + 1).to(tl.float32)
    keep = (1.0 - tl.load(hyper + 2)).to(tl.float32)
    l2 = tl.load(hyper + 3).to(tl.float32)
    if MAXIMIZE:
        grad = -grad
    grad = add_l1(grad, weight, tl.load(hyper + 4).to(tl.float32))
    grad = tl.where(l2 != 0.0, tl.fma(weight, l2, grad), grad)
    if MOMENT_TYPE is not None:
        first = address(row, FIRST, MOMENT_TYPE, start, ALIGNED)
        decayed = tl.fma(grad, keep, read(first, offsets, inside, FULL) * momentum)
        buffer = saturated(tl.where(tl.load(started) != 0.0, decayed, grad), MOMENT_TYPE).to(MOMENT_TYPE)
        write(first, offsets, buffer, inside, FULL)
        if NESTEROV:
            grad = tl.fma(buffer.to(tl.float32), momentum, grad)
        else:
            grad = buffer.to(tl.float32)
    new = tl.fma(grad, neg_lr, weight)
    store_weight(
        row, start, offsets, inside, new, rng, stale, WEIGHT_TYPE, EXTRA_TYPE, MODE, TAKES, ALIGNED, FULL, BLOCK
    )


@triton.jit
def sgd_kernel(
    rows, blocks, hyper, coef, skip, started, rng, stale,
    GRAD_TYPE: tl.constexpr, WEIGHT_TYPE: tl.constexpr, MOMENT_TYPE: tl.constexpr, EXTRA_TYPE: tl.constexpr,
    MODE: tl.constexpr, TAKES: tl.constexpr, NESTEROV: tl.constexpr, MAXIMIZE: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One SGD step over all tensors of the table."""
    if tl.load(skip) == 0.0:
        work = tl.load(blocks + tl.program_id(0))
        row = rows + (work >> 32) * COLUMNS
        start = (work & 0xFFFFFFFF) * BLOCK
        size = tl.load(row + SIZE)
        if size - start >= BLOCK:
            _sgd_block(
                row, start, size, hyper, tl.load(coef), started, rng, stale, GRAD_TYPE, WEIGHT_TYPE, MOMENT_TYPE,
                EXTRA_TYPE, MODE, TAKES, NESTEROV, MAXIMIZE, ALIGNED, True, BLOCK,
            )  # fmt: skip
        else:
            _sgd_block(
                row, start, size, hyper, tl.load(coef), started, rng, stale, GRAD_TYPE, WEIGHT_TYPE, MOMENT_TYPE,
                EXTRA_TYPE, MODE, TAKES, NESTEROV, MAXIMIZE, ALIGNED, False, BLOCK,
            )  # fmt: skip


@triton.jit
def check_kernel(
    rows, blocks, inv_scale, partials, bad_places,
    GRAD_TYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum of squares of one block of unscaled gradients, and where an element is not finite the tensor's place + 1."""
    work = tl.load(blocks + tl.program_id(0))
    row = rows + (work >> 32) * COLUMNS
    start = (work & 0xFFFFFFFF) * BLOCK
    size = tl.load(row + SIZE)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < size - start
    pointer = address(row, GRAD, GRAD_TYPE, start, ALIGNED)
    if size - start >= BLOCK:
        grad = read(pointer, offsets, inside, True)
    else:
        grad = read(pointer, offsets, inside, False)
    unscaled = grad * tl.load(inv_scale)
    tl.store(partials + tl.program_id(0), tl.sum(unscaled * unscaled, axis=0))
    # A comparison with NaN is false, so one test finds infinities and NaN.
    bad = tl.max((tl.abs(grad) < float("inf")).to(tl.int32) ^ 1, axis=0)
    tl.store(bad_places + tl.program_id(0), bad * (tl.load(row + PLACE) + 1).to(tl.int32))
