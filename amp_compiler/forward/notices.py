"""What a user is told of captures: one line each, and what is being done while one takes long.

Everything goes to the logger `amp_compiler`, whose level the environment variable `AMP_LOG` can set (`debug`, `info`,
`warning`, `error`). What takes long is shown beside that, but for the level `error`: on a terminal by a line that says
what is done and is gone when it is done, elsewhere (a log of continuous integration, a notebook) by a line once.
"""

from __future__ import annotations

import difflib
import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import torch
from rich.console import Console
from torch import nn

from amp_compiler.errors import AmpError
from amp_compiler.passes.pipeline import PIECE, PLAN, Stages

logger = logging.getLogger("amp_compiler")
_AS_IT_IS = nullcontext()
_SILENT = ContextVar("silent", default=False)
PATIENCE = 2.0  # seconds of a compilation that nothing is said of
_EVERY = 0.25  # seconds between two looks at what is done
_LEVELS = ("debug", "info", "warning", "error")


def set_level(wanted: str | None) -> None:
    """Let the logger say what the environment variable `AMP_LOG` asks for; without it, what Python's logging says.

    Raises:
        AmpError: it names no level.
    """
    if not wanted:
        return
    if wanted.lower() not in _LEVELS:
        near = difflib.get_close_matches(wanted.lower(), _LEVELS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(_LEVELS)}"
        raise AmpError(f"AMP_LOG={wanted!r} is no level", hint=hint)
    level = getattr(logging, wanted.upper())
    logger.setLevel(level)
    if level < logging.WARNING and not logger.hasHandlers():  # Python itself shows warnings and worse
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        logger.addHandler(handler)


set_level(os.environ.get("AMP_LOG"))
logger.addFilter(lambda record: not _SILENT.get())


def warn_of_static(graph: str) -> None:
    """Say that no size of a graph is dynamic, where `dynamic_shapes=` has asked for it."""
    logger.warning(
        "no size of %s is dynamic, whatever dynamic_shapes= says: it takes no others; leave it at 'auto'", graph
    )


def tell_of_missing_masters(model: nn.Module) -> None:
    """Say that parameters in FP16 are trained, where an optimizer of torch's would update them in FP16."""
    trained = (name for name, one in model.named_parameters() if one.requires_grad and one.dtype is torch.float16)
    if model.training and (name := next(trained, "")):
        logger.warning(
            "'%s' is trained in FP16 without an FP32 master, so that small updates of it are lost: use"
            " amp.training_step, which gives it one, or keep it in FP32: amp.compile makes the 16-bit copies",
            name,
        )


def silent(on: bool = True) -> AbstractContextManager[None]:
    """Within it nothing is said by this thread, such as by the ranks beside the first one.

    Args:
        on: whether it is so.
    """
    return _silent() if on else _AS_IT_IS


@contextmanager
def _silent() -> Iterator[None]:
    token = _SILENT.set(True)
    try:
        yield
    finally:
        _SILENT.reset(token)


@contextmanager
def silent_dynamo() -> Iterator[None]:
    """Around a capture: Dynamo gives no warning of its own where nothing is said."""
    if not _SILENT.get():
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\._dynamo\.")
        yield


@contextmanager
def telling(name: str, stages: Stages) -> Iterator[None]:
    """While its block takes longer than `PATIENCE` seconds, say what is done.

    A terminal shows it until the end of the block. Where the error output is no terminal it is said once.

    Args:
        name: what is compiled.
        stages: those that are made meanwhile.
    """
    if _SILENT.get():
        yield
        return
    done = threading.Event()
    thread = threading.Thread(target=_tell, args=(name, stages, PATIENCE, done), name="amp_compiler", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def doing(stages: Stages) -> str:
    """What comes behind the last of some stages, in words."""
    last = stages.last
    if not last:
        return "capturing it"
    if last in PIECE.names and stages.begun:
        return "compiling it with the backend"
    return "planning it" if last in PLAN.names or last == "capture" else f"rewriting it, behind pass {last}"


def _tell(name: str, stages: Stages, patience: float, done: threading.Event) -> None:
    if done.wait(patience) or not logger.isEnabledFor(logging.WARNING):
        return
    if not sys.stderr.isatty():
        words = f"compiling {name}, for {patience:g} s now: {doing(stages)}"
        if logger.isEnabledFor(logging.INFO):
            logger.info(words)
        else:  # nothing is wrong, so it is no warning, and a log of warnings would not hold it
            print(f"{logger.name}: {words}", file=sys.stderr, flush=True)
        return
    with Console(stderr=True).status(f"{name}: {doing(stages)}") as status:
        while not done.wait(_EVERY):
            status.update(f"{name}: {doing(stages)}")
