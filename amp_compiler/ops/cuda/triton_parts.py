"""Device functions that the Triton kernels share: the table of tensors, loads and stores, rounding."""

# ruff: noqa: SIM108, SIM300
# A conditional expression would evaluate both sides. Upper-case parameters are compile-time constants.

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Parameters are values on the device, which have no Python types.

from __future__ import annotations

import triton
import triton.language as tl

# Each device function sees these as compile-time constants.
COLUMNS = tl.constexpr(8)
SIZE, PLACE, GRAD, WEIGHT, EXTRA, FIRST, SECOND, LARGEST = (tl.constexpr(i) for i in range(8))
STOCHASTIC = tl.constexpr(1)
KAHAN = tl.constexpr(2)


@triton.jit
def address(row, COLUMN: tl.constexpr, TYPE: tl.constexpr, start, ALIGNED: tl.constexpr):
    """Pointer to the first element of this block; with `ALIGNED` a thread may load 4 elements at a time."""
    pointer = tl.load(row + COLUMN).to(tl.pointer_type(TYPE)) + start
    if ALIGNED:
        pointer = tl.multiple_of(pointer, TYPE.primitive_bitwidth // 2)
    return pointer


@triton.jit
def read(pointer, offsets, inside, FULL: tl.constexpr):
    """Load a block as fp32; without `FULL` the elements that are not `inside` are 0."""
    if FULL:
        value = tl.load(pointer + offsets)
    else:
        value = tl.load(pointer + offsets, mask=inside, other=0.0)
    return value.to(tl.float32)


@triton.jit
def write(pointer, offsets, value, inside, FULL: tl.constexpr):
    """Store a block in the pointer's type, rounded to nearest."""
    value = value.to(pointer.dtype.element_ty)
    if FULL:
        tl.store(pointer + offsets, value)
    else:
        tl.store(pointer + offsets, value, mask=inside)


@triton.jit
def saturated(value, TYPE: tl.constexpr):
    """As `rounding.saturated`."""
    if TYPE == tl.float32:
        result = value
    else:
        LARGEST: tl.constexpr = 65504.0 if TYPE == tl.float16 else 3.3895313892515355e38
        clipped = tl.where(value > LARGEST, LARGEST, tl.where(value < -LARGEST, -LARGEST, value))
        result = tl.where(tl.abs(value) < float("inf"), clipped, value)
    return result


@triton.jit
def add_l1(grad, weight, l1):
    """The gradient plus `l1 * sign(weight)`; as it is where `l1` is zero."""
    pull = tl.where(weight > 0.0, l1, tl.where(weight < 0.0, -l1, 0.0))
    return tl.where(l1 != 0.0, grad + pull, grad)


@triton.jit
def random_words(rng, place, start, BLOCK: tl.constexpr):
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
def round_stochastically(value, words, TYPE: tl.constexpr):
    """As `rounding.round_stochastically`, bit for bit."""
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
def store_weight(
    row, start, offsets, inside, new, rng, stale,
    WEIGHT_TYPE: tl.constexpr, EXTRA_TYPE: tl.constexpr, MODE: tl.constexpr, TAKES: tl.constexpr,
    ALIGNED: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the new weight as `MODE` says; the extra tensor is given the rounding error, or a low copy."""
    if stale is not None and not TAKES:
        tl.store(kept_sum(row, start, stale, BLOCK), bit_sum(new, offsets, inside))
    weight = address(row, WEIGHT, WEIGHT_TYPE, start, ALIGNED)
    new = saturated(new, WEIGHT_TYPE)
    if MODE == STOCHASTIC:
        words = random_words(rng, tl.load(row + PLACE), start, BLOCK)
        rounded = round_stochastically(new, words, WEIGHT_TYPE)
        write(weight, offsets, rounded, inside, FULL)
    else:
        stored = new.to(WEIGHT_TYPE)
        write(weight, offsets, stored, inside, FULL)
        if EXTRA_TYPE is not None:
            extra = address(row, EXTRA, EXTRA_TYPE, start, ALIGNED)
            beside = new
            if MODE == KAHAN:
                beside = new - stored.to(tl.float32)
            write(extra, offsets, beside, inside, FULL)


@triton.jit
def differ(wide, low):
    """Where a copy is not its tensor rounded: bit for bit, but that every NaN is one."""
    rounded = wide.to(low.dtype)
    other = rounded.to(tl.int16, bitcast=True) != low.to(tl.int16, bitcast=True)
    return other & ((wide == wide) | (low.to(tl.float32) == low.to(tl.float32)))


@triton.jit
def bit_sum(value, offsets, inside):
    """int64: the bits of a block in fp32, each mixed with its place, summed exactly in any order; never 0."""
    bits = tl.where(inside, value.to(tl.uint32, bitcast=True), 0)
    odd = (2 * offsets + 1).to(tl.uint32) * 0x9E3779B1
    return tl.sum(((bits * odd) ^ tl.umulhi(bits, odd)).to(tl.int64), axis=0) + 1


@triton.jit
def kept_sum(row, start, stale, BLOCK: tl.constexpr):
    """Pointer to the sum of what the last update wrote to this block; 0 where that is not known."""
    return stale + tl.load(stale + 2 * tl.load(row + PLACE) + 1) + start // BLOCK


@triton.jit
def load_weight(
    row, start, offsets, inside, stale,
    WEIGHT_TYPE: tl.constexpr, EXTRA_TYPE: tl.constexpr, MODE: tl.constexpr, TAKES: tl.constexpr,
    ALIGNED: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As `rounding.widen`; with `stale` as `reference.follow`, where sums of bits stand for copies of masters."""
    column = address(row, WEIGHT, WEIGHT_TYPE, start, ALIGNED)
    weight = read(column, offsets, inside, FULL)
    if MODE == KAHAN:
        error = address(row, EXTRA, WEIGHT_TYPE, start, ALIGNED)
        beside = read(error, offsets, inside, FULL)
        weight += tl.where((weight + beside * 0.5).to(WEIGHT_TYPE).to(tl.float32) == weight, beside, 0.0)
    if stale is not None:
        if TAKES:
            low = read(address(row, EXTRA, EXTRA_TYPE, start, ALIGNED), offsets, inside, FULL)
            differing = differ(weight, low.to(EXTRA_TYPE)) & inside
            weight = tl.where(differing, low, weight)
            changed = tl.max(differing.to(tl.int32), axis=0) != 0
        else:
            before = tl.load(kept_sum(row, start, stale, BLOCK))
            changed = (before != 0) & (before != bit_sum(weight, offsets, inside))
        tl.store(stale + 2 * tl.load(row + PLACE), 1, mask=changed)
    return weight
