"""The Python state behind a model: what its code can reach and names, in modules, objects, containers and closures.

A graph holds tensors and what was done to them. All else that a forward reads is read once, when it is captured, and
all that it writes would be lost. So capture walks over everything that the code can reach by the names that it loads:
what stands there is compared before and after (`fx.attribute_writes`), and at later calls (`forward.value_guards`).

Of code that lies in an installed package, torch's layers among them, only the methods of the model's own modules are
read, each for its own attributes. The user's own code is followed wherever it leads.
"""

from __future__ import annotations

import ctypes
import enum
import inspect
import os
import types
from array import array as Array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from amp_compiler.fx.code_names import Origin, line_that_stores, origin_of

OPENED = 10_000  # items: what is in longer containers is not looked into
COMPARED = 1 << 24  # bytes: of longer arrays nothing is compared
# What torch itself keeps in a module; the lists of a recurrent layer follow its parameters.
MODULE_TABLES = frozenset(
    {
        *nn.Module().__dict__,
        "_initialize_hook",
        "_load_hook",
        "_compiled_call_impl",
        "_flat_weights",
        "_flat_weight_refs",
    }
)
PLAIN = (
    int, float, complex, bool, str, bytes, type(None), type(Ellipsis), range, slice, enum.Enum,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip


def content_of(array: Any) -> bytes:
    """What an array of NumPy's, Python's or C's holds; empty for a very large one, and for one of objects."""
    if isinstance(array, np.ndarray):
        return array.tobytes() if array.nbytes <= COMPARED and not array.dtype.hasobject else b""
    memory = memoryview(array)
    return memory.tobytes() if memory.nbytes <= COMPARED else b""


def fill(array: Any, content: bytes) -> None:
    """Put into an array what `content_of` gave of it."""
    if isinstance(array, np.ndarray):
        array[...] = np.frombuffer(content, array.dtype).reshape(array.shape)
    elif isinstance(array, memoryview | bytearray | Array):
        memoryview(array).cast("B")[:] = content
    else:
        ctypes.memmove(ctypes.addressof(array), content, len(content))


def environment() -> Any:
    """The variables of the process, to be compared or copied; cheaper than `os.environ`, which decodes each."""
    return getattr(os.environ, "_data", os.environ)


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text or the like, or a tuple of such: it never changes."""
    return isinstance(value, PLAIN) or (type(value) is tuple and all(map(is_plain, value)))


class Kind(enum.Enum):
    """What holds values."""

    TABLE = "table"  # the attributes of a module or an object, or globals
    DICT = "dict"
    LIST = "list"
    TUPLE = "tuple"
    SET = "set"
    CELL = "variable"
    CLASS = "class"
    CONTEXT = "context variable"
    OBJECT = "object"  # the attributes of one that has no table of them, such as `__slots__`


BY_NAME = (Kind.CLASS, Kind.OBJECT)  # read and written by `getattr` and `setattr`
_UNSET = object()  # what a context variable without a value gives


@dataclass(eq=False)
class Holder:
    """Something that holds values, reached by code.

    Args:
        kind: what it is.
        value: the dict, list, cell, ….
        get: gives what stands there today: another list, where the attribute was given another one.
        label: how a user calls it, such as `encoder.maps`.
        keys: the keys that code names, of globals and classes; `None` for all.
        owner: the class of the module or object whose attributes these are.
    """

    kind: Kind
    value: Any
    get: Callable[[], Any]
    label: str
    keys: set[str] | None = None
    owner: type | None = None

    def items(self) -> dict[Any, Any]:
        """What it holds now, by key; the tables that every module has left out."""
        return items_of(self.kind, self.value, self.keys)

    def getter(self, key: Any) -> Callable[[], Any]:
        """A quick way to what stands at a key today."""
        if self.kind is Kind.CELL:
            return lambda: self.value.cell_contents
        if self.kind is Kind.CONTEXT:
            return partial(self.value.get, _UNSET)
        if self.kind is Kind.TABLE:
            table = self.value
            return lambda: table[key]
        if self.kind in BY_NAME:
            return lambda: getattr(self.value, key)
        return lambda: self.get()[key]

    def name_of(self, key: Any) -> str:
        """How a user calls one of its values."""
        if self.kind in (Kind.CELL, Kind.CONTEXT):
            return self.label
        if self.kind in (Kind.TABLE, *BY_NAME):
            return f"{self.label}.{key}".removeprefix(".")
        return f"{self.label}[{key!r}]"


def items_of(kind: Kind, value: Any, keys: set[str] | None = None) -> dict[Any, Any]:
    """What a holder of a kind holds, by key."""
    if kind is Kind.CELL:
        try:
            return {"": value.cell_contents}
        except ValueError:  # not assigned yet
            return {}
    if kind is Kind.CONTEXT:
        return {"": value.get(_UNSET)}
    if kind is Kind.SET:
        return dict.fromkeys(value)
    if kind in (Kind.LIST, Kind.TUPLE):
        return dict(enumerate(value))
    if kind is Kind.OBJECT:
        return {name: getattr(value, name) for name in keys or () if _is_held(value, name)}
    if kind is Kind.CLASS:
        value = vars(value)
    if keys is not None:
        return {key: value[key] for key in keys if key in value}
    if kind is Kind.TABLE:
        return {key: held for key, held in value.items() if key not in MODULE_TABLES}
    return dict(value)


def _is_held(value: Any, name: str) -> bool:
    """Whether an object holds an attribute; a method, or what a property gives, is made anew at every read."""
    of_class = inspect.getattr_static(type(value), name, None)
    made = hasattr(of_class, "__get__") and not isinstance(of_class, types.MemberDescriptorType)
    return hasattr(value, name) and not made


def put(holder: Holder, key: Any, value: Any) -> None:
    """Assign to what stands at a key of a holder today."""
    target = holder.get()
    if holder.kind is Kind.CELL:
        target.cell_contents = value
    elif holder.kind is Kind.CONTEXT:
        target.set(value)
    elif holder.kind in BY_NAME:
        setattr(target, key, value)
    else:
        target[key] = value


@dataclass
class PythonState:
    """What the code behind a model reaches.

    Args:
        holders: all that holds values, by the `id` of what holds them.
        names: every name that the user's code loads, of a global or of an attribute.
        own: names that the methods of an installed class load, by that class.
        modules: the modules, with those that only a closure or a global holds.
        beside: these alone.
        functions: the functions whose code was read.
        asked: names among those that the code asks for by a text, as `getattr` does.
        absent_globals: names that code asks for by a text among globals where there are none such, by `id` of these.
        stored: names that the user's code assigns to.
        classes: the user's classes.
        caches: functions that keep their results (`functools.lru_cache`).
        generators: of random numbers, Python's and NumPy's.
        arrays: of NumPy's, Python's and C's, with numbers that can be read one by one.
        reads_tables: whether the user's code reads attributes by names that do not stand in it.
        reads_objects: the same for objects that are no modules.
        environment: whether it names `os.environ`.
        iterators: what is used up by reading it, by its label.
        overwritten: attributes that a capture wrote before it read them, as `fx.first_uses` gives them.
        numbers: what became an input of the graph, by the `id` of what holds it and the key, see `fx.numbers`.
        tensors: those that a capture made numbers of, see `fx.values_read`.
    """

    holders: dict[int, Holder] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    own: dict[type, set[str]] = field(default_factory=dict)
    modules: list[nn.Module] = field(default_factory=list)
    beside: list[nn.Module] = field(default_factory=list)
    functions: set[types.FunctionType] = field(default_factory=set)
    asked: set[str] = field(default_factory=set)
    absent_globals: dict[int, set[str]] = field(default_factory=dict)
    stored: set[str] = field(default_factory=set)
    classes: set[type] = field(default_factory=set)
    caches: list[Any] = field(default_factory=list)
    generators: list[Any] = field(default_factory=list)
    arrays: list[Any] = field(default_factory=list)
    reads_tables: bool = False
    reads_objects: bool = False
    environment: bool = False
    iterators: list[str] = field(default_factory=list)
    overwritten: set[tuple[int, str]] = field(default_factory=set)
    numbers: set[tuple[int, Any]] = field(default_factory=set)
    tensors: list[torch.Tensor] = field(default_factory=list)

    def loaded(self) -> Iterator[tuple[Holder, Any, Any]]:
        """Every value that the code may load, with its holder and key."""
        for holder in self.holders.values():
            read = self.read(holder)
            for key, value in holder.items().items():
                if (read is None or key in read) and (id(holder.value), key) not in self.overwritten:
                    yield holder, key, value

    def read(self, holder: Holder) -> set[str] | None:
        """The keys of a holder that code may load; `None` for all."""
        if holder.kind is not Kind.TABLE or holder.keys is not None or holder.owner is None:
            return None
        is_module = issubclass(holder.owner, nn.Module)
        whole = self.reads_tables or (self.reads_objects and not is_module)
        if whole and origin_of(holder.owner.__module__) is Origin.USER:
            return None
        if is_module:
            return self.names | self.own.get(holder.owner, set())
        return (
            self.names.union(*self.own.values())
            if origin_of(holder.owner.__module__) is Origin.INSTALLED
            else self.names
        )

    def absent(self) -> Iterator[tuple[Holder, str]]:
        """Names that would change what the code reads if a module, an object or the globals came to have them."""
        on_class = {id(h.value): h.keys or set() for h in self.holders.values() if h.kind is Kind.CLASS}
        for holder in self.holders.values():
            if holder.owner is None:
                yield from ((holder, name) for name in sorted(self.absent_globals.get(id(holder.value), ())))
                continue
            names = {"forward"} if issubclass(holder.owner, nn.Module) else set()
            names.update(*(on_class.get(id(base), ()) for base in holder.owner.__mro__))
            if origin_of(holder.owner.__module__) is Origin.USER:
                names |= self.asked
            for name in sorted(names - holder.value.keys()):
                if (id(holder.value), name) not in self.overwritten:
                    yield holder, name

    def line_that_stores(self, name: Any) -> str:
        """`file:line` of the user's code that assigns to a name; empty where it is not found."""
        return next(filter(None, (line_that_stores(function.__code__, name) for function in self.functions)), "")

    def place_of(self, tensor: torch.Tensor) -> tuple[Holder, Any] | None:
        """Where a tensor stands: the tensor itself, or a parameter over the same memory."""
        for holder in self.holders.values():
            for key, value in holder.items().items():
                if value is tensor or (isinstance(value, nn.Parameter) and _shares_all(value, tensor)):
                    return holder, key
        return None


def _shares_all(parameter: nn.Parameter, tensor: torch.Tensor) -> bool:
    if parameter.layout is not torch.strided or tensor.layout is not torch.strided:
        return False
    same = parameter.shape == tensor.shape and parameter.stride() == tensor.stride()
    return same and parameter.numel() > 0 and parameter.data_ptr() == tensor.data_ptr()
