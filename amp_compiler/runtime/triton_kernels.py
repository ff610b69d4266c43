"""The Triton kernels behind the update operators; imported by `kernels` only where they are needed.

Every kernel walks over many tensors in one launch. `rows` is an int64 table with one row per tensor: number of
elements, place in the group, then the addresses of its gradient, weight, extra (low copy or compensation), first moment
or momentum, second moment and its maximum. `blocks` says for every program which row (upper 32 bits) and which block of
it (lower 32 bits) it works on.

The arithmetic is that of `update_math`, operation for operation: `tl.fma` where that rounds once, `div_rn` and
`sqrt_rn` for division and square root. The compiler must not contract other products and sums, so every launch passes
`enable_fp_fusion=False`. Offsets inside a tensor are int64.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Each device function sees these as compile-time constants.
COLUMNS = tl.constexpr(8)
SIZE, PLACE, GRAD, WEIGHT, EXTRA, FIRST, SECOND, LARGEST = (tl.constexpr(i) for i in range(8))
STOCHASTIC = tl.constexpr(1)
KAHAN = tl.constexpr(2)
SCALARS = tl.constexpr(8)


@triton.jit
def _address(row, COLUMN: tl.constexpr, TYPE: tl.constexpr, start, ALIGNED: tl.constexpr):
    """Pointer to the first element of this block; with `ALIGNED` the compiler may load 16 bytes at a time."""
    pointer = tl.load(row + COLUMN).to(tl.pointer_type(TYPE)) + start
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _read(pointer, offsets, inside, FULL: tl.constexpr):
    if FULL:
        value = tl.load(pointer + offsets)
    else:
        value = tl.load(pointer + offsets, mask=inside, other=0.0)
    return value.to(tl.float32)


@triton.jit
def _write(pointer, offsets, value, inside, FULL: tl.constexpr):
    value = value.to(pointer.dtype.element_ty)
    if FULL:
        tl.store(pointer + offsets, value)
    else:
        tl.store(pointer + offsets, value, mask=inside)


@triton.jit
def _random_words(rng, place, start, BLOCK: tl.constexpr):
    """uint32 [BLOCK]: element `e` of the tensor takes word `e % 4` of counter `(e // 4, place, update number)`."""
    group = (start // 4) + tl.arange(0, BLOCK // 4)
    low = (group & 0xFFFFFFFF).to(tl.uint32)
    high = (group >> 32).to(tl.uint32)
    zero = low * 0
    third = zero + place.to(tl.uint32)
    fourth = zero + (tl.load(rng + 1) & 0xFFFFFFFF).to(tl.uint32)
    r0, r1, r2, r3 = tl.philox(tl.load(rng), low, high, third, fourth)
    return tl.reshape(tl.join(tl.join(r0, r2), tl.join(r1, r3)), [BLOCK])


@triton.jit
def _round_stochastically(value, words, TYPE: tl.constexpr):
    DROPPED: tl.constexpr = 16 if TYPE == tl.bfloat16 else 13
    MASK: tl.constexpr = (1 << DROPPED) - 1
    bits = value.to(tl.uint32, bitcast=True)
    result = ((bits + (words & MASK)) & (0xFFFFFFFF - MASK)).to(tl.float32, bitcast=True).to(TYPE)
    magnitude = tl.abs(value)
    if TYPE == tl.float16:
        units = magnitude * 16777216.0
        whole = tl.floor(units)
        chance = (words >> 8).to(tl.float32) * (1.0 / 16777216.0)
        small = (whole + (chance < units - whole).to(tl.float32)) * (1.0 / 16777216.0)
        sign = bits & 0x80000000
        small = (small.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)
        result = tl.where(magnitude < 0.00006103515625, small.to(TYPE), result)
    return tl.where(magnitude < float("inf"), result, value.to(TYPE))


@triton.jit
def _store_weight(
    row, start, offsets, inside, new, rng,
    WEIGHT_TYPE: tl.constexpr, EXTRA_TYPE: tl.constexpr, MODE: tl.constexpr,
    ALIGNED: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the new weight as `MODE` says; the extra tensor is given the rounding error, or a low copy."""
    weight = _address(row, WEIGHT, WEIGHT_TYPE, start, ALIGNED)
    if MODE == STOCHASTIC:
        words = _random_words(rng, tl.load(row + PLACE), start, BLOCK)
        _write(weight, offsets, _round_stochastically(new, words, WEIGHT_TYPE), inside, FULL)
    else:
        stored = new.to(WEIGHT_TYPE)
        _write(weight, offsets, stored, inside, FULL)
        if EXTRA_TYPE is not None:
            extra = _address(row, EXTRA, EXTRA_TYPE, start, ALIGNED)
            if MODE == KAHAN:
                _write(extra, offsets, new - stored.to(tl.float32), inside, FULL)
            else:
                _write(extra, offsets, new, inside, FULL)


@triton.jit
def _load_weight(
    row, start, offsets, inside,
    WEIGHT_TYPE: tl.constexpr, MODE: tl.constexpr, ALIGNED: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    weight = _read(_address(row, WEIGHT, WEIGHT_TYPE, start, ALIGNED), offsets, inside, FULL)
    if MODE == KAHAN:
        weight += _read(_address(row, EXTRA, WEIGHT_TYPE, start, ALIGNED), offsets, inside, FULL)
    return weight


@triton.jit
def _adam_block(
    row, start, size, scalars, coef, rng,
    GRAD_TYPE: tl.constexpr, WEIGHT_TYPE: tl.constexpr, MOMENT_TYPE: tl.constexpr, EXTRA_TYPE: tl.constexpr,
    MODE: tl.constexpr, AMSGRAD: tl.constexpr, MAXIMIZE: tl.constexpr, DECOUPLED: tl.constexpr,
    ALIGNED: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offsets = tl.arange(0, BLOCK)
    inside = offsets < size - start
    first = _address(row, FIRST, MOMENT_TYPE, start, ALIGNED)
    second = _address(row, SECOND, MOMENT_TYPE, start, ALIGNED)
    grad = _read(_address(row, GRAD, GRAD_TYPE, start, ALIGNED), offsets, inside, FULL) * coef
    weight = _load_weight(row, start, offsets, inside, WEIGHT_TYPE, MODE, ALIGNED, FULL)
    m = _read(first, offsets, inside, FULL)
    v = _read(second, offsets, inside, FULL)
    scalars += tl.load(row + PLACE) * SCALARS
    shrink, l2, weight1, beta2 = tl.load(scalars), tl.load(scalars + 1), tl.load(scalars + 2), tl.load(scalars + 3)
    weight2, eps, root, neg_step = tl.load(scalars + 4), tl.load(scalars + 5), tl.load(scalars + 6), tl.load(scalars + 7)
    if MAXIMIZE:
        grad = -grad
    if DECOUPLED:
        weight = weight * shrink
    else:
        grad = tl.where(l2 != 0.0, tl.fma(weight, l2, grad), grad)
    difference = grad - m
    m = tl.where(weight1 < 0.5, tl.fma(difference, weight1, m), tl.fma(difference, weight1 - 1.0, grad))
    v = tl.fma(grad * weight2, grad, v * beta2)
    _write(first, offsets, m, inside, FULL)
    _write(second, offsets, v, inside, FULL)
    if AMSGRAD:
        largest = _address(row, LARGEST, MOMENT_TYPE, start, ALIGNED)
        v = tl.maximum(_read(largest, offsets, inside, FULL), v, propagate_nan=tl.PropagateNan.ALL)
        _write(largest, offsets, v, inside, FULL)
    denominator = tl.div_rn(tl.sqrt_rn(v), root) + eps
    new = weight + tl.div_rn(m * neg_step, denominator)
    _store_weight(row, start, offsets, inside, new, rng, WEIGHT_TYPE, EXTRA_TYPE, MODE, ALIGNED, FULL, BLOCK)


@triton.jit
def adam_kernel(
    rows, blocks, scalars, coef, skip, rng,
    GRAD_TYPE: tl.constexpr, WEIGHT_TYPE: tl.constexpr, MOMENT_TYPE: tl.constexpr, EXTRA_TYPE: tl.constexpr,
    MODE: tl.constexpr, AMSGRAD: tl.constexpr, MAXIMIZE: tl.constexpr, DECOUPLED: tl.constexpr,
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
                row, start, size, scalars, tl.load(coef), rng, GRAD_TYPE, WEIGHT_TYPE, MOMENT_TYPE, EXTRA_TYPE,
                MODE, AMSGRAD, MAXIMIZE, DECOUPLED, ALIGNED, True, BLOCK,
            )  # fmt: skip
        else:
            _adam_block(
                row, start, size, scalars, tl.load(coef), rng, GRAD_TYPE, WEIGHT_TYPE, MOMENT_TYPE, EXTRA_TYPE,
                MODE, AMSGRAD, MAXIMIZE, DECOUPLED, ALIGNED, False, BLOCK,
            )  # fmt: skip


@triton.jit
def adam_prepare_kernel(steps, count, hyper, skip, scalars, DECOUPLED: tl.constexpr, BLOCK: tl.constexpr):
    """Raise every step count and write the 8 numbers of its tensor's step (`AdamScalars`), in fp64 until stored."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    if tl.load(skip) == 0.0:
        pointers = tl.load(steps + index, mask=inside, other=0).to(tl.pointer_type(tl.float32))
        raised = tl.load(pointers, mask=inside, other=0.0) + 1.0
        tl.store(pointers, raised, mask=inside)
        step = raised.to(tl.float64)
        lr, beta1, beta2 = tl.load(hyper), tl.load(hyper + 1), tl.load(hyper + 2)
        eps, decay = tl.load(hyper + 3), tl.load(hyper + 4)
        correction1 = 1.0 - tl.exp(step * tl.log(beta1))
        correction2 = 1.0 - tl.exp(step * tl.log(beta2))
        out = scalars + index * SCALARS
        same = step * 0.0
        tl.store(out, (same + (1.0 - lr * decay)).to(tl.float32), mask=inside)
        tl.store(out + 1, (same + decay).to(tl.float32), mask=inside)
        tl.store(out + 2, (same + (1.0 - beta1)).to(tl.float32), mask=inside)
        tl.store(out + 3, (same + beta2).to(tl.float32), mask=inside)
        tl.store(out + 4, (same + (1.0 - beta2)).to(tl.float32), mask=inside)
        tl.store(out + 5, (same + eps).to(tl.float32), mask=inside)
        tl.store(out + 6, tl.sqrt(correction2).to(tl.float32), mask=inside)
        tl.store(out + 7, (-lr / correction1).to(tl.float32), mask=inside)


@triton.jit
def _sgd_block(
    row, start, size, hyper, coef, started, rng,
    GRAD_TYPE: tl.constexpr, WEIGHT_TYPE: tl.constexpr, MOMENT_TYPE: tl.constexpr, EXTRA_TYPE: tl.constexpr,
    MODE: tl.constexpr, NESTEROV: tl.constexpr, MAXIMIZE: tl.constexpr,
    ALIGNED: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offsets = tl.arange(0, BLOCK)
    inside = offsets < size - start
    grad = _read(_address(row, GRAD, GRAD_TYPE, start, ALIGNED), offsets, inside, FULL) * coef
    weight = _load_weight(row, start, offsets, inside, WEIGHT_TYPE, MODE, ALIGNED, FULL)
    neg_lr = (-tl.load(hyper)).to(tl.float32)
    momentum = tl.load(hyper + 1).to(tl.float32)
    keep = (1.0 - tl.load(hyper + 2)).to(tl.float32)
    l2 = tl.load(hyper + 3).to(tl.float32)
    if MAXIMIZE:
        grad = -grad
    grad = tl.where(l2 != 0.0, tl.fma(weight, l2, grad), grad)
    if MOMENT_TYPE is not None:
        first = _address(row, FIRST, MOMENT_TYPE, start, ALIGNED)
        decayed = tl.fma(grad, keep, _read(first, offsets, inside, FULL) * momentum)
        buffer = tl.where(tl.load(started) != 0.0, decayed, grad).to(MOMENT_TYPE)
        _write(first, offsets, buffer, inside, FULL)
        if NESTEROV:
            grad = tl.fma(buffer.to(tl.float32), momentum, grad)
        else:
            grad = buffer.to(tl.float32)
    new = tl.fma(grad, neg_lr, weight)
    _store_weight(row, start, offsets, inside, new, rng, WEIGHT_TYPE, EXTRA_TYPE, MODE, ALIGNED, FULL, BLOCK)


@triton.jit
def sgd_kernel(
    rows, blocks, hyper, coef, skip, started, rng,
    GRAD_TYPE: tl.constexpr, WEIGHT_TYPE: tl.constexpr, MOMENT_TYPE: tl.constexpr, EXTRA_TYPE: tl.constexpr,
    MODE: tl.constexpr, NESTEROV: tl.constexpr, MAXIMIZE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One SGD step over all tensors of the table."""
    if tl.load(skip) == 0.0:
        work = tl.load(blocks + tl.program_id(0))
        row = rows + (work >> 32) * COLUMNS
        start = (work & 0xFFFFFFFF) * BLOCK
        size = tl.load(row + SIZE)
        if size - start >= BLOCK:
            _sgd_block(
                row, start, size, hyper, tl.load(coef), started, rng, GRAD_TYPE, WEIGHT_TYPE, MOMENT_TYPE, EXTRA_TYPE,
                MODE, NESTEROV, MAXIMIZE, ALIGNED, True, BLOCK,
            )  # fmt: skip
        else:
            _sgd_block(
                row, start, size, hyper, tl.load(coef), started, rng, GRAD_TYPE, WEIGHT_TYPE, MOMENT_TYPE, EXTRA_TYPE,
                MODE, NESTEROV, MAXIMIZE, ALIGNED, False, BLOCK,
            )  # fmt: skip


@triton.jit
def advance_kernel(started, rng, skip, HAS_STARTED: tl.constexpr, HAS_RNG: tl.constexpr):
    """After the tensors: note that a first step was made, and raise the number of updates that random bits depend on."""
    if tl.load(skip) == 0.0:
        if HAS_STARTED:
            tl.store(started, 1.0)
        if HAS_RNG:
            tl.store(rng + 1, tl.load(rng + 1) + 1)


@triton.jit
def check_kernel(
    rows, blocks, inv_scale, partials, flags, GRAD_TYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    """Sum of squares of one block of unscaled gradients; raises the tensor's flag where an element is not finite."""
    work = tl.load(blocks + tl.program_id(0))
    row = rows + (work >> 32) * COLUMNS
    start = (work & 0xFFFFFFFF) * BLOCK
    size = tl.load(row + SIZE)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < size - start
    pointer = _address(row, GRAD, GRAD_TYPE, start, ALIGNED)
    if size - start >= BLOCK:
        grad = _read(pointer, offsets, inside, True)
    else:
        grad = _read(pointer, offsets, inside, False)
    unscaled = grad * tl.load(inv_scale)
    tl.store(partials + tl.program_id(0), tl.sum(unscaled * unscaled, axis=0))
    # A comparison with NaN is false, so one test finds infinities and NaN. All writers write the same value.
    bad = tl.max((tl.abs(grad) < float("inf")).to(tl.int32) ^ 1, axis=0)
    tl.store(flags + tl.load(row + PLACE), bad.to(tl.uint8), mask=bad != 0)


@triton.jit
def check_finish_kernel(partials, partial_count, flags, flag_count, norm, nonfinite, BLOCK: tl.constexpr):
    """Add the blocks' sums in a fixed order and combine the flags; one program."""
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, partial_count, BLOCK):
        total += tl.load(partials + start + offsets, mask=offsets < partial_count - start, other=0.0)
    bad = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, flag_count, BLOCK):
        bad |= tl.load(flags + start + offsets, mask=offsets < flag_count - start, other=0).to(tl.int32)
    tl.store(norm, tl.sqrt_rn(tl.sum(total, axis=0)))
    tl.store(nonfinite, tl.max(bad, axis=0).to(tl.float32))
