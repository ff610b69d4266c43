"""The binary exponents that the floating-point types of a graph have."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """The binary exponents that a floating-point type has.

    Args:
        name: of the type.
        normal: the least exponent of its normal numbers.
        least: that of its least subnormal number.
        greatest: the greatest. Not all numbers of that exponent may be there: E4M3 ends at 448.
    """

    name: str
    normal: int
    least: int
    greatest: int


# IEEE 754 for FP16; BF16 is the upper half of FP32; FP8: Micikevicius et al., FP8 Formats for Deep Learning, 2022.
RANGES = {
    one.name: one
    for one in (
        Range("fp16", -14, -24, 15),
        Range("bf16", -126, -133, 127),
        Range("fp8_e4m3", -6, -9, 8),
        Range("fp8_e5m2", -14, -16, 15),
    )
}
