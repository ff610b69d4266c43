"""How far results are from those of FP32."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_FLOOR = 1e-3  # of the norm of all gradients: below it a gradient counts as one of that size


@dataclass(frozen=True)
class Measured:
    """What a run showed.

    Args:
        error: the largest relative L2 error of a result, of whole numbers the share that differs; infinite where one is
            not finite, or has another shape.
        worst: that result, in words; empty where nothing is off.
    """

    error: float
    worst: str = ""


class Deviation:
    """Relative L2 errors of named results, summed over batches.

    A gradient that is small beside all of them together is measured against a thousandth of their norm: that of a bias
    in front of a normalisation is zero but for rounding.
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}
        self._gradients: set[str] = set()
        self._counted: set[str] = set()
        self._bad: dict[str, None] = {}

    def add(self, name: str, expected: Tensor, actual: Tensor, *, gradient: bool = False) -> None:
        """Add a result of one batch.

        Args:
            name: the result, in words.
            expected: of FP32.
            actual: of any type, for the same shape.
            gradient: whether it is that of a parameter.
        """
        if expected.shape != actual.shape:
            self._bad[name] = None
            return
        if gradient:
            self._gradients.add(name)
        wide = torch.complex128 if expected.is_complex() else torch.float64
        one, two = expected.detach().to(wide), actual.detach().to(wide)
        if not bool(torch.isfinite(two).all()):
            self._bad[name] = None
            return
        # Whole numbers that differ, such as classes, are off by their share; floats by the square of their distance.
        counted = not (expected.is_floating_point() or expected.is_complex())
        if counted:
            self._counted.add(name)
        off = float((one != two).sum()) if counted else float((one - two).abs().square().sum())
        size = float(one.numel()) if counted else float(one.abs().square().sum())
        before = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = (before[0] + off, before[1] + size)

    def result(self) -> Measured:
        """The largest error."""
        if self._bad:
            return Measured(math.inf, next(iter(self._bad)))
        floor = _FLOOR**2 * sum(size for name, (_, size) in self._sums.items() if name in self._gradients)
        worst = Measured(0.0)
        for name, (off, size) in self._sums.items():
            against = max(size, floor) if name in self._gradients else size
            share = 0.0 if not off else off / against if against else math.inf
            error = share if name in self._counted else math.sqrt(share)
            if error > worst.error:
                worst = Measured(error, name)
        return worst
