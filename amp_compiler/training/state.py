"""Tensors that live from step to step beside the optimizer's: 16-bit weights and sums of gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from amp_compiler.forward.tensor_versions import write_mark
from amp_compiler.ops.layout import empty_laid_out_like, is_laid_out_like


class LowWeights:
    """The 16-bit copies of the masters: state, written by the update, made again only when a master changed outside."""

    def __init__(self) -> None:
        self._copies: dict[int, dict[torch.dtype, Tensor]] = {}  # by id of the master
        self._marks: dict[int, dict[torch.dtype, tuple[int, ...]]] = {}

    def get(self, master: Tensor, dtype: torch.dtype) -> Tensor:
        """The copy of a master; the same tensor at every step."""
        copies, marks = self._copies.setdefault(id(master), {}), self._marks.setdefault(id(master), {})
        copy, mark = copies.get(dtype), write_mark(master)
        if copy is None or not is_laid_out_like(copy, master):
            copy = copies[dtype] = empty_laid_out_like(master, dtype).copy_(master.detach())
        elif marks.get(dtype) != mark:
            copy.copy_(master.detach())
        marks[dtype] = mark
        return copy

    def follow(self, master: Tensor) -> None:
        """Make the copies of a master again, where it has any and was written."""
        for dtype in self._copies.get(id(master), {}):
            self.get(master, dtype)

    def settle(self, masters: Sequence[Tensor]) -> None:
        """Note that the update has just written these masters together with their copies."""
        for master in masters:
            marks = self._marks.get(id(master), {})
            marks.update(dict.fromkeys(marks, write_mark(master)))


class GradientSums:
    """FP32 sums of the gradients of several batches, one per parameter, zero at first."""

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self._sums

    def get(self, parameter: Tensor) -> Tensor:
        """The sum of a parameter's gradients; the same tensor at every step."""
        found = self._sums.get(id(parameter))
        if found is None or found.shape != parameter.shape or found.device != parameter.device:
            found = self._sums[id(parameter)] = empty_laid_out_like(parameter, torch.float32).zero_()
        elif not is_laid_out_like(found, parameter):
            found = self._sums[id(parameter)] = empty_laid_out_like(parameter, torch.float32).copy_(found)
        return found
