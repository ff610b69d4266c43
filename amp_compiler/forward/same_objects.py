"""`SameObjects`: one generated function that says whether tables still hold the very objects that they held."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any

from amp_compiler.fx.compiled_look import Look, available

_LITERALS = (True, False, None)


class SameObjects:
    """Collects places with the objects that stand there, and makes one test of them, some 20 ns a place.

    Everything is compared by identity. What is named here is kept alive, so that no other object gets its `id`.

    Args:
        compiled: whether compiled code compares lists and tables, where there is any: it is four times as fast, and
            takes a microsecond to call.

    Example:
        >>> table = {"a": 1000}
        >>> same = SameObjects()
        >>> same.item(table, "a")
        >>> test = same.test()
        >>> test()
        True
        >>> table["a"] = int("1000")
        >>> test()
        False
    """

    def __init__(self, compiled: bool = False) -> None:
        self._look = Look() if compiled and available() else None
        self._terms: list[str] = []
        self._values: dict[str, Any] = {"is_": is_, "chain": chain.from_iterable, "values": dict.values}
        self._names: dict[int, str] = {}

    def item(self, table: Mapping[Any, Any], key: Any) -> None:
        """The object under a key of a dict."""
        self._terms.append(f"{self._name(table)}[{self._key(key)}] is {self._name(table[key])}")

    def attribute(self, owner: Any, name: str) -> None:
        """The object that is an attribute, found as Python finds it."""
        self._terms.append(f"{self._name(owner)}.{name} is {self._name(getattr(owner, name))}")

    def absent(self, table: Mapping[Any, Any], key: Any) -> None:
        """A key that a dict does not have."""
        self._terms.append(f"{self._key(key)} not in {self._name(table)}")

    def items(self, values: Sequence[Any]) -> None:
        """The items of a list, and how many there are."""
        if self._look is not None and isinstance(values, list):
            self._look.items(values)
            return
        self._terms.append(self._all_same(self._name(values), values))

    def table(self, table: Mapping[Any, Any]) -> None:
        """All keys and values of a dict, in their order."""
        if self._look is not None and self._look.takes(table):
            self._look.table(table)
            return
        self._terms += [self._all_same(self._name(table), list(table)), self._values_same(table)]

    def values_of(self, tables: Sequence[dict[Any, Any]]) -> None:
        """The values of many dicts, one behind the other: for a great number it touches less memory than `item`."""
        if self._look is not None and all(map(self._look.takes, tables)):
            for table in tables:
                self._look.table(table)
            return
        values = [*chain.from_iterable(map(dict.values, tables))]
        now = f"[*chain(map(values, {self._name(list(tables))}))]"
        self._terms.append(f"len(n := {now}) == {len(values)} and all(map(is_, n, {self._name(values)}))")

    def tables_of(self, owner: Any, names: Sequence[str], plain: Sequence[str]) -> None:
        """Dicts that are attributes of an object: the keys of each, in their order, and what stands there.

        Args:
            owner: an object with attributes in a dict of its own.
            names: of the dicts; other dicts with the same objects in them may do.
            plain: attributes beside them.
        """
        own = vars(owner)
        if self._look is not None and all(self._look.takes(own[name]) for name in names):
            self._look.attributes(owner, [*plain, *names])
            for name in names:
                self._look.table(own[name])
            return
        terms = [f"d[{name!r}] is {self._name(own[name])}" for name in plain]
        for name in names:
            if not own[name]:
                terms.append(f"not d[{name!r}]")
                continue
            terms.append(f"[*(t := d[{name!r}])] == {self._name(list(own[name]))}")
            terms += [f"t[{self._key(key)}] is {self._name(value)}" for key, value in own[name].items()]
        if terms:
            terms[0] = terms[0].replace("d[", f"(d := {self._name(owner)}.__dict__)[", 1)
        self._terms += terms

    def test(self) -> Callable[[], bool]:
        """The function; false too where something is gone."""
        if self._look is not None:
            self._values["look"] = self._look.test()
            self._terms.insert(0, "look()")
        source = (
            "def same():\n    try:\n        return " + (" and ".join(self._terms) or "True") + "\n"
            "    except (KeyError, IndexError, AttributeError, ValueError):\n        return False"
        )
        exec(compile(source, "<same objects>", "exec"), self._values)
        same: Callable[[], bool] = self._values["same"]
        return same

    def cell(self, cell: Any) -> None:
        """The object that a variable of a closure holds."""
        self._terms.append(f"{self._name(cell)}.cell_contents is {self._name(cell.cell_contents)}")

    def _values_same(self, table: Mapping[Any, Any]) -> str:
        return f"all(map(is_, {self._name(table)}.values(), {self._name(list(table.values()))}))"

    def _all_same(self, shown: str, values: Sequence[Any]) -> str:
        return f"len({shown}) == {len(values)} and all(map(is_, {shown}, {self._name(list(values))}))"

    def _key(self, key: Any) -> str:
        return repr(key) if type(key) in (str, int) else self._name(key)

    def _name(self, value: Any) -> str:
        if any(value is one for one in _LITERALS):
            return repr(value)
        name = self._names.get(id(value))
        if name is None:
            name = self._names[id(value)] = f"v{len(self._names)}"
            self._values[name] = value
        return name
