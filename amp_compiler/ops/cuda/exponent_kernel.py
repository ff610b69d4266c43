"""The Triton kernel that counts binary exponents; imported by `ops.cuda.exponents` only where it is needed."""

# ruff: noqa: SIM108
# A conditional expression on a compile-time constant would evaluate both sides.

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Parameters are values on the device, which have no Python types.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def count_kernel(
    values, counts, size, WORDS: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, ROUNDS: tl.constexpr
):
    """Every element is looked at as FP32: its bits tell the exponent, and a subnormal number's mantissa its first bit.

    With `WORDS` the values are the 16 bits of BF16 numbers: the upper half of FP32's.
    """
    places = tl.arange(0, 512)
    found = tl.zeros([512], dtype=tl.int32)
    first = tl.program_id(0).to(tl.int64) * (BLOCK * ROUNDS)
    for turn in range(ROUNDS):
        offsets = first + turn * BLOCK + tl.arange(0, BLOCK)
        inside = offsets < size
        value = tl.load(values + offsets, mask=inside, other=0)
        if WORDS:
            bits = value.to(tl.int32) << 16
        else:
            bits = value.to(tl.float32).to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        exponent = magnitude >> 23
        subnormal = (magnitude.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
        place = tl.where(exponent > 0, exponent + 22, subnormal)
        place = tl.where(magnitude == 0, 277, place)
        place = tl.where(magnitude == 0x7F800000, 278, place)
        place = tl.where(magnitude > 0x7F800000, 279, place)
        found += tl.histogram(tl.where(inside, place, 511), 512)
    tl.atomic_add(counts + places, found.to(tl.int64), mask=(places < BINS) & (found > 0))
