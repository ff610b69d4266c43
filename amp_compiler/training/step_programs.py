"""`StepPrograms`: what a training step has captured, found again for batches of other shapes too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from amp_compiler.forward.program_table import ProgramTable
from amp_compiler.fx.torch_private import likeness_test
from amp_compiler.training.program import StepProgram

MOST_KNOWN = 4096  # shapes of which it is kept in mind which program of dynamic shapes takes them


class StepPrograms(ProgramTable[StepProgram]):
    """The programs of a step by key.

    Args:
        dynamic: whether a program of dynamic shapes may run batches of other shapes than it was captured for.
    """

    def __init__(self, dynamic: bool) -> None:
        super().__init__()
        self._dynamic = dynamic
        self._fits: dict[Any, StepProgram] = {}
        self._last: tuple[tuple[Any, ...], Callable[[Sequence[Tensor]], bool], StepProgram] | None = None

    def again(self, mark: tuple[Any, ...], leaves: Sequence[Any]) -> StepProgram | None:
        """The program that was remembered last, where it is the one that `find` would find.

        Args:
            mark: all that a program is chosen by beside the form of the batch, and the number of its leaves.
            leaves: of the batch.
        """
        if self._last is not None:
            before, alike, program = self._last
            if before == mark and alike(leaves) and program.compiled.values.hold(leaves):
                return program
        return None

    def remember(self, mark: tuple[Any, ...], leaves: Sequence[Any], program: StepProgram) -> None:
        """Keep in mind which program was found, where a batch is strided tensors alone, each once; none is kept."""
        self._last = None
        plain = all(type(leaf) is Tensor and leaf.layout is torch.strided for leaf in leaves)
        if plain and len({*map(id, leaves)}) == len(leaves):
            self._last = mark, likeness_test(leaves), program

    def find(self, key: tuple[Any, ...], leaves: Sequence[Any] = ()) -> StepProgram | None:
        """A program for this key, or one of dynamic shapes that was captured for another batch and fits this one."""
        return super().find(key, leaves) or (self._of_other_shape(key, leaves) if self._dynamic else None)

    def _of_other_shape(self, key: tuple[Any, ...], leaves: Sequence[Any]) -> StepProgram | None:
        found = self._fits.get(key)
        if found is not None and found.values.hold(leaves):
            return found
        for other, program in self.items():
            alike = other[:-1] == key[:-1] and program.form.is_dynamic
            if alike and program.form.accepts(leaves) and program.values.hold(leaves):
                if len(self._fits) >= MOST_KNOWN:
                    self._fits.clear()
                self._fits[key] = program
                return program
        return None

    def drop(self, program: StepProgram) -> None:
        """Forget a program, whatever keys it stands under."""
        super().drop(program)
        self._fits.clear()
        self._last = None

    def clear(self) -> None:
        """Forget all."""
        super().clear()
        self._fits.clear()
        self._last = None
