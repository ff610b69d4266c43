"""Histograms of binary exponents, and what a type would make of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from amp_compiler.ir.ranges import lost_in
from amp_compiler.ops.exponents import BINS, INFINITE, LOWEST, NAN, ZERO

Counts = npt.NDArray[np.int64]
_PLACES = ZERO  # of numbers; behind them stand zeros, infinities and NaN


@dataclass(frozen=True)
class Fractions:
    """What becomes of numbers in a type, as fractions of those that are finite and not zero.

    Args:
        zero: too small even for a subnormal number.
        subnormal: kept with fewer bits than the type has.
        infinite: too large.
    """

    zero: float
    subnormal: float
    infinite: float

    @property
    def lost(self) -> float:
        """Zero or infinite."""
        return self.zero + self.infinite


@dataclass(frozen=True, eq=False, repr=False)
class Histogram:
    """How often each binary exponent, `floor(log2|x|)`, occurs.

    Args:
        counts: int64 [280]: exponents from -149 to 127, zeros, infinities, NaN.

    Example:
        >>> import torch
        >>> from amp_compiler.ops.exponents import count
        >>> histogram = Histogram(count(torch.tensor([0.0, 1.0, 3.0, 2.0**-20])).numpy())
        >>> histogram.lowest, histogram.highest, histogram.zeros
        (-20, 1, 1)
        >>> histogram
        <Histogram of 4 elements: 2**-20 to 2**1, 1 zeros>
        >>> histogram.fractions("fp16").subnormal
        0.3333333333333333
    """

    counts: Counts

    @classmethod
    def empty(cls) -> Histogram:
        """Of nothing."""
        return cls(np.zeros(BINS, dtype=np.int64))

    def __repr__(self) -> str:
        parts = [] if self.highest is None else [f"2**{self.lowest} to 2**{self.highest}"]
        return f"<Histogram of {self.total} elements: {', '.join([*parts, f'{self.zeros} zeros'])}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Histogram) and bool((self.counts == other.counts).all())

    @property
    def numbers(self) -> Counts:
        """int64 [277]: the counts of finite numbers but zero, from the exponent -149 on."""
        return self.counts[:_PLACES]

    @property
    def total(self) -> int:
        """All elements."""
        return int(self.counts.sum())

    @property
    def zeros(self) -> int:
        """Elements that are zero."""
        return int(self.counts[ZERO])

    @property
    def nonfinite(self) -> int:
        """Elements that are infinite or NaN."""
        return int(self.counts[INFINITE] + self.counts[NAN])

    @property
    def lowest(self) -> int | None:
        """The least exponent; `None` where every element is zero or not finite."""
        occupied = np.flatnonzero(self.numbers)
        return int(occupied[0]) + LOWEST if len(occupied) else None

    @property
    def highest(self) -> int | None:
        """The greatest exponent of a finite number."""
        occupied = np.flatnonzero(self.numbers)
        return int(occupied[-1]) + LOWEST if len(occupied) else None

    def shifted(self, by: int) -> Histogram:
        """That of the same numbers times 2^`by`, as if no exponent were too small or too large to stand here."""
        counts = self.counts.copy()
        places = np.clip(np.arange(_PLACES) + by, 0, _PLACES - 1)
        counts[:_PLACES] = 0
        np.add.at(counts, places, self.numbers)
        return Histogram(counts)

    def fractions(self, dtype: str, scale: float = 1.0) -> Fractions:
        """What becomes of the numbers in a type, by their exponents.

        Args:
            dtype: a key of `RANGES`; see `ir.ranges.lost_in`.
            scale: what they are multiplied by first.
        """
        numbers = self.numbers.tolist()
        parts = lost_in(dtype, numbers, LOWEST + math.floor(math.log2(scale)))
        return Fractions(*(part / max(sum(numbers), 1) for part in parts))

    def __add__(self, other: Histogram) -> Histogram:
        return Histogram(self.counts + other.counts)
