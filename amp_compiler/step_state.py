"""Tensors that live from step to step beside the optimizer's: 16-bit weights and sums of gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class LowWeights:
    """The 16-bit copies of the masters: state, written by the update, made again only when a master changed outside."""

    def __init__(self) -> None:
        self._copies: dict[tuple[int, torch.dtype], Tensor] = {}
        self._marks: dict[tuple[int, torch.dtype], tuple[int, int]] = {}

    def get(self, master: Tensor, dtype: torch.dtype) -> Tensor:
        """The copy of a master; the same tensor at every step."""
        key, mark = (id(master), dtype), (master.data_ptr(), master._version)
        copy = self._copies.get(key)
        if copy is None or copy.shape != master.shape or copy.device != master.device:
            copy = self._copies[key] = master.detach().to(dtype)
        elif self._marks.get(key) != mark:
            copy.copy_(master.detach())
        self._marks[key] = mark
        return copy

    def settle(self, masters: Sequence[Tensor]) -> None:
        """Note that the update has just written these masters together with their copies."""
        for master in masters:
            for key in self._copies:
                if key[0] == id(master):
                    self._marks[key] = (master.data_ptr(), master._version)


class GradientSums:
    """FP32 sums of the gradients of several batches, one per parameter, zero at first."""

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}

    def get(self, parameter: Tensor) -> Tensor:
        """The sum of a parameter's gradients; the same tensor at every step."""
        found = self._sums.get(id(parameter))
        if found is None or found.shape != parameter.shape or found.device != parameter.device:
            found = self._sums[id(parameter)] = torch.zeros_like(parameter, dtype=torch.float32)
        return found
