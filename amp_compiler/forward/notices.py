"""What a user is told of captures: one line each, and what is being done while one takes long.

Everything goes to the logger `amp_compiler`, whose level the environment variable `AMP_LOG` can set (`debug`, `info`,
`warning`, `error`). A compilation that takes long is told at the level `warning`, which Python's logging shows by
default: by a line where it begins to, but on a terminal and in a notebook by a bar, and by one where it is done.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from torch import nn

from amp_compiler.errors import AmpError
from amp_compiler.fx import sign_of_life
from amp_compiler.fx.torch_private.inductor import LATE, cached_graphs
from amp_compiler.ir.plan import PrecisionPlan, many
from amp_compiler.passes.pipeline import PLAN, Stages

logger = logging.getLogger("amp_compiler")
_SILENT = ContextVar("silent", default=False)
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
        raise AmpError(f"AMP_LOG={wanted!r} is no level", hint=f"use one of {', '.join(_LEVELS)}")
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


@contextmanager
def silent(on: bool = True) -> Iterator[None]:
    """Within it nothing is said by this thread, such as by the ranks beside the first one.

    Args:
        on: whether it is so.
    """
    token = _SILENT.set(on or _SILENT.get())
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


@dataclass(eq=False)
class Course:
    """What is compiled, and how far that is.

    Args:
        name: how messages call it.
        captured: seconds that its capture took before.
        late: whether it is compiled alone, as a backward when it first runs.
        stages: those that are made; `None` while it is captured.
        plan: what was decided; `None` until it is compiled.
    """

    name: str
    captured: float = 0.0
    late: bool = False
    stages: Stages | None = None
    plan: PrecisionPlan | None = None
    began: float = field(default_factory=time.perf_counter)
    cached: tuple[int, int] = field(default_factory=cached_graphs)  # until then: found, compiled

    @property
    def doing(self) -> str:
        """What is done, in words."""
        if self.late or (self.stages is not None and self.stages.begun):
            return "compiling it"
        if self.stages is None or not self.stages.last:
            return "capturing it"
        last = self.stages.last
        return "planning it" if last in ("capture", *PLAN.names) else f"rewriting it, behind pass {last}"

    def seconds(self) -> float:
        """Since its capture began."""
        return self.captured + time.perf_counter() - self.began

    def report(self, plan: PrecisionPlan, stages: Stages) -> str:
        """What was done, in one line.

        Args:
            plan: what was decided.
            stages: those that were made.
        """
        nodes, casts = many(len(plan.nodes), "node"), many(plan.cast_count, "cast")
        hits, misses = (now - then for now, then in zip(cached_graphs(), self.cached, strict=True))
        cache = f", {hits} from Inductor's cache and {misses} anew" if hits or misses else ""
        captured = self.captured + max(0.0, stages.captured - self.began)
        planned = max(0.0, stages.compiling - stages.captured)
        return (
            f"compiled {self.name} in {self.seconds():.1f} s: captured {nodes} ({captured:.1f} s)"
            f", planned {plan.low_nodes} of them in {plan.dtype} with {casts} ({planned:.1f} s),"
            f" compiled them ({self.seconds() - captured - planned:.1f} s{cache})"
        )


_COURSE: ContextVar[Course | None] = ContextVar("course", default=None)


def course() -> Course | None:
    """What this thread compiles; `None` where nothing is told of it."""
    return _COURSE.get()


@contextmanager
def telling(name: str, captured: float = 0.0, late: bool = False) -> Iterator[Course]:
    """Where its block takes longer than `PATIENCE` seconds, say that, and at its end what was compiled.

    A terminal and a notebook show meanwhile how far it is.

    Args:
        name: what is compiled.
        captured: seconds that its capture took before.
        late: whether it is a backward that is compiled when it first runs, alone.
    """
    current = Course(name, captured, late)
    if _SILENT.get() or not logger.isEnabledFor(logging.WARNING):
        yield current
        return
    done, token = threading.Event(), _COURSE.set(current)
    later = LATE.set(partial(telling, f"the backward of {name}", late=True))
    patience = sign_of_life.PATIENCE - captured
    thread = threading.Thread(target=_tell, args=(current, patience, done), name="amp_compiler", daemon=True)
    thread.start()
    try:
        yield current
    finally:
        done.set()
        thread.join()
        _COURSE.reset(token)
        LATE.reset(later)
    if late and current.seconds() >= sign_of_life.PATIENCE:
        logger.warning("compiled %s in %.1f s", name, current.seconds())
    if current.plan is not None and current.stages is not None and current.seconds() >= sign_of_life.PATIENCE:
        logger.warning(current.report(current.plan, current.stages))


def _tell(course: Course, patience: float, done: threading.Event) -> None:
    if done.wait(max(0.0, patience)):
        return
    console = Console(stderr=True)
    if not (console.is_terminal or (console.is_jupyter and find_spec("ipywidgets"))):
        if patience > 0 or not course.captured:  # it was said while it was captured
            logger.warning("compiling %s, for %g s now: %s", course.name, sign_of_life.PATIENCE, course.doing)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task("", total=None)
        while True:
            bars.update(bar, description=f"{course.name}: {course.doing}")
            if done.wait(_EVERY):
                return
