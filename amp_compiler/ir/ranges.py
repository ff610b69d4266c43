"""What the small floating-point types hold of numbers of which the binary exponents are known."""

from __future__ import annotations

from collections.abc import Sequence

from amp_compiler.ir.dtypes import LOW_TYPES, FloatFormat

# FP8: Micikevicius et al., FP8 Formats for Deep Learning, 2022. Not all numbers of the greatest exponent are there.
RANGES = {short: dtype.format for short, dtype in LOW_TYPES.items()} | {
    "fp8_e4m3": FloatFormat(448.0, 2.0**-6, 2.0**-9, 2.0**-3),
    "fp8_e5m2": FloatFormat(57344.0, 2.0**-14, 2.0**-16, 2.0**-2),
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
    least, normal, greatest = RANGES[dtype].exponents

    def below(exponent: int) -> int:
        return min(max(exponent - lowest, 0), len(counts))

    least, normal, beyond = below(least - 1), below(normal), below(greatest + 1)
    return sum(counts[:least]), sum(counts[least:normal]), sum(counts[beyond:])
