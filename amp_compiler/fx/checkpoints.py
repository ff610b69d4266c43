"""Gradient checkpointing (`torch.utils.checkpoint`): what it computes again in the backward, one graph would keep."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from amp_compiler.errors import CaptureError
from amp_compiler.fx.hooks import calling_line
from amp_compiler.fx.torch_private import replaced_checkpoint

Checkpoint = Callable[..., Any]
_LOCK = threading.Lock()
_THREAD = threading.local()  # `handler`: what a call of this thread does with what is checkpointed
_REPLACED: list[contextlib.ExitStack] = []  # one for each block that is entered; the first takes torch's function away


@contextlib.contextmanager
def refused_checkpoints() -> Iterator[None]:
    """Within it, in this thread, a model that checkpoints where gradients are wanted ends its capture.

    Raises:
        CaptureError: the model calls `torch.utils.checkpoint.checkpoint`.
    """

    def refuse(function: Callable[..., Any]) -> Callable[..., Any]:
        if torch.is_grad_enabled():
            raise CaptureError(
                "the model checkpoints activations, which one graph would keep",
                where=calling_line(),
                hint="leave it, and it runs in pieces that compute them again; or call it without checkpointing",
            )
        return function

    with _handled(refuse):
        yield


@contextlib.contextmanager
def compiled_checkpoints(compile_one: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Within it, in this thread, what is checkpointed is compiled by itself, and `checkpoint` runs as it is written.

    Dynamo would take `checkpoint` into its graph, and the backward of that, which computes anew, would not be planned.

    Args:
        compile_one: makes of what is checkpointed what is called in its place.
    """
    with _handled(compile_one):
        yield


@contextlib.contextmanager
def _handled(handler: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    before = getattr(_THREAD, "handler", None)
    with _LOCK:
        _REPLACED.append(contextlib.ExitStack())
        if len(_REPLACED) == 1:
            _REPLACED[0].enter_context(replaced_checkpoint(_handling))
    _THREAD.handler = handler
    try:
        yield
    finally:
        _THREAD.handler = before
        with _LOCK:
            if len(_REPLACED) == 1:
                _REPLACED[0].close()
            _REPLACED.pop()


def _handling(checkpoint: Checkpoint) -> Checkpoint:
    """Torch's function, with the handler of the thread that calls it, if it has one."""

    def handled(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        handler = getattr(_THREAD, "handler", None)
        return checkpoint(function if handler is None else handler(function), *args, **kwargs)

    return handled
