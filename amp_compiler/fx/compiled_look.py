"""`Look`: one call of compiled code that says whether Python objects stand, and tensors lie, where they did.

It takes some 5 ns a place, where Python takes 15 to 60. Where it cannot be compiled, Python looks.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import platform
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from amp_compiler.fx.torch_private import address_function
from amp_compiler.ops.cpu import build

_FUNCTIONS = (
    *("PyObject_GenericGetDict", "PyDict_GetItem", "PyDict_Next", "PyList_Size", "PyList_GetItem", "Py_DecRef"),
)  # of Python's stable interface, in the order of `Functions` in look.cpp
_FLAGS = ("-std=c++17", "-O2", "-shared", "-fPIC")


class _Section(ctypes.Structure):
    _fields_ = (
        ("count", ctypes.c_int64), *((name, ctypes.c_void_p) for name in ("owners", "ends", "keys", "values"))
    )  # fmt: skip


class _Looks(ctypes.Structure):
    _fields_ = tuple((name, _Section) for name in ("attributes", "tables", "lists", "tensors"))


class _Places:
    """What is to stand where, of one kind."""

    def __init__(self) -> None:
        self.owners: list[Any] = []
        self.ends: list[int] = []
        self.keys: list[Any] = []
        self.values: list[Any] = []

    def add(self, owner: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
        self.owners.append(owner)
        self.keys += keys
        self.values += values
        self.ends.append(len(self.values))

    def section(self, kept: list[Any], values: Sequence[int] | None = None) -> _Section:
        """As the compiled code reads it.

        Args:
            kept: takes what must live as long as it is read.
            values: in place of the objects' own addresses.
        """
        words = [list(map(id, self.owners)), self.ends, list(map(id, self.keys)), values or list(map(id, self.values))]
        arrays = [(ctypes.c_int64 * len(some))(*some) for some in words]
        kept += [*arrays, self.owners, self.keys, self.values]
        return _Section(len(self.owners), *map(ctypes.addressof, arrays))


class Look:
    """Collects places with what stands there, and makes one test of them. What is named is kept alive.

    Example:
        >>> table = {"a": 1000}
        >>> look = Look()
        >>> look.table(table)
        >>> test = look.test()
        >>> test()
        True
        >>> table["a"] = int("1000")
        >>> test()
        False
    """

    def __init__(self) -> None:
        self._attributes, self._tables, self._lists, self._tensors = (_Places() for _ in range(4))

    def attributes(self, owner: Any, names: Sequence[str]) -> None:
        """What stands in the attributes' own dict of an object, under names that it has."""
        self._attributes.add(owner, names, [vars(owner)[name] for name in names])

    def table(self, table: Mapping[Any, Any]) -> None:
        """All keys and values of a dict that `takes` takes, in their order."""
        self._tables.add(table, list(table), list(table.values()))

    def items(self, values: list[Any]) -> None:
        """The items of a list, and how many there are."""
        self._lists.add(values, [None] * len(values), values)

    def addresses(self, tensors: Sequence[torch.Tensor]) -> None:
        """Where strided tensors lie in memory."""
        for tensor in tensors:
            self._tensors.add(tensor, [], [tensor.data_ptr()])

    @staticmethod
    def takes(table: Mapping[Any, Any]) -> bool:
        """Whether the order of a dict is that in which it is walked over."""
        return type(table) in (dict, defaultdict) or (isinstance(table, dict) and not table)

    def test(self) -> Callable[[], bool]:
        """The function; it raises AttributeError where an object has lost its dict. Only where it is `available`."""
        kept: list[Any] = []
        looks = _Looks(
            *(one.section(kept) for one in (self._attributes, self._tables, self._lists)),
            self._tensors.section(kept, self._tensors.values),
        )
        compiled = _compiled()
        if compiled is None:
            raise RuntimeError("there is no compiled look")
        function, functions = compiled
        given = ctypes.byref(functions), ctypes.byref(looks)
        return lambda kept=kept: function(*given) == 1  # type: ignore[misc]


def available() -> bool:
    """Whether there is compiled code; it is compiled at the first call on a machine, in about a second."""
    return _compiled() is not None


@functools.cache
def _compiled() -> tuple[Any, Any] | None:
    with_lock = getattr(sys, "_is_gil_enabled", lambda: True)()
    address = address_function()
    if platform.python_implementation() != "CPython" or not with_lock or not address:
        return None
    library = build.compiled("look", __package__, _FLAGS, logging.INFO, "every step looks at its tensors in Python")
    if library is None:
        return None
    found = [ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value for name in _FUNCTIONS]
    functions = (ctypes.c_void_p * (len(found) + 1))(*found, address)
    # With the interpreter's lock, and with its errors raised.
    kind = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    return kind(ctypes.cast(library.look, ctypes.c_void_p).value or 0), functions


def address_test(tensors: Sequence[torch.Tensor]) -> Callable[[], bool]:
    """A quick test that tensors lie in memory where they lie now."""
    if available():
        look = Look()
        look.addresses(tensors)
        return look.test()
    given, addresses = list(tensors), [tensor.data_ptr() for tensor in tensors]
    return lambda: list(map(torch.Tensor.data_ptr, given)) == addresses
