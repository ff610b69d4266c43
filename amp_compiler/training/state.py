"""Tensors that live from step to step beside the optimizer's: 16-bit weights and sums of gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from amp_compiler.forward.tensor_versions import write_mark
from amp_compiler.ops.layout import as_real, empty_laid_out_like, is_laid_out_like


class LowWeights:
    """The 16-bit copies of the masters: state, written by the update, made again only when a master changed outside.

    Attributes:
        made: another number where there is a new tensor among them.
    """

    def __init__(self) -> None:
        self.made = 0
        self._copies: dict[int, dict[torch.dtype, Tensor]] = {}  # by id of the master
        self._marks: dict[int, dict[torch.dtype, tuple[int, ...]]] = {}

    def get(self, master: Tensor, dtype: torch.dtype) -> Tensor:
        """The copy of a master, laid out as it; the same tensor at every step.

        Args:
            master: the weight.
            dtype: of the copy.
        """
        copies, marks = self._copies.setdefault(id(master), {}), self._marks.setdefault(id(master), {})
        copy, mark = copies.get(dtype), write_mark(master)
        if copy is None or not is_laid_out_like(copy, master):
            copy = copies[dtype] = empty_laid_out_like(master, dtype).copy_(master.detach())
            self.made += 1
        elif marks.get(dtype) != mark:
            copy.copy_(master.detach())
        marks[dtype] = mark
        return copy

    def copies(self, master: Tensor) -> list[Tensor]:
        """The copies of a master that there are."""
        return [one for one in self._copies.get(id(master), {}).values() if one.shape == master.shape]

    def has(self, master: Tensor) -> bool:
        """Whether there is a copy of a master."""
        return id(master) in self._copies

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
    """FP32 sums of the gradients of several batches, one per parameter, zero at first.

    Attributes:
        gathered: ids of the parameters that a batch has a gradient of, since sums were last used up; not all batches
            need have one of the same parameters.
    """

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}
        self.gathered: frozenset[int] = frozenset()

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self._sums

    def note(self, parameters: frozenset[int]) -> None:
        """Note of which parameters a batch has added gradients.

        Args:
            parameters: their ids.
        """
        if self.gathered is not parameters:  # the same object, where all batches are alike: quickly compared
            self.gathered = parameters | self.gathered if self.gathered else parameters

    def get(self, parameter: Tensor) -> Tensor:
        """The sum of a parameter's gradients; the same tensor at every step; of a complex one as real numbers."""
        gathered, real = self._sums.get(id(parameter)), as_real(parameter.detach())
        if gathered is None or gathered.shape != real.shape or gathered.device != real.device:
            gathered = self._sums[id(parameter)] = empty_laid_out_like(real, torch.float32).zero_()
        elif not is_laid_out_like(gathered, real):
            gathered = self._sums[id(parameter)] = empty_laid_out_like(real, torch.float32).copy_(gathered)
        return gathered
