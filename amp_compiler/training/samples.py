"""`Samples`: how much each batch counts, where batches differ in their number of samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from amp_compiler.errors import AmpError
from amp_compiler.ranks.coordinator import tensors_of


class Samples:
    """Weighs the batches of an update, over ranks and over `accumulate=`, by their numbers of samples.

    Weights are relative to the mean of the ranks' first batches, so that they are 1 where all are alike.

    Args:
        device: of the parameters.
        exchange: gives the numbers of all ranks, by that of this one.

    Attributes:
        weight: FP32 scalar on the device, of this batch.
        total: FP32 scalar on the device, of all batches of the update so far.
        divisor: the same on the host.

    Example:
        >>> samples = Samples(torch.device("cpu"), lambda own: (own, 2))
        >>> samples.begin([torch.ones(6, 3)], first=True)
        >>> float(samples.weight), float(samples.total)
        (1.5, 2.0)
    """

    def __init__(self, device: torch.device, exchange: Callable[[int], Sequence[int]]) -> None:
        self._exchange = exchange
        self.weight, self.total = (torch.ones((), device=device) for _ in range(2))
        self.divisor, self._before, self._mean = 1.0, 0.0, 0.0

    def begin(self, leaves: Sequence[Any], first: bool) -> None:
        """Take the batch of a call.

        Args:
            leaves: the batch, flat.
            first: whether it is the first one of an update.

        Raises:
            AmpError: its number of samples cannot be known, or is 0.
            RankError: another rank failed.
        """
        own = samples_of(leaves)
        numbers = self._exchange(own)
        if first or not self._mean:
            self._before, self._mean = 0.0 if first else self._before, sum(numbers) / len(numbers)
        self.divisor = self._before + sum(numbers) / self._mean
        self.weight.fill_(own / self._mean)
        self.total.fill_(self.divisor)

    def flush(self) -> None:
        """Take no batch: those that were gathered are all."""
        self.divisor = self._before
        self.total.fill_(self.divisor)

    def left(self) -> None:
        """At the end of a call: its batch counts."""
        self._before = self.divisor


def samples_of(leaves: Sequence[Any]) -> int:
    """The number of samples of a batch: the size of the first dimension, which all its tensors share.

    Args:
        leaves: the batch, flat. Single numbers have no dimension, and count for nothing.

    Raises:
        AmpError: they share none, or it is 0.

    Example:
        >>> samples_of([torch.ones(5, 3), torch.ones(5), torch.tensor(0.1)])
        5
    """
    sizes = sorted({int(one.shape[0]) for one in tensors_of(leaves) if one.dim()})
    if len(sizes) != 1:
        problem = f"has tensors of {' and '.join(map(str, sizes))} rows" if sizes else "has no tensor with a dimension"
        raise AmpError(
            f"the number of samples is not known of a batch that {problem}, and uneven='weight' weighs by it",
            hint="give tensors with one row for each sample, and hold what is no part of a sample in the loss function",
        )
    if not sizes[0]:
        raise AmpError("a batch has no sample", hint="give each rank one sample or more at every call")
    return sizes[0]
