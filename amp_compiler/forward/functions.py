"""Functions, methods and classes of modules under `amp.compile`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

from amp_compiler.errors import AmpError
from amp_compiler.forward.compiled_module import CompiledModule
from amp_compiler.forward.settings import Settings
from amp_compiler.fx.stand_in import FunctionModule


def is_function(value: object) -> bool:
    """Whether it is a function or a method, or one with some of its arguments given."""
    return inspect.isroutine(value) or isinstance(value, functools.partial)


def compiled_function(function: Callable[..., Any], settings: Settings) -> Callable[..., Any]:
    """A function that runs another one compiled; as an attribute of a class it is a method.

    Args:
        function: any function or method.
        settings: the options.

    Returns:
        It has the name and the signature of the other; its attribute `compiled` has plan, stages and execution.

    Raises:
        AmpError: it is a generator or a coroutine, whose body no call runs.
    """
    if any(kind(function) for kind in (inspect.isgeneratorfunction, inspect.iscoroutinefunction)):
        hint = "compile the functions or modules that it calls"
        raise AmpError(f"{function.__qualname__} is a generator or a coroutine, which is no graph", hint=hint)
    bound = (function.__self__,) if isinstance(function, MethodType) else ()
    compiled = CompiledModule(FunctionModule(getattr(function, "__func__", function)), settings)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return compiled(*bound, *args, **kwargs)

    run.compiled = compiled  # type: ignore[attr-defined]
    return run
