"""What a frontend says of a graph beside its nodes: how it is run, and what the numbers are that are stored with it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from amp_compiler.ir.value_class import value_class


@dataclass(frozen=True)
class Execution:
    """How a graph is run, as far as that decides what a cast costs, and what a plan may choose.

    The defaults are those of a graph that torch runs, eagerly or compiled, and may train.

    Args:
        stored_casts_free: a cast of a parameter or constant is done once, on the stored data, and costs nothing at run
            time.
        cast_overhead: what starting a cast costs, in bytes that are moved in that time.
        widest_is_open: what runs in the widest type of its inputs, behind a node whose type is chosen, has one to
            choose too.
        halves_stay: an operand of the other 16-bit type is never cast.
        casts_join: what the model casts to FP32 from FP64, or from the other 16-bit type, may be cast to the low type
            at once: no eager execution has to be matched to the bit.
        weights_unknown: parameters are stored numbers of any kind, not only what was learned.
        run_only: no loss reads its outputs.
        scales_stored: the scales of FP8 operands are stored with the graph, not computed when it runs.

    Example:
        >>> Execution(run_only=True).cast_overhead
        0
    """

    stored_casts_free: bool = False
    cast_overhead: int = 0
    widest_is_open: bool = False
    halves_stay: bool = False
    casts_join: bool = False
    weights_unknown: bool = False
    run_only: bool = False
    scales_stored: bool = False


@value_class
class StoredNumbers:
    """What is known of the numbers that are stored under a name.

    Args:
        least: the least finite one; 0 where there is none.
        most: the largest finite one; 0 where there is none.
        number: the one that they all are, where but one is stored.
        lost: how many, not zero, the low type makes zero.
        subnormal: some, not zero, lie below the normal numbers of the low type, which hold them to all their digits.
        infinite: some are infinite or not a number.
        balanced: whether rows, and columns, each sum to about zero: a product that sums over these is a difference.
    """

    least: float = 0.0
    most: float = 0.0
    number: float | None = None
    lost: int = 0
    subnormal: bool = False
    infinite: bool = False
    balanced: tuple[bool, bool] = (False, False)

    @property
    def largest(self) -> float:
        """The largest finite magnitude."""
        return max(-self.least, self.most)


@value_class
class Mask:
    """Stored numbers that hide scores from a softmax.

    Args:
        path: the names of the nodes that they pass through on their way to it.
        terms: how many terms of a size their sum has there, they counted.
    """

    path: tuple[str, ...]
    terms: float


class Magnitudes(float):
    """The largest magnitude that a value was seen to have, with what else was looked for.

    Args:
        largest: the largest; infinite where an element was not finite.
        least: the least one but zero; infinite where all are zero, or it was not looked for.
        spread: the largest distance to the mean that a norm or softmax takes; infinite where it was not looked for.

    Example:
        >>> seen = Magnitudes(3.0, 1e-9)
        >>> seen > 2.0, seen.least
        (True, 1e-09)
    """

    least: float
    spread: float

    def __new__(cls, largest: float, least: float = math.inf, spread: float = math.inf) -> Magnitudes:
        """See the class."""
        seen = super().__new__(cls, largest)
        seen.least, seen.spread = least, spread
        return seen

    def joined(self, other: Magnitudes) -> Magnitudes:
        """Those of two batches."""
        return Magnitudes(max(self, other), min(self.least, other.least))
