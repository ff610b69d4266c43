"""Tensors that live from step to step beside the optimizer's: 16-bit weights and sums of gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from amp_compiler.forward.tensor_versions import write_mark
from amp_compiler.ops.layout import as_real, empty_laid_out_like, is_channels_last, is_laid_out_like


class LowWeights:
    """The 16-bit copies of the masters: state, written by the update, made again only when a master changed outside.

    Attributes:
        made: another number where there is a new tensor among them.
    """

    def __init__(self) -> None:
        self.made = 0
        self._copies: dict[int, dict[torch.dtype, Tensor]] = {}  # by id of the master
        self._marks: dict[int, dict[torch.dtype, tuple[int, ...]]] = {}
        self._turned: set[tuple[int, torch.dtype]] = set()  # those that have their channels last

    def get(self, master: Tensor, dtype: torch.dtype, channels_last: bool = False) -> Tensor:
        """The copy of a master; the same tensor at every step.

        Args:
            master: the weight.
            dtype: of the copy.
            channels_last: whether the copy has its channels last, else it lies as the master does.
        """
        copies, marks = self._copies.setdefault(id(master), {}), self._marks.setdefault(id(master), {})
        copy, mark = copies.get(dtype), write_mark(master)
        if copy is None or not _is_laid_out(copy, master, channels_last):
            layout = torch.channels_last if channels_last else torch.preserve_format
            empty = torch.empty_like(master, dtype=dtype, requires_grad=False, memory_format=layout)
            copy = copies[dtype] = empty.copy_(master.detach())
            self.made += 1
            (self._turned.add if channels_last else self._turned.discard)((id(master), dtype))
        elif marks.get(dtype) != mark:
            copy.copy_(master.detach())
        marks[dtype] = mark
        return copy

    def channels_last(self, master: Tensor, dtype: torch.dtype) -> bool | None:
        """Whether the copy of a master has its channels last; `None` where there is none yet."""
        return (id(master), dtype) in self._turned if dtype in self._copies.get(id(master), {}) else None

    def copies(self, master: Tensor) -> list[Tensor]:
        """The copies of a master that there are."""
        return [one for one in self._copies.get(id(master), {}).values() if one.shape == master.shape]

    def has(self, master: Tensor) -> bool:
        """Whether there is a copy of a master."""
        return id(master) in self._copies

    def follow(self, master: Tensor) -> None:
        """Make the copies of a master again, where it has any and was written."""
        for dtype in self._copies.get(id(master), {}):
            self.get(master, dtype, (id(master), dtype) in self._turned)

    def settle(self, masters: Sequence[Tensor]) -> None:
        """Note that the update has just written these masters together with their copies."""
        for master in masters:
            marks = self._marks.get(id(master), {})
            marks.update(dict.fromkeys(marks, write_mark(master)))


def _is_laid_out(copy: Tensor, master: Tensor, channels_last: bool) -> bool:
    if channels_last:
        return copy.shape == master.shape and copy.device == master.device and is_channels_last(copy)
    return is_laid_out_like(copy, master)


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
        found, real = self._sums.get(id(parameter)), as_real(parameter.detach())
        if found is None or found.shape != real.shape or found.device != real.device:
            found = self._sums[id(parameter)] = empty_laid_out_like(real, torch.float32).zero_()
        elif not is_laid_out_like(found, real):
            found = self._sums[id(parameter)] = empty_laid_out_like(real, torch.float32).copy_(found)
        return found
