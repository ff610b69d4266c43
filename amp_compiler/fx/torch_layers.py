"""Torch's own layers among Dynamo's pieces: Dynamo leaves their code as it is, unless a frame around it takes it in."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from torch import nn

from amp_compiler.fx.torch_private import frames_taken

_FOLDER = nn.__file__.rpartition("/")[0]
# The layers that hold products. Others have nothing to plan, or numbers that change at every call, as BatchNorm has.
_HOLD_PRODUCTS = ("activation", "adaptive", "conv", "linear", "rnn", "sparse", "transformer")
_FILES = frozenset(f"{_FOLDER}/modules/{name}.py" for name in _HOLD_PRODUCTS)
_LONGEST = 64  # so many layers a container may have to be written out
_LOCK = threading.Lock()
_THREAD = threading.local()  # `depth`: how many times this thread is within `layers_taken`
_INSIDE: list[contextlib.ExitStack] = []  # one for each block that is entered; the first puts torch's things away


@contextlib.contextmanager
def layers_taken() -> Iterator[None]:
    """Within it, Dynamo compiles the forward of a torch layer that a frame which it gave up calls, in this thread.

    Of itself it compiles nothing in torch's files but what it inlines, so that behind a break in the forward of an
    `nn.Sequential` nothing of that would be planned. Its loop over the layers, at which Dynamo gives up a frame that it
    has to break, is written out here.
    """
    with _LOCK:
        _INSIDE.append(contextlib.ExitStack())
        if len(_INSIDE) == 1:
            _INSIDE[0].enter_context(frames_taken(_is_layers))
            _INSIDE[0].enter_context(_written_out())
    _THREAD.depth = getattr(_THREAD, "depth", 0) + 1
    try:
        yield
    finally:
        _THREAD.depth -= 1
        with _LOCK:
            if len(_INSIDE) == 1:
                _INSIDE[0].close()
            _INSIDE.pop()


def _is_layers(code: CodeType) -> bool:
    return code.co_filename in _FILES and getattr(_THREAD, "depth", 0) > 0


@contextlib.contextmanager
def _written_out() -> Iterator[None]:
    """Within it, a call of an `nn.Sequential` runs code without a loop; what it computes is the same."""
    theirs = nn.Sequential.forward

    def forward(self: nn.Sequential, input: Any) -> Any:
        layers = tuple(self)
        return _STRAIGHT[len(layers)](layers, input) if len(layers) <= _LONGEST else theirs(self, input)

    nn.Sequential.forward = forward  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Sequential.forward = theirs  # type: ignore[method-assign]


def _straight(layers: int) -> Callable[..., Any]:
    """A function that puts a value through so many layers, one line for each."""
    lines = ["def straight(layers, value):", *(f"    value = layers[{place}](value)" for place in range(layers))]
    namespace: dict[str, Any] = {}
    exec(compile("\n".join([*lines, "    return value"]), f"<a Sequential of {layers}>", "exec"), namespace)
    return namespace["straight"]  # type: ignore[no-any-return]


_STRAIGHT = tuple(_straight(layers) for layers in range(_LONGEST + 1))
