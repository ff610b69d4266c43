"""`ProgramTable`: captured programs by the form of a call, and by the Python values that they were captured with."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from amp_compiler.forward.shape_guards import InputForm
from amp_compiler.forward.signature import leaves_key, without_numbers
from amp_compiler.forward.value_guards import ValueGuards


class Guarded(Protocol):
    """A program that holds for certain Python values."""

    @property
    def values(self) -> ValueGuards:
        """The values that it was captured with."""

    @property
    def form(self) -> InputForm:
        """Which inputs it can be used for."""


P = TypeVar("P", bound=Guarded)


class ProgramTable(Generic[P]):
    """Programs by key. Under one key there may be several, captured with different Python values."""

    def __init__(self) -> None:
        self._programs: dict[Hashable, list[P]] = {}
        self._any_number = False

    def find(self, key: tuple[Any, ...], leaves: Sequence[Any] = ()) -> P | None:
        """A program for this key that was captured with the values of now.

        Args:
            key: ends with the form of the inputs.
            leaves: these; programs for any `float` among them will do as well.
        """
        if found := self._found(key, leaves):
            return found
        if self._any_number and any(type(leaf) is float for leaf in leaves):
            return self._found((*key[:-1], leaves_key(without_numbers(leaves))), leaves)
        return None

    def _found(self, key: tuple[Any, ...], leaves: Sequence[Any]) -> P | None:
        for program in self._programs.get(key, ()):
            if program.values.hold(leaves):
                return program
        return None

    def changed(self) -> set[str]:
        """The numbers that are no longer what they were when some program was captured, by their names."""
        return {name for program in self.values() for name in program.values.changed()}

    def add(self, key: tuple[Any, ...], program: P, leaves: Sequence[Any] = ()) -> None:
        """Put a program under a key; it is asked before those that are there.

        Args:
            key: as for `find`.
            program: the program.
            leaves: the inputs that it was captured for.
        """
        if program.form.any_number:
            self._any_number, key = True, (*key[:-1], leaves_key(without_numbers(leaves)))
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
