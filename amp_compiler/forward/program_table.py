"""`ProgramTable`: captured programs by the form of a call, and by the Python values that they were captured with."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from amp_compiler.forward.value_guards import ValueGuards


class Guarded(Protocol):
    """A program that holds for certain Python values."""

    @property
    def values(self) -> ValueGuards:
        """The values that it was captured with."""


P = TypeVar("P", bound=Guarded)


class ProgramTable(Generic[P]):
    """Programs by key. Under one key there may be several, captured with different Python values."""

    def __init__(self) -> None:
        self._programs: dict[Hashable, list[P]] = {}

    def find(self, key: Hashable) -> P | None:
        """A program for this key that was captured with the values of now."""
        for program in self._programs.get(key, ()):
            if program.values.hold():
                return program
        return None

    def add(self, key: Hashable, program: P) -> None:
        """Put a program under a key; it is asked before those that are there."""
        programs = self._programs.setdefault(key, [])
        if program not in programs:
            programs.insert(0, program)

    def drop(self, program: P) -> None:
        """Forget a program, whatever keys it stands under."""
        for programs in self._programs.values():
            if program in programs:
                programs.remove(program)

    def items(self) -> Iterator[tuple[Any, P]]:
        """All programs with their keys."""
        return iter([(key, program) for key, programs in self._programs.items() for program in programs])

    def values(self) -> list[P]:
        """All programs, each as often as it has keys."""
        return [program for _, program in self.items()]

    def clear(self) -> None:
        """Forget all."""
        self._programs.clear()

    def __len__(self) -> int:
        return sum(map(len, self._programs.values()))
