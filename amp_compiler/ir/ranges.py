"""The binary exponents that the floating-point types of a graph have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """The binary exponents that a floating-point type has.

    Args:
        normal: the least exponent of its normal numbers.
        least: that of its least subnormal number.
        greatest: the greatest. Not all numbers of that exponent may be there: E4M3 ends at 448.
    """

    normal: int
    least: int
    greatest: int


# IEEE 754 for FP16; BF16 is the upper half of FP32; FP8: Micikevicius et al., FP8 Formats for Deep Learning, 2022.
RANGES = {
    "fp16": Range(-14, -24, 15),
    "bf16": Range(-126, -133, 127),
    "fp8_e4m3": Range(-6, -9, 8),
    "fp8_e5m2": Range(-14, -16, 15),
}


def lost_in(dtype: str, counts: Sequence[float], lowest: int) -> tuple[float, float, float]:
    """How many numbers would be zero, subnormal and infinite in a type, by their exponents.

    Rounding at the very ends is told by the exponent alone: a number just below the least subnormal one counts as kept
    where it is rounded up to that.

    Args:
        dtype: a key of `RANGES`.
        counts: of each exponent, from `lowest` on.
        lowest: the exponent of the first.

    Example:
        >>> lost_in("fp16", [3, 5, 7], -26)  # 2**-26 becomes zero, half of the least number and more does not
        (3, 12, 0)
    """
    limits = RANGES[dtype]

    def below(exponent: int) -> int:
        return min(max(exponent - lowest, 0), len(counts))

    least, normal, beyond = below(limits.least - 1), below(limits.normal), below(limits.greatest + 1)
    return sum(counts[:least]), sum(counts[least:normal]), sum(counts[beyond:])
