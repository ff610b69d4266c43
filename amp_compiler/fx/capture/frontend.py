"""The front door: `torch.compile` captures and guards a function, and each graph goes to a backend of ours.

Dynamo decides what is one graph, compiles again where a guard no longer holds, makes sizes and numbers that change into
inputs, replays what the function writes to Python objects, and runs itself what it cannot capture.
"""

import contextlib
import logging
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
from torch import fx

from amp_compiler.errors import AmpError, CaptureError, first_line, with_causes
from amp_compiler.fx.capture.errors import BY_ITSELF, known_error, user_frame
from amp_compiler.fx.capture.tracing import quiet
from amp_compiler.fx.graph import user_source
from amp_compiler.fx.torch_private.as_python import captures_as_python, within
from amp_compiler.fx.torch_private.breaks import (
    Break,
    break_of,
    dynamo_errors,
    is_recompile_limit,
    reason_here,
    recompile_limit,
)
from amp_compiler.fx.torch_private.dynamo import (
    bounded_selections,
    code_of,
    compile_with_dynamo,
    compile_within,
    dynamo_settings,
)
from amp_compiler.fx.torch_private.runtime import mode_around, modes_again, modes_apart, modes_around
from amp_compiler.fx.torch_private.tracing import whole_powers

Build = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
logger = logging.getLogger("amp_compiler")
# Forms of the inputs that one function is compiled for; Dynamo's own limit where that is higher.
MOST_FORMS = 64
FEWER_FORMS = (
    "keep lists that grow and numbers that count out of it (return what they gather, or write them in a function under"
    " torch.compiler.disable), pass numbers that change as tensors, pad the inputs to fewer shapes, or raise"
    " torch._dynamo.config.recompile_limit"
)


class ModelError(CaptureError):
    """The model itself raises with these inputs, as far as Dynamo can tell."""


class _Captured(Exception):  # no error: the call is made again
    """Another thread has captured the function while a call waited to do so."""


class Frontend:
    """A function, captured by Dynamo at each call for which it has no code yet.

    Args:
        function: what is captured.
        build: makes of each of Dynamo's graphs, with its example inputs, what is called in its place.
        name: how the log calls it.
        dynamic: as for `torch.compile`.
        whole: whether it has to be one graph.
        around: a context for its captures, beside the settings.
        forms: for how many forms of its inputs it may be compiled, where that is more than `most_forms`.
        subject: how errors call it, where that is not its name.
        values: whether sizes and numbers that values of tensors say are part of a graph. Inductor compiles a backward
            when it first runs, and knows some of them then no more.
        hooks: whether Dynamo looks at the hooks of modules at each call.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        build: Build,
        name: str,
        dynamic: bool | None = None,
        whole: bool = False,
        around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        forms: int = 0,
        subject: str = "",
        values: bool = False,
        hooks: bool = False,
    ) -> None:
        self._name, self._build, self._around = name, build, around
        self._subject = subject or name
        self._reason, self._has_made = "", False  # of the last graph; whether this capture has made one
        self._running: list[Callable[..., Any]] = []  # the graphs: what Dynamo keeps for good holds none of them
        noted, timed = weakref.WeakMethod(self._noted), weakref.WeakMethod(self._timed)
        backend = as_backend(
            lambda *graph: noted()(*graph),  # type: ignore[misc]
            hooks=hooks,
            around=lambda code: timed()(code),  # type: ignore[misc]
            forms=forms,
            values=values,
        )
        self._run = compile_with_dynamo(function, backend, dynamic, whole)
        self._code, self._captures = code_of(self._run), 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function.

        Raises:
            AmpError: what `build` raised of its own.
            ModelError: it raises with these inputs.
            CaptureError: Dynamo cannot take it, or has compiled it as often as it may; names the line of the user's.
        """
        while True:
            _THREAD.captures = self._captures
            try:
                return self._called(args, kwargs)
            except _Captured:
                continue
            except dynamo_errors() as error:
                raise self._error(error) from error

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not modes_around():
            return self._run(*args, **kwargs)
        # Dynamo's guards fail where a mode is active; it sees what the graphs run.
        with modes_apart() as modes:
            outer, _THREAD.modes = getattr(_THREAD, "modes", ()), modes
            try:
                return self._run(*args, **kwargs)
            finally:
                _THREAD.modes = outer

    def _noted(self, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self._reason, self._has_made = reason_here(), True
        run = self._build(graph_module, inputs)

        self._running.append(run)
        running = weakref.ref(run)

        def run_within_modes(*values: Any) -> Any:
            if not getattr(_THREAD, "modes", ()):
                return running()(*values)  # type: ignore[misc]
            with modes_again(_THREAD.modes):
                return running()(*values)  # type: ignore[misc]

        return run_within_modes

    @contextlib.contextmanager
    def _timed(self, code: CodeType) -> Iterator[None]:
        """Around the capture of a graph, which is logged with the time that it took."""
        whole_call = code is self._code  # of which nothing has run yet
        if whole_call and self._captures != _THREAD.captures:
            raise _Captured
        started, self._has_made = time.perf_counter(), False
        with self._around():
            yield
        self._captures += whole_call
        if self._has_made:
            how = f", because this no longer held: {self._reason}" if self._reason else ""
            seconds = time.perf_counter() - started
            logger.info("%s %s in %.1f s%s", "recompiled" if how else "captured", self._name, seconds, how)

    def _error(self, error: BaseException) -> AmpError:
        own = next((one for one in with_causes(error) if isinstance(one, AmpError)), None)
        if own is not None:
            return own
        if is_recompile_limit(error):
            last = f", the last one because this no longer held: {self._reason}" if self._reason else ""
            return CaptureError(
                f"{self._subject} was compiled for {most_forms()} forms of its inputs (Dynamo's recompile_limit){last}",
                hint=FEWER_FORMS,
            )
        said = break_of(error)
        if said is None:
            where, text = user_frame(error), first_line(error)
            return known_error(self._subject, text, where) or CaptureError(
                f"Dynamo cannot take {self._subject}: {text}",
                where=where,
                hint="move that code out of it, or put it under torch.compiler.disable",
            )
        where = place_of(said)
        if said.raised_inside:
            what = f"a graph of {self._subject} could not be made: {said.raised_inside}"
            return CaptureError(what, where=where, hint="see the error that this one comes from")
        if said.raised != "AssertionError" and (known := known_error(self._subject, str(error), where)):
            return known
        if said.of_model or said.raised:
            return ModelError(f"{self._subject} raises {said.raised or said.what}", where=where, hint=BY_ITSELF)
        return CaptureError(f"{self._subject} is not one graph: {words_of(said)}", where=where, hint=said.hint)


class _Stop(Exception):  # no error: Dynamo is told to stop
    """Carries what was made of a graph out of Dynamo."""

    def __init__(self, captured: Any) -> None:
        super().__init__("captured")
        self.captured = captured


def capture_once(
    function: Callable[..., Any],
    make: Callable[[fx.GraphModule, Sequence[Any]], Any],
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dynamic: bool = False,
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    values: bool = False,
) -> Any:
    """Capture a function as one graph, and run nothing of it.

    Args:
        function: what is captured.
        make: is given Dynamo's graph and its example inputs.
        name: how messages call it.
        args: its positional arguments.
        kwargs: its keyword arguments.
        dynamic: whether all sizes are symbolic.
        around: as for `Frontend`.
        values: as for `Frontend`.

    Returns:
        What `make` has made.

    Raises:
        CaptureError: it is not one graph; names the line of the user's.
        AmpError: what `make` raises.
    """

    def build(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        raise _Stop(make(graph_module, inputs))

    try:
        Frontend(function, build, name, dynamic, whole=True, around=around, values=values)(*args, **kwargs)
    except CaptureError as error:
        stop = next((one for one in with_causes(error) if isinstance(one, _Stop)), None)
        if stop is None:
            raise
        captured = stop.captured
        for one in with_causes(error):  # frames of Dynamo, whose guards refer to parameters
            one.__traceback__ = None
        del stop, one
        return captured
    raise CaptureError(f"nothing of {name} was captured: it computes nothing with tensors", hint="leave it uncompiled")


def words_of(broken: Break) -> str:
    """What broke a graph, in one line."""
    return f"{broken.what}: {broken.explanation}" if broken.explanation else broken.what


def place_of(broken: Break) -> str:
    """`file:line` of the user's that broke a graph; empty where it is not known."""
    return user_source("".join(traceback.format_list(broken.stack)))


def as_backend(
    build: Build,
    hooks: bool = True,
    around: Callable[[CodeType], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    forms: int = 0,
    values: bool = False,
) -> Callable[..., Any]:
    """A backend of `torch.compile`, with the settings of Dynamo under which its graphs are right.

    Args:
        build: as for `Frontend`.
        hooks: whether Dynamo looks at the hooks of modules at each call.
        around: a context for its captures, made of the code that is captured.
        forms: as for `Frontend`.
        values: as for `Frontend`.
    """

    modes = weakref.WeakSet[Any]()  # of which was told

    @contextlib.contextmanager
    def capturing(code: CodeType) -> Iterator[None]:
        if (mode := mode_around()) is not None and mode not in modes:
            modes.add(mode)
            logger.warning(
                "'%s' runs as it is, in the types of the model: torch.compile leaves alone what is called within a"
                " dispatch mode (%s); amp.compile does not",
                code.co_name,
                type(mode).__name__,
            )
        with settings(hooks, forms, values), around(code):
            yield

    def amp_compiler(graph_module: fx.GraphModule, inputs: list[Any], **options: Any) -> Callable[..., Any]:
        return build(graph_module, inputs, **options)  # under Dynamo's lock: one graph at a time in the process

    compile_within(amp_compiler, capturing)
    return amp_compiler


def most_forms() -> int:
    """How many forms of its inputs a function is compiled for."""
    return max(MOST_FORMS, recompile_limit())


_THREAD = threading.local()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def captured_within() -> bool:
    """Whether the code that asks is being captured for us; Dynamo asks once for each graph."""
    return within()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def raise_at_once(what: str, hint: str) -> None:
    """Raise an error from code that may be captured: Dynamo calls this one while it captures.

    Raises:
        CaptureError: what is given.
    """
    raise CaptureError(what, hint=hint)


@contextlib.contextmanager
def settings(hooks: bool, forms: int = 0, values: bool = False) -> Iterator[None]:
    """Within it Dynamo has our settings: what this thread captures meanwhile is captured with them.

    Args:
        hooks: whether a hook that is registered later leads to a recompilation.
        forms: as for `Frontend`.
        values: as for `Frontend`.
    """
    if within():
        yield
        return
    with (
        captures_as_python(),
        whole_powers(),
        bounded_selections(),
        quiet("torch._subclasses.fake_tensor"),  # an error tells of wrong shapes
        quiet("torch._dynamo.variables.tensor"),  # `execution` tells of `item()`
    ):
        put_back = dynamo_settings(max(most_forms(), forms), hooks, values)()
        try:
            yield
        finally:
            put_back()
