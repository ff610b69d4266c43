"""What code names: read from its instructions, without running it."""

from __future__ import annotations

import dis
import enum
import functools
import sys
import types
from typing import Any, NamedTuple

from amp_compiler.fx.graph import shorten_path

_FOREIGN = frozenset({"torch", "numpy", "amp_compiler", *sys.stdlib_module_names})
_STORES = tuple(dis.opmap[name] for name in ("STORE_ATTR", "STORE_GLOBAL", "DELETE_ATTR", "DELETE_GLOBAL"))
_LOADS = frozenset(
    {"LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_SUPER_ATTR", "IMPORT_NAME", "IMPORT_FROM"}
)
_LOADS_OF_GLOBALS = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
_STORES_TO_GLOBALS = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL"})
_GLOBALS_BY_NAME = frozenset({"globals", "eval", "exec"})
_BY_NAME = frozenset(
    {"getattr", "hasattr", "__dict__", "vars", "setattr", "delattr", "__getattribute__", "attrgetter", "methodcaller"}
)
# What reads the attributes of an object one and all, or by names that no code shows: of any, and of plain objects.
_TABLES = frozenset({"__dict__", "vars", "attrgetter"})
_WHOLE_OBJECTS = frozenset({"asdict", "astuple", "deepcopy"})
_WHOLE_AS_GLOBALS = frozenset({"replace", "copy", "dataclasses"})
CACHED = functools._lru_cache_wrapper


class Origin(enum.Enum):
    """Where code comes from."""

    USER = "user"
    INSTALLED = "installed"
    FOREIGN = "foreign"  # torch, numpy, the standard library and this project: nothing of the user's stands there


@functools.lru_cache(maxsize=4096)
def origin_of(module: str) -> Origin:
    """Where the code of a Python module comes from, by the module's name."""
    if module.partition(".")[0] in _FOREIGN:
        return Origin.FOREIGN
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    parts = set(file.replace("\\", "/").split("/"))
    return Origin.INSTALLED if parts & {"site-packages", "dist-packages"} else Origin.USER


def functions_of(member: Any) -> list[types.FunctionType]:
    """The functions behind a member of a class: a method, a property, …; none where it is a value."""
    if isinstance(member, (staticmethod, classmethod)):
        member = member.__func__
    if isinstance(member, CACHED):
        member = member.__wrapped__
    found: list[Any] = [member]
    if isinstance(member, property):
        found = [member.fget, member.fset]
    elif isinstance(member, functools.cached_property):
        found = [member.func]
    return [one for one in found if isinstance(one, types.FunctionType)]


class Names(NamedTuple):
    """The names in some code, and in the functions within it.

    Args:
        loaded: of globals and of attributes that it loads, `asked` among them.
        stored: of globals and of attributes that it assigns to or deletes.
        asked: what it may ask for by a text, as in `getattr(self, "scale", None)` and `globals()["scale"]`.
        of_globals: of globals alone, that it loads.
        to_globals: of globals alone, that it assigns to or deletes.
        asks_globals: whether `asked` may name globals.
        reads_tables: whether it may read attributes by names that do not stand in it, as `vars(self)[key]` does.
        reads_objects: the same for objects that are no modules, as `dataclasses.asdict` and `copy.copy` do.
    """

    loaded: frozenset[str]
    stored: frozenset[str]
    asked: frozenset[str]
    of_globals: frozenset[str]
    to_globals: frozenset[str]
    asks_globals: bool
    reads_tables: bool
    reads_objects: bool


@functools.lru_cache(maxsize=4096)
def names_of(code: types.CodeType) -> Names:
    """The names of globals and attributes that code loads and stores, in the functions within it too."""
    found = list(dis.get_instructions(code))
    loaded = {str(one.argval) for one in found if one.opname in _LOADS}
    stored = {str(one.argval) for one in found if one.opcode in _STORES}
    of_globals = {str(one.argval) for one in found if one.opname in _LOADS_OF_GLOBALS}
    to_globals = {str(one.argval) for one in found if one.opname in _STORES_TO_GLOBALS}
    asks_globals = not of_globals.isdisjoint(_GLOBALS_BY_NAME)
    reads_tables = not loaded.isdisjoint(_TABLES)
    reads_objects = not (loaded.isdisjoint(_WHOLE_OBJECTS) and of_globals.isdisjoint(_WHOLE_AS_GLOBALS))
    asked: set[str] = set()
    if asks_globals or loaded & _BY_NAME:
        asked = {text for text in code.co_consts if isinstance(text, str) and text.isidentifier()}
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            more = names_of(inner)
            loaded, stored, asked = loaded | more.loaded, stored | more.stored, asked | more.asked
            of_globals, to_globals = of_globals | more.of_globals, to_globals | more.to_globals
            asks_globals = asks_globals or more.asks_globals
            reads_tables, reads_objects = reads_tables or more.reads_tables, reads_objects or more.reads_objects
    return Names(
        frozenset(loaded | asked),
        frozenset(stored),
        frozenset(asked),
        frozenset(of_globals),
        frozenset(to_globals),
        asks_globals,
        reads_tables,
        reads_objects,
    )


def line_that_stores(code: types.CodeType, name: Any) -> str:
    """`file:line` of the first assignment to an attribute or a global in code; empty where there is none."""
    pending = [code]
    while pending:
        code = pending.pop()
        for found in dis.get_instructions(code):
            if found.opcode in _STORES and found.argval == name and found.positions is not None:
                return f"{shorten_path(code.co_filename)}:{found.positions.lineno}"
        pending += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
    return ""
