"""The walk that finds the Python state behind a model: from names to what stands there, and from functions to names."""

from __future__ import annotations

import argparse
import array
import collections
import collections.abc
import configparser
import contextvars
import ctypes
import functools
import io
import operator
import queue
import random
import threading
import types
import weakref
from collections.abc import Callable, Collection
from multiprocessing.sharedctypes import SynchronizedBase
from typing import Any

import numpy as np
import torch
from torch import nn

from amp_compiler.fx.code_names import CACHED, Origin, functions_of, names_of, origin_of
from amp_compiler.fx.python_state import MODULE_TABLES, OPENED, PLAIN, Holder, Kind, PythonState, items_of

_OPEN_TYPES = (argparse.Namespace, types.SimpleNamespace)  # of the standard library, and full of a user's settings
# Keep what they hold in attributes.
_STORES = (
    collections.UserDict, collections.UserList, collections.UserString, collections.ChainMap,
    configparser.RawConfigParser, threading.Event,
)  # fmt: skip
_KEPT = (*_STORES, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, queue.Queue, threading.local)
# What lies in memory as it does in C.
_ARRAYS = (
    np.ndarray, array.array, bytearray, memoryview, ctypes.Array, ctypes.Structure, ctypes.Union, ctypes._SimpleCData,
)  # fmt: skip
_ENVIRONMENT = frozenset({"environ", "getenv"})
_NO_CODE_OF_A_CALL = frozenset({"__init__", "__new__", "__repr__", "__reduce__", "__getstate__", "__setstate__"})


def python_state(model: nn.Module, asked: Collection[str] = ()) -> PythonState:
    """Walk over all that the code of a model reaches.

    Args:
        model: the module. Of one of this project's own, such as a loss around its model, all attributes are followed.
        asked: names that the code was seen to ask for and that do not stand in it, as `fx.asked_names` gives them.
    """
    state = PythonState(names={"forward", *asked}, asked={*asked})
    while True:  # names lead to functions, and functions to names
        known = _size(state)
        state.holders, state.modules, state.beside = {}, [], []
        state.caches, state.generators, state.arrays, state.iterators = [], [], [], []
        _Walk(state, model).run()
        if known == _size(state):
            state.environment = not _ENVIRONMENT.isdisjoint(state.names)
            return state


def _size(state: PythonState) -> tuple[int, ...]:
    whole = state.reads_tables + state.reads_objects
    return len(state.names), len(state.functions), sum(map(len, state.own.values())), whole


class _Walk:
    """One walk with the names that are known so far; what it finds is added to the state."""

    def __init__(self, state: PythonState, model: nn.Module) -> None:
        self.state = state
        self.seen: dict[int, Any] = {}
        self.decorated: set[types.FunctionType] = set()
        self.pending: list[tuple[Any, Callable[[], Any], str]] = [(model, lambda: model, "")]
        self.paths = {id(module): name for name, module in reversed(list(model.named_modules()))}

    def run(self) -> None:
        """Follow everything."""
        while self.pending:
            value, get, label = self.pending.pop()
            if isinstance(value, (PLAIN, torch.Tensor)) or id(value) in self.seen:
                continue
            self.seen[id(value)] = value
            self._follow(value, get, label)

    def _follow(self, value: Any, get: Callable[[], Any], label: str) -> None:
        if isinstance(value, nn.Module):
            self._module(value, label)
        elif isinstance(value, types.FunctionType):
            if origin_of(str(value.__globals__.get("__name__", ""))) is not Origin.INSTALLED:
                self._function(value)
        elif isinstance(value, types.MethodType):
            self._add(value.__func__, label)
            self._add(value.__self__, label)
        elif isinstance(value, functools.partial):
            self._add(value.func, label)
            self._add(value.args, f"{label}.args")
            self._add(value.keywords, f"{label}.keywords")
        elif isinstance(value, CACHED):
            self.state.caches.append(value)
            self._add(value.__wrapped__, label)
        elif isinstance(value, (random.Random, np.random.Generator, np.random.RandomState)):
            self.state.generators.append(value)
        elif isinstance(value, _ARRAYS):
            self.state.arrays.append(value)
        elif isinstance(value, collections.abc.Iterator) and not isinstance(value, (io.IOBase, *_KEPT)):
            self.state.iterators.append(label)
        elif isinstance(value, contextvars.ContextVar):
            self._hold(Kind.CONTEXT, value, lambda: value, label)
            self._add(value.get(None), label, functools.partial(value.get, None))
        elif isinstance(value, SynchronizedBase):  # of `multiprocessing.Value` and `Array`
            self._add(value.get_obj(), label)
        elif isinstance(value, (operator.attrgetter, operator.methodcaller)):
            self._names_of(value)
        elif isinstance(value, (weakref.ref, *_KEPT)):
            self._held_within(value, label)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, types.ModuleType):
            if origin_of(value.__name__) is Origin.USER:
                self._named(vars(value), self.state.names, value.__name__)
        elif isinstance(value, (list, collections.deque, tuple, dict, set)):
            self._container(value, get, label)
        elif isinstance(value, _OPEN_TYPES) or (
            origin_of(type(value).__module__) is not Origin.FOREIGN and hasattr(value, "__dict__")
        ):
            self._class(type(value))
            self._table(vars(value), label, type(value), every=isinstance(value, _STORES))
        elif hasattr(value, "__dict__") and type(value).__module__.partition(".")[0] != "amp_compiler":
            self._foreign(value, label)
        if slots := _slots(type(value)):
            self._class(type(value))
            self._attributes(value, label, slots & self.state.names)

    def _names_of(self, getter: Any) -> None:
        """The attributes that something of `operator` asks for."""
        asked = getter.__reduce__()[1]
        texts = [text for text in asked if isinstance(text, str)]
        self.state.names |= {name for text in texts for name in text.split(".")}

    def _foreign(self, value: Any, label: str) -> None:
        """The attributes that code names of an object of torch's or Python's, such as an optimizer's groups."""
        table, names = vars(value), self.state.names
        if isinstance(value, torch.optim.lr_scheduler.LRScheduler) and "get_last_lr" in names:
            names = names | {"_last_lr"}
        if keys := {name for name in names & table.keys() if not isinstance(table[name], types.ModuleType)}:
            self._hold(Kind.TABLE, table, lambda: table, label, keys)
            for key in sorted(keys):
                self._add(table[key], f"{label}.{key}".removeprefix("."), functools.partial(table.get, key))

    def _held_within(self, value: Any, label: str) -> None:
        """What stands behind a reference, in a variable of a thread, or in a container of Python's."""
        if isinstance(value, weakref.ref):
            self._add(value(), label)
        elif isinstance(value, threading.local):
            self._class(type(value))
            self._attributes(value, label, set(self.state.names))
        else:
            self._table(vars(value), label, type(value), every=True)

    def _attributes(self, value: Any, label: str, names: set[str]) -> None:
        self._hold(Kind.OBJECT, value, lambda: value, label, names)
        for name in sorted(names):
            if (held := getattr(value, name, None)) is not None:
                self._add(held, f"{label}.{name}", functools.partial(getattr, value, name))

    def _add(self, value: Any, label: str, get: Callable[[], Any] | None = None) -> None:
        self.pending.append((value, get or (lambda: value), label))

    def _hold(self, kind: Kind, value: Any, get: Callable[[], Any], label: str, keys: set[str] | None = None) -> None:
        holder = self.state.holders.setdefault(id(value), Holder(kind, value, get, label, keys))
        if keys is not None and holder.keys is not None:
            holder.keys |= keys

    def _module(self, module: nn.Module, label: str) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            return  # no Python code, and no attributes of its own
        self.state.modules.append(module)
        if id(module) not in self.paths:
            self.state.beside.append(module)
            for table in (module._parameters, module._buffers):
                self._hold(Kind.TABLE, table, lambda table=table: table, label)  # type: ignore[misc]
        self._class(type(module))
        own = type(module).__module__.partition(".")[0] == "amp_compiler"
        self._table(module.__dict__, self.paths.get(id(module), label), type(module), every=own)
        if "forward" in module.__dict__:  # put in the place of the method of its class
            self._add(module.__dict__["forward"], "forward")
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for hook in hooks.values():
                self._add(hook, getattr(hook, "__name__", "hook"))
        for name, child in module._modules.items():
            self._add(child, f"{label}.{name}".removeprefix("."))

    def _table(self, table: dict[str, Any], label: str, owner: type, every: bool = False) -> None:
        self._hold(Kind.TABLE, table, lambda: table, label)
        holder = self.state.holders[id(table)]
        holder.owner = None if every else owner
        read = self.state.read(holder)
        for key in table if read is None else read & table.keys():
            if key not in MODULE_TABLES:
                self._add(table[key], f"{label}.{key}".removeprefix("."), functools.partial(table.get, key))

    def _named(self, table: dict[str, Any], names: set[str], label: str) -> None:
        """Globals, or the names of a Python module."""
        keys = {name for name in names if name in table and not isinstance(table[name], types.ModuleType)}
        if keys:
            self._hold(Kind.TABLE, table, lambda: table, "" if label == "globals" else label, set(keys))
        for name in names & table.keys():
            self._add(table[name], name, functools.partial(table.get, name))

    def _container(self, value: Any, get: Callable[[], Any], label: str) -> None:
        kind = (
            Kind.DICT if isinstance(value, dict) else Kind.SET if isinstance(value, set)
            else Kind.TUPLE if isinstance(value, tuple) else Kind.LIST
        )  # fmt: skip
        self._hold(kind, value, get, label)
        if kind is Kind.SET or len(value) > OPENED:
            return
        for key, item in value.items() if kind is Kind.DICT else enumerate(value):
            self._add(item, f"{label}[{key!r}]", functools.partial(_item, get, key))

    def _class(self, cls: type) -> None:
        """The methods of a class that the code names, and the values that stand on the class itself."""
        if type(cls) is not type:
            self._class(type(cls))
        for base in cls.__mro__:
            origin = origin_of(base.__module__)
            if base is nn.Module or (origin is Origin.FOREIGN and not issubclass(base, nn.Module)):
                continue
            if origin is Origin.USER:
                self._own_class(base)
            else:
                self._installed_class(cls, base)

    def _own_class(self, cls: type) -> None:
        self.state.classes.add(cls)
        keys = set()
        for name, member in list(vars(cls).items()):
            special = name.startswith("__") and name.endswith("__")
            if name not in self.state.names and (not special or name in _NO_CODE_OF_A_CALL):
                continue
            functions = functions_of(member)
            if isinstance(member, CACHED):
                self.state.caches.append(member)
            for function in functions:
                self._function(function)
            if not functions and not special:
                keys.add(name)
                self._add(member, f"{cls.__name__}.{name}", functools.partial(getattr, cls, name, None))
        if keys:
            self._hold(Kind.CLASS, cls, lambda: cls, cls.__name__, keys)

    def _installed_class(self, cls: type, base: type) -> None:
        names = self.state.own.setdefault(cls, {"forward"})
        for name in names & vars(base).keys():
            pending: list[Any] = list(functions_of(vars(base)[name]))
            while pending:  # a decorated method stands in a cell of what decorates it
                function = pending.pop()
                if function not in self.decorated:
                    self.decorated.add(function)
                    pending += [
                        held
                        for cell in function.__closure__ or ()
                        for held in items_of(Kind.CELL, cell).values()
                        if isinstance(held, types.FunctionType)
                    ]
                names |= names_of(function.__code__).loaded

    def _function(self, function: types.FunctionType) -> None:
        self.state.functions.add(function)
        if named := self.state.names & vars(function).keys():
            self._named(vars(function), named, function.__qualname__)
        if origin_of(str(function.__globals__.get("__name__", ""))) is Origin.USER:
            found, table = names_of(function.__code__), function.__globals__
            self.state.names |= found.loaded
            self.state.asked |= found.asked
            self.state.reads_tables |= found.reads_tables
            self.state.reads_objects |= found.reads_objects
            self.state.stored |= found.stored
            asked = found.asked if found.asks_globals else frozenset()
            self._named(table, set(found.of_globals | asked), "globals")
            if kept := found.to_globals & table.keys():
                self._hold(Kind.TABLE, table, lambda: table, "", set(kept))
            if absent := asked - table.keys():
                self._hold(Kind.TABLE, table, lambda: table, "", set())
                self.state.absent_globals.setdefault(id(table), set()).update(absent)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._hold(Kind.CELL, cell, lambda cell=cell: cell, name)  # type: ignore[misc]
            for content in items_of(Kind.CELL, cell).values():
                self._add(content, name, functools.partial(_content, cell))
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._add(value, f"a default of {function.__qualname__}")


def _slots(cls: type) -> set[str]:
    """The names in the `__slots__` of a user's class."""
    if origin_of(cls.__module__) is Origin.FOREIGN:
        return set()
    names: list[str] = []
    for base in cls.__mro__:
        slots = vars(base).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
    return {name for name in names if not name.startswith("__")}


def _item(get: Callable[[], Any], key: Any) -> Any:
    return get()[key]


def _content(cell: Any) -> Any:
    return cell.cell_contents
