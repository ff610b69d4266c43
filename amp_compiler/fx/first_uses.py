"""Which attributes a capture writes before it reads them: what stood there before does not matter to the program."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from amp_compiler.fx.python_state import PythonState

_MISSING = object()


class _Observed:
    """Stands on a class in the place of an attribute while a module of that class is captured.

    Args:
        name: the attribute.
        original: what stood on the class; `_MISSING` where nothing did.
        first: takes the first use of the attribute of each object, by the `id` of its `__dict__`.
    """

    def __init__(self, name: str, original: Any, first: dict[tuple[int, str], str]) -> None:
        self._name, self.original, self._first = name, original, first

    def _note(self, instance: Any, use: str) -> dict[str, Any]:
        table: dict[str, Any] = instance.__dict__
        self._first.setdefault((id(table), self._name), use)
        return table

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self.original
        table = self._note(instance, "read")
        found = table.get(self._name, self.original)
        if found is _MISSING:
            raise AttributeError(self._name)  # a module then looks among its parameters, buffers and modules
        return found

    def __set__(self, instance: Any, value: Any) -> None:
        self._note(instance, "write")[self._name] = value

    def __delete__(self, instance: Any) -> None:
        if self._name not in self._note(instance, "read"):
            raise AttributeError(self._name)
        del instance.__dict__[self._name]


@contextlib.contextmanager
def written_first(state: PythonState) -> Iterator[set[tuple[int, str]]]:
    """Within it a module is captured; behind it the set holds what was written before it was read.

    Observed is what the user's code both stores and loads by name, of objects whose class the user wrote.

    Args:
        state: what the code of the module reaches.

    Returns:
        Pairs of the `id` of an object's `__dict__` and the name of an attribute, empty until the end.
    """
    found: set[tuple[int, str]] = set()
    first: dict[tuple[int, str], str] = {}
    placed: list[tuple[type, str, Any]] = []
    for owner in {holder.owner for holder in state.holders.values() if holder.owner in state.classes}:
        for name in sorted(state.stored & state.names):
            on_class = next((vars(base)[name] for base in owner.__mro__ if name in vars(base)), _MISSING)
            if hasattr(type(on_class), "__get__"):
                continue  # a method, a property or a slot
            placed.append((owner, name, vars(owner).get(name, _MISSING)))
            setattr(owner, name, _Observed(name, on_class, first))
    try:
        yield found
    finally:
        for owner, name, original in placed:
            delattr(owner, name) if original is _MISSING else setattr(owner, name, original)
        found.update(place for place, use in first.items() if use == "write")
