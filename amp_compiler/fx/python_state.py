"""The Python state behind a model: what its code can reach and names, in modules, objects, containers and closures.

A graph holds tensors and what was done to them. All else that a forward reads is read once, when it is captured, and
all that it writes would be lost. So capture walks over everything that the code can reach by the names that it loads:
what stands there is compared before and after (`fx.attribute_writes`), and at later calls (`forward.value_guards`).

Of code that lies in an installed package, torch's layers among them, only the methods of the model's own modules are
read, each for its own attributes. The user's own code is followed wherever it leads.
"""

from __future__ import annotations

import argparse
import collections
import dis
import enum
import functools
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from amp_compiler.fx.graph import shorten_path

OPENED = 10_000  # items: longer containers are told apart by identity and length alone
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
_FOREIGN = frozenset({"torch", "numpy", "amp_compiler", *sys.stdlib_module_names})
_OPEN_TYPES = (argparse.Namespace, types.SimpleNamespace)  # of the standard library, and full of a user's settings
_PLAIN = (
    int, float, complex, bool, str, bytes, type(None), type(Ellipsis), range, slice, enum.Enum,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip
_STORES = tuple(dis.opmap[name] for name in ("STORE_ATTR", "STORE_GLOBAL", "DELETE_ATTR", "DELETE_GLOBAL"))
_LOADS = frozenset(
    {"LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_SUPER_ATTR", "IMPORT_NAME", "IMPORT_FROM"}
)
_BY_NAME = frozenset({"getattr", "hasattr", "__dict__", "vars", "setattr", "delattr"})
_NO_CODE_OF_A_CALL = frozenset({"__init__", "__new__", "__repr__", "__reduce__", "__getstate__", "__setstate__"})


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text or the like, or a tuple of such: it never changes."""
    return isinstance(value, _PLAIN) or (type(value) is tuple and all(map(is_plain, value)))


class Kind(enum.Enum):
    """What holds values."""

    TABLE = "table"  # the attributes of a module or an object, or globals
    DICT = "dict"
    LIST = "list"
    TUPLE = "tuple"
    SET = "set"
    CELL = "variable"
    CLASS = "class"


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
        if self.kind is Kind.TABLE:
            table = self.value
            return lambda: table[key]
        if self.kind is Kind.CLASS:
            return lambda: getattr(self.value, key)
        return lambda: self.get()[key]

    def name_of(self, key: Any) -> str:
        """How a user calls one of its values."""
        if self.kind is Kind.CELL:
            return self.label
        if self.kind in (Kind.TABLE, Kind.CLASS):
            return f"{self.label}.{key}".removeprefix(".")
        return f"{self.label}[{key!r}]"


def items_of(kind: Kind, value: Any, keys: set[str] | None = None) -> dict[Any, Any]:
    """What a holder of a kind holds, by key."""
    if kind is Kind.CELL:
        try:
            return {"": value.cell_contents}
        except ValueError:  # not assigned yet
            return {}
    if kind is Kind.SET:
        return {"": frozenset(value)}
    if kind in (Kind.LIST, Kind.TUPLE):
        return dict(enumerate(value))
    if kind is Kind.CLASS:
        value = vars(value)
    if keys is not None:
        return {key: value[key] for key in keys if key in value}
    if kind is Kind.TABLE:
        return {key: held for key, held in value.items() if key not in MODULE_TABLES}
    return dict(value)


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
        stored: names that the user's code assigns to.
        classes: the user's classes.
        overwritten: attributes that a capture wrote before it read them, as `fx.first_uses` gives them.
    """

    holders: dict[int, Holder] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    own: dict[type, set[str]] = field(default_factory=dict)
    modules: list[nn.Module] = field(default_factory=list)
    beside: list[nn.Module] = field(default_factory=list)
    functions: set[types.FunctionType] = field(default_factory=set)
    asked: set[str] = field(default_factory=set)
    stored: set[str] = field(default_factory=set)
    classes: set[type] = field(default_factory=set)
    overwritten: set[tuple[int, str]] = field(default_factory=set)

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
        if issubclass(holder.owner, nn.Module):
            return self.names | self.own.get(holder.owner, set())
        return (
            self.names.union(*self.own.values()) if _origin(holder.owner.__module__) is Origin.INSTALLED else self.names
        )

    def absent(self) -> Iterator[tuple[Holder, str]]:
        """Attributes that would change what the code reads if a module or an object came to have them."""
        on_class = {id(h.value): h.keys or set() for h in self.holders.values() if h.kind is Kind.CLASS}
        for holder in self.holders.values():
            if holder.owner is None:
                continue
            names = {"forward"} if issubclass(holder.owner, nn.Module) else set()
            names.update(*(on_class.get(id(base), ()) for base in holder.owner.__mro__))
            if _origin(holder.owner.__module__) is Origin.USER:
                names |= self.asked
            for name in sorted(names - holder.value.keys()):
                if (id(holder.value), name) not in self.overwritten:
                    yield holder, name

    def line_that_stores(self, name: Any) -> str:
        """`file:line` of the user's code that assigns to a name; empty where it is not found."""
        for function in self.functions:
            pending = [function.__code__]
            while pending:
                code = pending.pop()
                for found in dis.get_instructions(code):
                    if found.opcode in _STORES and found.argval == name and found.positions is not None:
                        return f"{shorten_path(code.co_filename)}:{found.positions.lineno}"
                pending += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
        return ""

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


def python_state(model: nn.Module) -> PythonState:
    """Walk over all that the code of a model reaches.

    Args:
        model: the module. Of one of this project's own, such as a loss around its model, all attributes are followed.
    """
    state = PythonState(names={"forward"})
    while True:  # names lead to functions, and functions to names
        known = _size(state)
        state.holders, state.modules, state.beside = {}, [], []
        _Walk(state, model).run()
        if known == _size(state):
            return state


def _size(state: PythonState) -> tuple[int, ...]:
    return len(state.names), len(state.functions), sum(map(len, state.own.values()))


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
            if isinstance(value, (_PLAIN, torch.Tensor)) or id(value) in self.seen:
                continue
            self.seen[id(value)] = value
            self._follow(value, get, label)

    def _follow(self, value: Any, get: Callable[[], Any], label: str) -> None:
        if isinstance(value, nn.Module):
            self._module(value, label)
        elif isinstance(value, types.FunctionType):
            if _origin(str(value.__globals__.get("__name__", ""))) is not Origin.INSTALLED:
                self._function(value)
        elif isinstance(value, types.MethodType):
            self._add(value.__func__, label)
            self._add(value.__self__, label)
        elif isinstance(value, functools.partial):
            self._add(value.func, label)
            self._add(value.args, f"{label}.args")
            self._add(value.keywords, f"{label}.keywords")
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, types.ModuleType):
            if _origin(value.__name__) is Origin.USER:
                self._named(vars(value), self.state.names, value.__name__)
        elif isinstance(value, (list, collections.deque, tuple, dict, set)):
            self._container(value, get, label)
        elif isinstance(value, _OPEN_TYPES) or (
            _origin(type(value).__module__) is not Origin.FOREIGN and hasattr(value, "__dict__")
        ):
            self._class(type(value))
            self._table(vars(value), label, type(value))

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
        for base in cls.__mro__:
            origin = _origin(base.__module__)
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
            functions = _functions_of(member)
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
            pending: list[Any] = list(_functions_of(vars(base)[name]))
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
                names |= names_of(function.__code__)[0]

    def _function(self, function: types.FunctionType) -> None:
        self.state.functions.add(function)
        if _origin(str(function.__globals__.get("__name__", ""))) is Origin.USER:
            loaded, stored, asked = names_of(function.__code__)
            self.state.names |= loaded
            self.state.asked |= asked
            self.state.stored |= stored
            self._named(function.__globals__, set(loaded), "globals")
            if kept := stored & function.__globals__.keys():
                table = function.__globals__
                self._hold(Kind.TABLE, table, lambda: table, "", set(kept))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._hold(Kind.CELL, cell, lambda cell=cell: cell, name)  # type: ignore[misc]
            for content in items_of(Kind.CELL, cell).values():
                self._add(content, name, functools.partial(_content, cell))
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._add(value, f"a default of {function.__qualname__}")


def _item(get: Callable[[], Any], key: Any) -> Any:
    return get()[key]


def _content(cell: Any) -> Any:
    return cell.cell_contents


class Origin(enum.Enum):
    """Where code comes from."""

    USER = "user"
    INSTALLED = "installed"
    FOREIGN = "foreign"  # torch, numpy, the standard library and this project: nothing of the user's stands there


@functools.lru_cache(maxsize=4096)
def _origin(module: str) -> Origin:
    if module.partition(".")[0] in _FOREIGN:
        return Origin.FOREIGN
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    parts = set(file.replace("\\", "/").split("/"))
    return Origin.INSTALLED if parts & {"site-packages", "dist-packages"} else Origin.USER


def _functions_of(member: Any) -> list[types.FunctionType]:
    """The functions behind a member of a class: a method, a property, …; none where it is a value."""
    if isinstance(member, (staticmethod, classmethod)):
        member = member.__func__
    found: list[Any] = [member]
    if isinstance(member, property):
        found = [member.fget, member.fset]
    elif isinstance(member, functools.cached_property):
        found = [member.func]
    return [one for one in found if isinstance(one, types.FunctionType)]


@functools.lru_cache(maxsize=4096)
def names_of(code: types.CodeType) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """The names of globals and attributes that code loads, and those that it stores, in the functions within it too.

    What it may ask for by a text (`getattr(self, "scale", None)`) counts as loaded, and is the third result.
    """
    loaded, stored, asked = set(code.co_names), set(), set()
    if any(store in code.co_code[::2] for store in _STORES):
        found = list(dis.get_instructions(code))
        loaded = {str(one.argval) for one in found if one.opname in _LOADS}
        stored = {str(one.argval) for one in found if one.opcode in _STORES}
    if loaded & _BY_NAME:
        asked = {text for text in code.co_consts if isinstance(text, str) and text.isidentifier()}
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            more = names_of(inner)
            loaded, stored, asked = loaded | more[0], stored | more[1], asked | more[2]
    return frozenset(loaded | asked), frozenset(stored), frozenset(asked)
