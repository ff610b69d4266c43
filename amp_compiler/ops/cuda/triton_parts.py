"""Device functions that the Triton kernels share: the table of tensors, loads and stores, rounding."""

# ruff: noqa: SIM108, SIM300
# A conditional expression would evaluate both sides. Upper-case parameters are compile-time constants.

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Parameters are values on the device, which have no Python types.

from __future__ import annotations

import triton
import triton.language as tl

# Each device function sees these as compile-time constants.
COLUMNS = tl.constexpr(10)
SIZE, PLACE, GRAD, WEIGHT, EXTRA, FIRST, SECOND, LARGEST, CHANNELS, PIXELS = (tl.constexpr(i) for i in range(10))
STOCHASTIC = tl.constexpr(1)
KAHAN = tl.constexpr(2)


@triton.jit
def places(BLOCK: tl.constexpr):
    """[2, BLOCK // 256, 128]: numbers of a block's elements, as threads take them.

    A thread has 4 elements that lie together, twice, so that it loads 16 bytes of fp32 at a time and a warp whole lines
    of the cache. With a warp for every 256 elements, a warp's elements are 256 that lie together: those of 16 bits,
    which a thread loads by eight, go to their threads within the warp and not through shared memory.
    """
    half, span, element = tl.arange(0, 2), tl.arange(0, BLOCK // 256), tl.arange(0, 128)
    return half[:, None, None] * 128 + span[None, :, None] * 256 + element[None, None, :]


@triton.jit
def _eights(BLOCK: tl.constexpr):
    return tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]


@triton.jit
def in_order(value, BLOCK: tl.constexpr):
    """A block in the form of `places` as a vector, element behind element."""
    return tl.reshape(tl.permute(value, (1, 0, 2)), [BLOCK])


@triton.jit
def address(row, COLUMN: tl.constexpr, TYPE: tl.constexpr, start, ALIGNED: tl.constexpr):
    """Pointer to the first element of this block; with `ALIGNED` a thread may load 16 bytes at a time."""
    pointer = tl.load(row + COLUMN).to(tl.pointer_type(TYPE)) + start
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _column(row, COLUMN: tl.constexpr, TYPE: tl.constexpr, start, ALIGNED: tl.constexpr):
    """As `address`, for what is read in the form of `places`: with `ALIGNED` 4 elements of every type at a time.

    If the compiler saw that 8 elements of 16 bits lie in 16 bytes, it would give a thread 8 of every type there.
    """
    pointer = tl.load(row + COLUMN).to(tl.pointer_type(TYPE)) + start
    if ALIGNED:
        pointer = tl.multiple_of(pointer, TYPE.primitive_bitwidth // 2)
    return pointer


@triton.jit
def read_column(
    row, COLUMN: tl.constexpr, TYPE: tl.constexpr, start, left,
    ALIGNED: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of a column as fp32, in the form of `places`; without `FULL` only `left` elements are there."""
    if ALIGNED and FULL and TYPE.primitive_bitwidth == 16:
        value = tl.load(address(row, COLUMN, TYPE, start, True) + _eights(BLOCK))
        value = tl.permute(tl.reshape(value, [BLOCK // 256, 2, 128]), (1, 0, 2)).to(tl.float32)
    else:
        offsets = places(BLOCK)
        value = read(_column(row, COLUMN, TYPE, start, ALIGNED), offsets, offsets < left, FULL)
    return value


@triton.jit
def write_column(
    row, COLUMN: tl.constexpr, TYPE: tl.constexpr, start, left, value,
    ALIGNED: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store what `read_column` has read, rounded to nearest."""
    if ALIGNED and FULL and TYPE.primitive_bitwidth == 16:
        low = tl.reshape(tl.permute(value.to(TYPE), (1, 0, 2)), [BLOCK // 8, 8])
        tl.store(address(row, COLUMN, TYPE, start, True) + _eights(BLOCK), low)
    else:
        offsets = places(BLOCK)
        write(_column(row, COLUMN, TYPE, start, ALIGNED), offsets, value, offsets < left, FULL)


@triton.jit
def turned_places(row, start, offsets):
    """Where the elements of a block of a weight [n, channels, pixels] stand in a tensor [n, pixels, channels]."""
    channels = tl.load(row + CHANNELS)
    size = channels * tl.load(row + PIXELS)
    first = start % size
    count = channels.to(tl.int32)
    pixels = tl.load(row + PIXELS).to(tl.int32)
    place = first.to(tl.int32) + offsets
    inner = place % size.to(tl.int32)
    channel = inner // pixels
    return (start - first) + (place - inner + (inner - channel * pixels) * count + channel)


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
    """uint32: element `e` of the tensor takes word `e % 4` of counter `(e // 4, place, update number)`."""
    half, span, four = tl.arange(0, 2), tl.arange(0, BLOCK // 256), tl.arange(0, 32)
    group = (start // 4) + (half[:, None, None] * 32 + span[None, :, None] * 64 + four[None, None, :])
    low = (group & 0xFFFFFFFF).to(tl.uint32)
    high = (group >> 32).to(tl.uint32)
    zero = low * 0
    third = zero + place.to(tl.uint32)
    fourth = zero + (tl.load(rng + 1) & 0xFFFFFFFF).to(tl.uint32)
    r0, r1, r2, r3 = tl.philox(tl.load(rng), low, high, third, fourth)
    return tl.reshape(tl.join(tl.join(r0, r2), tl.join(r1, r3)), [2, BLOCK // 256, 128])


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
    row, start, left,
    GRAD_TYPE: tl.constexpr, TURNED: tl.constexpr, ALIGNED: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient in fp32, in the order of the weight."""
    if TURNED & 1:  # the column of gradients in `Group.turned`
        offsets = places(BLOCK)
        pointer = address(row, GRAD, GRAD_TYPE, 0, False)
        grad = read(pointer, turned_places(row, start, offsets), offsets < left, FULL)
    else:
        grad = read_column(row, GRAD, GRAD_TYPE, start, left, ALIGNED, FULL, BLOCK)
    return grad


@triton.jit
def store_weight(
    row, start, left, new, rng,
    WEIGHT_TYPE: tl.constexpr, EXTRA_TYPE: tl.constexpr, MODE: tl.constexpr, TURNED: tl.constexpr,
    ALIGNED: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the new weight as `MODE` says; the extra tensor is given the rounding error, or a low copy."""
    new = saturated(new, WEIGHT_TYPE)
    if MODE == STOCHASTIC:
        words = random_words(rng, tl.load(row + PLACE), start, BLOCK)
        rounded = round_stochastically(new, words, WEIGHT_TYPE)
        write_column(row, WEIGHT, WEIGHT_TYPE, start, left, rounded, ALIGNED, FULL, BLOCK)
    else:
        stored = new.to(WEIGHT_TYPE)
        write_column(row, WEIGHT, WEIGHT_TYPE, start, left, stored, ALIGNED, FULL, BLOCK)
        if EXTRA_TYPE is not None:
            if MODE == KAHAN:
                error = new - stored.to(tl.float32)
                write_column(row, EXTRA, EXTRA_TYPE, start, left, error, ALIGNED, FULL, BLOCK)
            elif TURNED & 4:  # the column of extras
                offsets = places(BLOCK)
                extra = address(row, EXTRA, EXTRA_TYPE, 0, False)
                write(extra, turned_places(row, start, offsets), new, offsets < left, FULL)
            else:
                write_column(row, EXTRA, EXTRA_TYPE, start, left, new, ALIGNED, FULL, BLOCK)


@triton.jit
def load_weight(
    row, start, left,
    WEIGHT_TYPE: tl.constexpr, MODE: tl.constexpr, ALIGNED: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The weight in fp32, with the error of earlier roundings added where it is kept."""
    weight = read_column(row, WEIGHT, WEIGHT_TYPE, start, left, ALIGNED, FULL, BLOCK)
    if MODE == KAHAN:
        weight += read_column(row, EXTRA, WEIGHT_TYPE, start, left, ALIGNED, FULL, BLOCK)
    return weight
