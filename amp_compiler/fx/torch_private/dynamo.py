"""What is private of Dynamo: its settings, and where what it captures would be wrong."""

import contextlib
import functools
import inspect
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterator
from types import CodeType, FunctionType
from typing import Any, ParamSpec, TypeVar

import torch
import torch.utils.checkpoint
from torch import fx

from amp_compiler.fx.torch_private.runtime import exchanged, global_module_hooks, modes_around, transforms_here
from amp_compiler.fx.torch_private.tracing import BUILDING, anomalies_aside, dynamos_lock

_P = ParamSpec("_P")
_R = TypeVar("_R")
_ALL_MODELS = 64  # so many times the limit may all models of a class be compiled together


def dynamo_settings(limit: int, hooks: bool, values: bool = False) -> Callable[[], Callable[[], None]]:
    """Sets Dynamo so that it captures what a rewritten graph can be right for; gives what sets it back.

    Options that this torch lacks are left out.

    Args:
        limit: for how many forms of its inputs a function is compiled before Dynamo raises. A torch that counts the
            models of a class together counts up to as many for each model there was.
        hooks: whether it guards the hooks of modules.
        values: whether sizes and numbers that values of tensors say are part of a graph.
    """
    limit *= 1 if _ISOLATES else max(_MODELS[0], 1)
    config: Any = torch._dynamo.config
    wanted = {
        "allow_rnn": True,  # recurrent layers are part of a graph, not run as they are
        "skip_nnmodule_hook_guards": not hooks,
        "skip_no_tensor_aliasing_guards_on_parameters": False,  # weights that are tied later have one gradient
        "allow_unspec_int_on_nn_module": True,  # a number that counts (`self.n += 1`) becomes an input
        "specialize_float": False,  # and so does one that is annealed
        "capture_scalar_outputs": values,  # as `item()` does
        "capture_dynamic_output_shape_ops": values,  # as rows of a mask do
        "recompile_limit": limit,
        "accumulated_recompile_limit": max(_ALL_MODELS * limit, config.accumulated_recompile_limit),
        "fail_on_recompile_limit_hit": True,  # else what is past it runs as it is, without a word
        "suppress_errors": False,
        "invalidate_compile_context_weakrefs": True,  # with which torch swaps no parameters
        # What transformers says once for a process is no reason for a graph break.
        "ignore_logging_functions": {
            *config.ignore_logging_functions,
            *(vars(logging.Logger)[name] for name in ("warning_once", "info_once") if name in vars(logging.Logger)),
        },
    }
    return config._make_closure_patcher(**{name: value for name, value in wanted.items() if hasattr(config, name)})  # type: ignore[no-any-return]


def prints_ignored() -> contextlib.AbstractContextManager[Any]:
    """Within it a capture takes no note of `print`; for graphs that are read and not run."""
    config: Any = torch._dynamo.config
    return config.patch(ignore_logging_functions={*config.ignore_logging_functions, print})  # type: ignore[no-any-return]


AUTOGRAD_FUNCTION: Any = torch._functorch.autograd_function.autograd_function_apply  # how Dynamo writes one of a user's


def source_text(node: fx.Node) -> str:
    """Where an input of one of Dynamo's graphs comes from, such as `L['args'][0]`; empty where it does not say."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", "")
    return name() if callable(name) else str(name)


TENSOR_OF_NUMBER: Any = torch._refs.tensor  # how Dynamo writes `torch.tensor` of a number that is an input


def compiles_itself(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A function that a `torch.compile` around it leaves alone, with all that it calls."""
    return torch.compiler.disable(function, reason="it compiles itself: leave torch.compile away from it")  # type: ignore[no-any-return]


def compile_within(
    backend: Callable[..., Any], context: Callable[[CodeType], contextlib.AbstractContextManager[Any]]
) -> None:
    """Let Dynamo enter a context whenever it captures for a backend, one thread at a time.

    `torch._dynamo.optimize` knows contexts of a backend around each call, which would cost more than the guards do.

    Args:
        backend: as it is given to `torch.compile`.
        context: is made of the code that is captured, and entered around the capture.
    """
    from torch._dynamo import convert_frame

    CatchErrorsWrapper = convert_frame.CatchErrorsWrapper

    backend._amp_context = context  # type: ignore[attr-defined]
    theirs: Any = CatchErrorsWrapper.__call__
    if hasattr(theirs, "_amp_patched"):
        return

    @functools.wraps(theirs)
    def captured(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        innermost = self
        while hasattr(innermost, "_torchdynamo_orig_backend"):
            innermost = innermost._torchdynamo_orig_backend
        own = getattr(getattr(innermost, "compiler_fn", innermost), "_amp_context", None)
        if own is None:
            return theirs(self, frame, *args, **kwargs)
        # With `freezing` weights would be constants of a graph.
        with dynamos_lock(), own(frame.f_code), anomalies_aside(), torch._inductor.config.patch(freezing=False):
            before = _frames_given_up()
            try:
                return theirs(self, frame, *args, **kwargs)
            finally:
                _GIVEN_UP.number = functions_given_up() + _frames_given_up() - before

    captured._amp_patched = True  # type: ignore[attr-defined]
    CatchErrorsWrapper.__call__ = captured  # type: ignore[method-assign]


def compile_with_dynamo(
    function: Callable[..., Any], backend: Callable[..., Any], dynamic: bool | None, whole: bool
) -> Callable[..., Any]:
    """`torch.compile`, with a count of its own of how often the function may be compiled where this torch has one.

    Other models of the same class have the same functions; torch before 2.13 counts them together. Dynamo knows code by
    its name and place when it decides which sizes change: here each function has a name of its own.
    """
    options: dict[str, Any] = {"isolate_recompiles": True} if _ISOLATES else {}
    with BUILDING:  # while any thread exports, torch.compile takes another backend than it is given
        _MODELS[0] += 1
        if isinstance(function, FunctionType):  # sizes that one of them has seen make those of no other dynamic
            code = function.__code__.replace(co_name=f"{function.__code__.co_name}_{_MODELS[0]}")
            names = function.__globals__, function.__name__, function.__defaults__, function.__closure__
            keywords, function = function.__kwdefaults__, FunctionType(code, *names)
            function.__kwdefaults__ = keywords
        # Dynamo would refuse a call, or run it as it is, while any other thread traces.
        with exchanged(torch.fx._symbolic_trace, "is_fx_symbolic_tracing", lambda: False):
            compiled = torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=whole, **options)
    # A call would count frames for the whole process, and other threads would capture nothing meanwhile.
    for cell in compiled.__closure__ or ():
        if isinstance(cell.cell_contents, torch._dynamo.eval_frame._TorchDynamoContext):
            cell.cell_contents.fullgraph = False
    return compiled


def code_of(compiled: Callable[..., Any]) -> CodeType | None:
    """The code of the function behind what `compile_with_dynamo` gave; `None` where it is none of Python's."""
    return getattr(getattr(compiled, "_torchdynamo_orig_callable", None), "__code__", None)


_ISOLATES = "isolate_recompiles" in inspect.signature(torch.compile).parameters
_GIVEN_UP = threading.local()
_MODELS = [0]  # number of functions that this process has compiled


def function_here() -> int:
    """The number of the function that Dynamo compiles just now; -1 where that is not known."""
    number = getattr(torch._guards.CompileContext.current_compile_id(), "frame_id", None)
    return -1 if number is None else int(number)


def functions_given_up() -> int:
    """How many functions Dynamo has given up in this thread: what they compute runs as it is."""
    return getattr(_GIVEN_UP, "number", 0)


def _frames_given_up() -> int:
    counted = torch._dynamo.utils.counters["frames"]
    return int(counted["total"] - counted["ok"])


def is_restart(error: Exception) -> bool:
    """Whether a compiler makes Dynamo restart its analysis, such as with a number as it is that cannot be an input."""
    return isinstance(error, torch._dynamo.exc.RestartAnalysis)


@contextlib.contextmanager
def bounded_selections() -> Iterator[None]:
    """Within it `masked_select` may give more elements than its input has, of a mask that broadcasts it."""
    select, implementations = torch.ops.aten.masked_select.default, torch._subclasses.fake_impls.op_implementations_dict
    theirs = implementations[select]
    implementations[select] = lambda mode, op, *inputs: theirs(mode, op, *torch.broadcast_tensors(*inputs))
    try:
        yield
    finally:
        implementations[select] = theirs


def restart_with_plain_numbers(graph_module: fx.GraphModule, symbols: Collection[str] | None = None) -> None:
    """Let Dynamo capture a graph anew, in which numbers with a fraction that became inputs are taken as they are.

    Args:
        graph_module: Dynamo's graph; without such inputs nothing happens.
        symbols: which of them, by the names of their symbols; all where it is `None`.
    """
    from torch._dynamo.symbolic_convert import TensorifyState

    read = [
        getattr(node.meta.get("example_value"), "item_memo", None)
        for node in graph_module.graph.find_nodes(op="placeholder")
    ]
    names = [one.node._expr.name for one in read if one is not None and hasattr(one.node._expr, "name")]
    wanted = [name for name in names if symbols is None or name in symbols]
    if plain := [name for name in wanted if not TensorifyState.should_specialize(name)]:
        for name in plain:
            TensorifyState.specialize(name)
        raise torch._dynamo.exc.TensorifyScalarRestartAnalysis


def handle_checkpoints(handle: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Have `torch.utils.checkpoint.checkpoint`, where it really runs, run another function; once and for all.

    Dynamo still takes it into its graphs.

    Args:
        handle: makes that function, from the one that runs otherwise.
    """
    written = getattr(torch.utils.checkpoint.checkpoint, "__wrapped__", None)
    if written is not None:  # torch hides it from Dynamo, and keeps the hidden one here
        written.__dynamo_disable = torch.compiler.disable(handle(written))


def tracer_around(levels: bool = True) -> str:
    """What traces or transforms a call from outside, where Dynamo does not look; empty where nothing does.

    Args:
        levels: as for `transforms_here`.
    """
    if transforms_here(levels):
        return "torch.func or forward_ad is around the call"
    if torch._C._get_tracing_state() is not None:
        onnx = torch.onnx.is_in_onnx_export()
        tracer = "torch.onnx.export; amp.export_onnx writes a file" if onnx else "torch.jit.trace"
        return f"a tracer ({tracer}) is around the call"
    if torch._C._len_torch_dispatch_stack():
        keys = torch._C._TorchDispatchModeKey
        if any(torch._C._get_dispatch_mode(key) is not None for key in (keys.FAKE, keys.PROXY, keys.FUNCTIONAL)):
            return "a tracer (make_fx, FakeTensorMode) is around the call"
    return ""


def why_not_captured(left_alone: bool = False) -> str:
    """Why Dynamo would run a call as it is, without a graph; empty where it would not.

    Args:
        left_alone: whether it has left a call alone for which it had no graph.
    """
    if modes_around() and global_module_hooks():
        return "a dispatch mode with hooks on all modules (FlopCounterMode) is around the call"
    if tracer := tracer_around():
        return tracer
    stance = getattr(getattr(torch._dynamo.eval_frame, "_stance", None), "stance", "default")
    if stance == "force_eager" or (left_alone and stance == "eager_on_recompile"):
        return f'torch.compiler.set_stance("{stance}") holds'
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1" or torch._dynamo.config.disable:
        return "TORCHDYNAMO_DISABLE is set"
    return ""
