"""Custom `torch.autograd.Function`s: tracing would keep their forward and lose their backward, so they are found."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch

from amp_compiler.fx.torch_private.dynamo import is_idle_checkpoint

Function = torch.autograd.Function


@contextlib.contextmanager
def recorded_functions() -> Iterator[list[type[Function]]]:
    """Within the context, every custom function that this thread applies is entered in the list that this gives.

    `my_function = MyFunction.apply` was bound before, so that its forward is watched as well.
    """
    functions: list[type[Function]] = []
    thread = threading.get_ident()
    original = Function.__dict__["apply"]

    def note(cls: type[Function], known: bool) -> None:
        if threading.get_ident() == thread and not known and not is_idle_checkpoint(cls):
            functions.append(cls)

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        note(cls, cls in functions)
        return original.__get__(None, cls)(*args, **kwargs)

    def watched(cls: type[Function], forward: Any) -> Any:
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            note(cls, any(issubclass(one, cls) for one in functions))  # which may have inherited this forward
            return forward(*args, **kwargs)

        return staticmethod(run)

    forwards = [(cls, cls.__dict__["forward"]) for cls in _kinds(Function) if "forward" in cls.__dict__]
    Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    for cls, forward in forwards:
        cls.forward = watched(cls, forward.__get__(None, cls))  # type: ignore[method-assign]
    try:
        yield functions
    finally:
        Function.apply = original  # type: ignore[method-assign]
        for cls, forward in forwards:
            cls.forward = forward  # type: ignore[method-assign]


def _kinds(base: type[Function]) -> Iterator[type[Function]]:
    for cls in base.__subclasses__():
        yield cls
        yield from _kinds(cls)
