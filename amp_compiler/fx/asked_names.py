"""What a forward asks for by names that do not stand in its code, as `getattr(self, f"scale_{i}")` does."""

from __future__ import annotations

import builtins
import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from amp_compiler.fx.code_names import Origin, origin_of
from amp_compiler.fx.python_state import PythonState

_ASKING = ("getattr", "hasattr")
_PARTS = ("_modules", "_parameters", "_buffers")  # of a module, which are compared without being named


@contextlib.contextmanager
def names_asked(state: PythonState) -> Iterator[set[str]]:
    """Within it a module is captured; the set holds the names that its code asks for and that `state` has not.

    Python's `getattr` and `hasattr` are watched while the code names them; what other threads ask is not noted.

    Args:
        state: what the code of the module reaches.
    """
    found: set[str] = set()
    watched = [name for name in _ASKING if name in state.names]
    before = {name: getattr(builtins, name) for name in watched}
    for name, function in before.items():
        setattr(builtins, name, _watched(function, state.names, found))
    try:
        yield found
    finally:
        for name, function in before.items():
            setattr(builtins, name, function)


def _watched(function: Callable[..., Any], known: set[str], found: set[str]) -> Callable[..., Any]:
    thread = threading.get_ident()

    def watched(owner: Any, name: str, *default: Any) -> Any:
        if name not in known and threading.get_ident() == thread and not isinstance(owner, Tensor):
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if origin_of(str(caller)) is Origin.USER and not _is_part(owner, name):
                found.add(name)
        return function(owner, name, *default)

    return watched


def _is_part(owner: Any, name: str) -> bool:
    return isinstance(owner, nn.Module) and any(name in owner.__dict__[table] for table in _PARTS)
