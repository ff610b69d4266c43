"""`StepPrograms`: what a training step has captured, found again for batches of other shapes too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amp_compiler.forward.program_table import ProgramTable
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

    def clear(self) -> None:
        """Forget all."""
        super().clear()
        self._fits.clear()
