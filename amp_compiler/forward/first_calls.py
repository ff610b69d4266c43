"""The first call of each method of a compiled module is watched: whether it runs what was compiled."""

from __future__ import annotations

import functools
import logging
import re
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from amp_compiler.fx.stand_in import StandIn

logger = logging.getLogger("amp_compiler")
_THREAD = threading.local()  # its `handle` is the hook of the method that is watched


def told_once(module: Any, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A bound method; of a public one the user is told once where it runs layers past what was compiled."""
    if name.startswith("_") or torch.compiler.is_compiling() or name in module._amp_warned:
        return function

    @functools.wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return watch_call(module, name, function, *args, **kwargs)

    return types.MethodType(method, function.__self__)  # type: ignore[attr-defined]


def watch_call(module: Any, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function, and warn where a layer runs in it before what was compiled does.

    Args:
        module: the compiled module.
        name: of its method.
        function: what is called.
        *args: its positional arguments.
        **kwargs: its keyword arguments.
    """
    if getattr(_THREAD, "handle", None) is not None:  # by a method that is watched
        return function(*args, **kwargs)
    module._amp_warned.add(name)
    thread, original = threading.get_ident(), module._amp_original

    def look(layer: nn.Module, inputs: Any) -> None:
        if threading.get_ident() != thread or isinstance(layer, StandIn):
            return
        path = next((path for path, one in original.named_modules() if one is layer), None)
        if not path or next(layer.parameters(), None) is None:
            return
        end_watch()
        place = "model" + re.sub(r"[.](\d+)", r"[\1]", f".{path}")
        logger.warning(
            "%s.%s runs `%s` as it is, not compiled and in its own types: to compile that, write %s = amp.compile(%s)",
            type(original).__name__, name, path, place, place,
        )  # fmt: skip

    _THREAD.handle = register_module_forward_pre_hook(look)
    try:
        return function(*args, **kwargs)
    finally:
        end_watch()


def end_watch() -> None:
    """What was compiled runs, or the method is done."""
    handle = getattr(_THREAD, "handle", None)
    if handle is not None:
        _THREAD.handle = None
        handle.remove()
