"""Custom `torch.autograd.Function`s: tracing would keep their forward and lose their backward, so they are found."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from amp_compiler.fx.torch_private import is_idle_checkpoint

Function = torch.autograd.Function


@contextlib.contextmanager
def recorded_functions() -> Iterator[list[type[Function]]]:
    """Within the context, every custom function that this thread applies is entered in the list that this gives."""
    found: list[type[Function]] = []
    thread = threading.get_ident()
    original = Function.__dict__["apply"]

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread and cls not in found and not is_idle_checkpoint(cls):
            found.append(cls)
        return original.__get__(None, cls)(*args, **kwargs)

    Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    try:
        yield found
    finally:
        Function.apply = original  # type: ignore[method-assign]


class OpaqueFunctions:
    """Makes Dynamo break its graph at custom functions, so that they run as they are, between the pieces.

    Args:
        functions: the classes.
    """

    def __init__(self, functions: Iterable[type[Function]]) -> None:
        self._disabled = {function: torch.compiler.disable(function.forward) for function in functions}

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """The context in which Dynamo traces and its pieces run; the classes are as before after it."""
        originals = {function: function.__dict__.get("forward") for function in self._disabled}
        for function, disabled in self._disabled.items():
            function.forward = staticmethod(disabled)  # type: ignore[method-assign]
        try:
            yield
        finally:
            for function, original in originals.items():
                if original is None:
                    del function.forward
                else:
                    function.forward = original  # type: ignore[method-assign]
