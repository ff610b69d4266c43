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
def address(row, COLUMN: tl.constexpr, TYPE: tl.constexpr, start, ALIGNED: tl.constexpr, FULL: tl.constexpr):
    """Pointer to the first element of this block; with `ALIGNED` a thread may load 16 bytes at a time.

    Without `FULL` it loads at most 4 elements: if the compiler saw that 8 elements of 16 bits lie in 16 bytes, it would
    give a thread 8 of every type, and move values between threads through shared memory.
    """
    pointer = tl.load(row + COLUMN).to(tl.pointer_type(TYPE)) + start
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16 if FULL else TYPE.primitive_bitwidth // 2)
    return pointer


@triton.jit
def _by_eights(BLOCK: tl.constexpr):
    """[BLOCK // 256, 2, 128]: numbers of a block's elements, of which a thread takes 8 that lie together.

    Of a vector a thread takes 4 of 32 bits that lie together, and with a warp for every 256 elements 4 more, half a
    block behind them. Here a warp has the same elements as there, so that they go to their threads within the warp:
    half of it reads 256 bytes at one place, half of it 256 bytes at the other. The compiler tells the two forms apart
    by their shapes.
    """
    warp, half, element = tl.arange(0, BLOCK // 256), tl.arange(0, 2), tl.arange(0, 128)
    return warp[:, None, None] * 128 + half[None, :, None] * (BLOCK // 2) + element[None, None, :]


@triton.jit
def read_column(
    pointer, offsets, inside, ALIGNED: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Load a block of a column as fp32, 16 bytes at a time where it is `ALIGNED` and `FULL`."""
    if ALIGNED and FULL and pointer.dtype.element_ty.primitive_bitwidth == 16:
        value = tl.permute(tl.load(pointer + _by_eights(BLOCK)), (1, 0, 2))
        value = tl.reshape(value, [BLOCK]).to(tl.float32)
    else:
        value = read(pointer, offsets, inside, FULL)
    return value


@triton.jit
def write_column(
    pointer, offsets, value, inside, ALIGNED: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Store what `read_column` has read, rounded to nearest."""
    if ALIGNED and FULL and pointer.dtype.element_ty.primitive_bitwidth == 16:
        value = tl.reshape(value.to(pointer.dtype.element_ty), [2, BLOCK // 256, 128])
        tl.store(pointer + _by_eights(BLOCK), tl.permute(value, (1, 0, 2)))
    else:
        write(pointer, offsets, value, inside, FULL)


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
def read_gradient(
    row, start, offsets, inside,
    GRAD_TYPE: tl.constexpr, ALIGNED: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient in fp32."""
    return read_column(address(row, GRAD, GRAD_TYPE, start, ALIGNED, FULL), offsets, inside, ALIGNED, FULL, BLOCK)


@triton.jit
def store_weight(
    row, start, offsets, inside, new, rng,
    WEIGHT_TYPE: tl.constexpr, EXTRA_TYPE: tl.constexpr, MODE: tl.constexpr,
    ALIGNED: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the new weight as `MODE` says; the extra tensor is given the rounding error, or a low copy."""
    weight = address(row, WEIGHT, WEIGHT_TYPE, start, ALIGNED, FULL)
    new = saturated(new, WEIGHT_TYPE)
    if MODE == STOCHASTIC:
        words = random_words(rng, tl.load(row + PLACE), start, BLOCK)
        rounded = round_stochastically(new, words, WEIGHT_TYPE)
        write_column(weight, offsets, rounded, inside, ALIGNED, FULL, BLOCK)
    else:
        stored = new.to(WEIGHT_TYPE)
        write_column(weight, offsets, stored, inside, ALIGNED, FULL, BLOCK)
        if EXTRA_TYPE is not None:
            extra = address(row, EXTRA, EXTRA_TYPE, start, ALIGNED, FULL)
            beside = new
            if MODE == KAHAN:
                beside = new - stored.to(tl.float32)
            write_column(extra, offsets, beside, inside, ALIGNED, FULL, BLOCK)


@triton.jit
def load_weight(
    row, start, offsets, inside,
    WEIGHT_TYPE: tl.constexpr, MODE: tl.constexpr, ALIGNED: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The weight in fp32, with the error of earlier roundings added where it is kept."""
    column = address(row, WEIGHT, WEIGHT_TYPE, start, ALIGNED, FULL)
    weight = read_column(column, offsets, inside, ALIGNED, FULL, BLOCK)
    if MODE == KAHAN:
        error = address(row, EXTRA, WEIGHT_TYPE, start, ALIGNED, FULL)
        weight += read_column(error, offsets, inside, ALIGNED, FULL, BLOCK)
    return weight
