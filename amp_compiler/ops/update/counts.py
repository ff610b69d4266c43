"""What the updates of a step do to its weights, counted while they are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from amp_compiler.ops.exponents import BINS

WIDTH = 2 * BINS + 3  # int64 numbers for one weight: the fields of an `UpdateCount`


class UpdateCount(NamedTuple):
    """Of one weight.

    Args:
        gradient: int64 [`BINS`]: the exponents of the gradient that the update has read.
        ratios: int64 [`BINS`]: as `ops.exponents.count_update` gives them.
        found: int64 [3]: the same.
    """

    gradient: Any
    ratios: Any
    found: Any


class UpdateCounts:
    """Counts of the weights that kernels have updated since they were taken, each found by its place in memory.

    Example:
        >>> import torch
        >>> counts, weight = UpdateCounts(), torch.zeros(3)
        >>> counts.rows([weight])[0, -3] = 2  # as a kernel does it
        >>> counts.take(weight).found.tolist(), counts.take(weight)
        ([2, 0, 0], None)
    """

    def __init__(self) -> None:
        self._rows: dict[tuple[int, int], Any] = {}

    def rows(self, weights: Sequence[Tensor]) -> Any:
        """Places for the counts of these weights, int64 [weights, `WIDTH`], zeros: what is added there is kept."""
        rows = np.zeros((len(weights), WIDTH), np.int64)
        self._rows.update(zip(map(_place, weights), rows, strict=True))
        return rows

    def take(self, weight: Tensor) -> UpdateCount | None:
        """The counts of a weight, which are given once; `None` where no kernel has updated it."""
        row = self._rows.pop(_place(weight), None)
        return None if row is None else UpdateCount(row[:BINS], row[BINS : 2 * BINS], row[2 * BINS :])


def _place(weight: Tensor) -> tuple[int, int]:
    return weight.data_ptr(), weight.numel()
