"""The one place that touches torch's private interfaces, each looked for before it is used (torch 2.11 to 2.15)."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
import os
import re
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, ParamSpec, TypeVar

import torch
import torch.utils.checkpoint
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from amp_compiler.errors import AmpError, first_line, with_causes
from amp_compiler.fx.generators import generators_kept

_P = ParamSpec("_P")
_R = TypeVar("_R")
_PROBE = "_probe_load"
_ALLOCATE = "_empty_strided_cpu"  # read by the head of every module that Inductor writes
_GIVES_TABLE = "get_decomp_fn"  # since torch 2.12 Inductor hands on what gives the operators that it opens
Decomposition = Callable[..., Any]
BUILDING = threading.RLock()  # torch traces and exports with state of the whole process: one graph at a time
# An export puts stand-ins in the place of a module's tensors: whoever reads them waits. Held for a short time by those
# who read, and never while waiting for `BUILDING`.
TENSORS = threading.RLock()
_CAPTURING = threading.local()
# What forward-mode differentiation leaves in a graph; before torch 2.13 these are calls into C++ that no module names.
_FORWARD_MODE = (
    "_jvp_increment_nesting", "_jvp_decrement_nesting", "_enter_dual_level", "_exit_dual_level", "_make_dual",
    "_unpack_dual",
)  # fmt: skip
_OPERATORS = str(Path(__file__).parents[1] / "ops")
_ALL_MODELS = 64  # so many times the limit may all models of a class be compiled together


def compile_with_inductor(
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    options: Mapping[str, Any],
    opened: Callable[[Mapping[Any, Decomposition]], Mapping[Any, Decomposition]],
    identity: str,
    told: Callable[[Exception], Exception],
) -> Callable[..., Any]:
    """Compile an ATen graph, and the backward that autograd makes of it, with Inductor.

    Args:
        graph_module: flat inputs, a tuple as output. It may be changed.
        inputs: example inputs, real or fake.
        options: of `torch._inductor.config`, by name; those that this torch does not know are left out.
        opened: from what it would open operators into, by operator, those that it is to open into something else.
        identity: for its cache: another text whenever `opened` may give something else.
        told: makes of what Inductor and the C++ compiler behind it raise what is raised in its place: here, or in the
            first backward, which is compiled when it runs.

    Raises:
        ImportError: where this torch has no Inductor, see `has_inductor`.
        Exception: what `told` makes.
    """
    from torch._inductor import compile_fx as inductor
    from torch._inductor import config
    from torch._inductor.decomposition import select_decomp_table

    known = {name: value for name, value in options.items() if hasattr(config, name)}
    changed = OpenedOps(select_decomp_table(), opened, identity)

    exactly = bool(known.get("emulate_precision_casts"))

    def compile_one(*args: Any, **kwargs: Any) -> Any:
        if _GIVES_TABLE in kwargs:
            kwargs[_GIVES_TABLE] = _Giving(changed)
        try:
            with generators_kept(), _roundings_kept(exactly):  # a backward may be compiled when it first runs
                return inductor.compile_fx_inner(*args, **kwargs)
        except Exception as cause:
            raise told(cause) from cause

    with _roundings_kept(exactly):
        compiled: Any = inductor.compile_fx(
            graph_module, _cacheable(inputs), inner_compile=compile_one, config_patches=known, decompositions=changed
        )
    return compiled  # type: ignore[no-any-return]


@contextlib.contextmanager
def _roundings_kept(exactly: bool) -> Iterator[None]:
    """Within it, where asked for, Inductor rounds wherever a graph casts down and up again.

    Torch 2.13 does so for `emulate_precision_casts`. Before it, that option did not reach casts that stand in the
    graph: two in a row were dropped, or computed in FP32, or left out of code for a CPU that still had the unrounded
    value.
    """
    if not exactly:
        yield
        return
    from torch._inductor.codegen import cpp
    from torch._inductor.fx_passes import joint_graph

    if hasattr(joint_graph, "_is_lossless_fp_widening_cast"):
        yield
        return
    from torch._inductor import lowering
    from torch._inductor.virtualized import ops

    kernel: Any = cpp.CppKernel
    cast = torch.ops.prims.convert_element_type.default
    entries = [
        entry
        for entry in joint_graph.patterns.patterns["call_function", cast]
        if getattr(entry, "handler", None) is joint_graph.pointless_convert
    ]
    theirs, lower, kept = (
        [entry.extra_check for entry in entries],
        lowering.lowerings[cast],
        kernel.cache_dtype_convert,
    )

    def lowered(x: Any, dtype: torch.dtype) -> Any:
        given = x.get_dtype()
        if given == dtype or not {given, dtype} & {torch.float16, torch.bfloat16}:
            return lower(x, dtype)

        def convert(value: Any) -> Any:
            return ops.to_dtype(value, dtype, src_dtype=given, use_compute_types=False)

        return lowering.make_pointwise(convert, override_return_dtype=dtype)(x)

    try:
        for entry in entries:
            entry.extra_check = _widens
        lowering.lowerings[cast] = lowered
        kernel.cache_dtype_convert = lambda *_: None
        yield
    finally:
        for entry, check in zip(entries, theirs, strict=True):
            entry.extra_check = check
        lowering.lowerings[cast] = lower
        kernel.cache_dtype_convert = kept


def _widens(match: Any) -> bool:
    """Whether the first of two casts in a row that Inductor would make one loses nothing."""
    value = match.kwargs["arg"].meta.get("val")
    given, between = getattr(value, "dtype", None), match.kwargs["dtype1"]
    return given == between or (given in (torch.float16, torch.bfloat16) and between in (torch.float32, torch.float64))


class OpenedOps(dict[Any, Any]):
    """The operators that Inductor opens, and what into: its own table with some changes.

    Inductor pickles the table for the name of a compiled graph in its cache, and would refuse the functions in it.
    """

    def __init__(
        self,
        table: Mapping[Any, Decomposition],
        opened: Callable[[Mapping[Any, Decomposition]], Mapping[Any, Decomposition]],
        identity: str,
    ) -> None:
        super().__init__({**table, **opened(table)})
        self._identity = identity

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What tells this table from another one: torch's version, which decides the rest, is in the name as well."""
        return str, (f"all of Inductor's, changed by {self._identity}",)


@dataclass(frozen=True)
class _Giving:
    """Gives the table when it is called. Torch 2.12 has a closure for this, which it cannot pickle for its cache."""

    table: OpenedOps

    def __call__(self) -> OpenedOps:
        return self.table


def cached_graphs() -> tuple[int, int]:
    """How many graphs this process has found in Inductor's cache, and how many it has compiled anew."""
    counted = torch._dynamo.utils.counters["inductor"]
    return counted["fxgraph_cache_hit"], counted["fxgraph_cache_miss"] + counted["fxgraph_cache_bypass"]


def _cacheable(inputs: Sequence[Any]) -> list[Any]:
    """The same inputs as fake tensors of fixed shapes that know of a `ShapeEnv`: without one torch caches no graph.

    They stay as they are where some are fake already and of one mode, and while Dynamo compiles: it knows which of
    their sizes are symbolic. What passes have made has a mode of its own.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    modes = {id(one.fake_mode) for one in inputs if isinstance(one, FakeTensor)}
    around = torch._guards.TracingContext.try_get()
    if len(modes) == 1 or (around is not None and around.fake_mode is not None):
        return list(inputs)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())

    def faked(one: torch.Tensor) -> torch.Tensor:
        if not isinstance(one, FakeTensor):
            return mode.from_tensor(one, static_shapes=True)
        with mode:
            return torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=one.device)

    return [faked(one) if isinstance(one, torch.Tensor) else one for one in inputs]


def recomputed(region: int = 0) -> dict[str, Any]:
    """Marks on a node by which torch's partitioner makes its value anew for the backward; none where it knows none.

    Args:
        region: what one region computes and a later one reads is kept.
    """
    try:
        from torch.utils.checkpoint import CheckpointPolicy
    except ImportError:
        return {}
    return {"recompute": CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": region}


def new_graph_module(root: Any, graph: fx.Graph) -> fx.GraphModule:
    """A module of a graph that writes its code when it is first called or shown, where this torch has such a module.

    Most graphs are rewritten many times and never called. Torch's own class writes the code at each `recompile()`.
    """
    return _lazy_class()(root, graph)


def traced_graph(function: Callable[..., Any], *inputs: Any, **options: Any) -> fx.GraphModule:
    """What `make_fx(function, **options)(*inputs)` gives, as a module such as `new_graph_module` makes.

    What the function makes anew is of the fake mode of the inputs.
    """
    fake_mode = next((one.fake_mode for one in inputs if isinstance(one, FakeTensor)), None)
    with _lazily(), fake_mode or contextlib.nullcontext():
        # Without a table torch 2.14 writes each `detach` as an `alias`. Autograd's zeros that take no memory are real
        # ones behind any operator of our own, also where all is fake.
        table = {torch.ops.aten._efficientzerotensor.default: torch.ops.aten.zeros.default}
        return make_fx(function, decomposition_table=table, **options)(*inputs)  # type: ignore[no-any-return]


def wrap_while_it_lives(module: fx.GraphModule) -> None:
    """Let torch.fx forget a module's code with the module.

    Where nodes have the mark `is_wrapped`, torch keeps the globals of the code for good, and patches each function that
    is named in them at every later trace of the process: of some hundred modules that is most of a trace's time.
    """
    known: dict[tuple[int, str], Any] | None = getattr(fx._symbolic_trace, "_wrapped_fns_to_patch", None)
    if known is not None:
        weakref.finalize(module, _forget_wrapped, known, id(type(module).forward.__globals__)).atexit = False


def _forget_wrapped(known: dict[tuple[int, str], Any], code: int) -> None:
    for key in [key for key in known if key[0] == code]:
        known.pop(key, None)


def forward_of(module: fx.GraphModule) -> Callable[..., Any]:
    """The forward of a graph's module, its code written."""
    write = getattr(module, "real_recompile", None)
    if write is not None:
        write()
    return module.forward  # type: ignore[no-any-return]


def _lazy_class() -> type[fx.GraphModule]:
    try:
        from torch.fx._lazy_graph_module import _LazyGraphModule
    except ImportError:
        return fx.GraphModule
    return _LazyGraphModule


def _lazily() -> contextlib.AbstractContextManager[Any]:
    try:
        from torch.fx._lazy_graph_module import _use_lazy_graph_module
    except ImportError:
        return contextlib.nullcontext()
    return _use_lazy_graph_module(True)


def saved_tensor_hooks() -> tuple[Any, Any] | None:
    """The hooks that autograd would give a tensor to save now; `None` where there are none, or torch does not tell."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top(True) if top is not None else None


def transforms_functions() -> bool:
    """Whether a transform of `torch.func` (vmap, jvp, grad) is running."""
    peek = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", None)
    return peek is not None and peek() is not None


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of `torch.func`'s, within `vmap`, `grad` and the like."""
    wraps = getattr(torch._C._functorch, "is_functorch_wrapped_tensor", None)
    return wraps is not None and bool(wraps(tensor))


def has_inductor() -> bool:
    """Whether this torch has an Inductor that can be used as it is used here."""
    try:
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx
    except ImportError:
        return False
    return hasattr(config, "patch") and callable(compile_fx)


def inductor_option(name: str) -> Any:
    """What a setting of Inductor is now; `None` where this torch does not know it."""
    from torch._inductor import config

    return getattr(config, name, None)


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
        # What transformers says once for a process is no reason for a graph break.
        "ignore_logging_functions": {
            *config.ignore_logging_functions,
            *(vars(logging.Logger)[name] for name in ("warning_once", "info_once") if name in vars(logging.Logger)),
        },
    }
    known = {name: value for name, value in wanted.items() if hasattr(config, name)}
    make = getattr(config, "_make_closure_patcher", None)
    if make is not None:
        return make(**known)  # type: ignore[no-any-return]

    def patched() -> Callable[[], None]:
        patch = config.patch(known)
        patch.__enter__()
        return lambda: patch.__exit__(None, None, None)

    return patched


def prints_ignored() -> contextlib.AbstractContextManager[Any]:
    """Within it a capture takes no note of `print`; for graphs that are read and not run."""
    config: Any = torch._dynamo.config
    return config.patch(ignore_logging_functions={*config.ignore_logging_functions, print})  # type: ignore[no-any-return]


@functools.cache
def settings_are_of_threads() -> bool:
    """Whether each thread has its own settings of Dynamo, as since torch 2.13; before, they are the process's."""
    entries = getattr(torch._dynamo.config, "_config", {})
    return any(isinstance(getattr(one, "user_override", None), ContextVar) for one in entries.values())


@contextlib.contextmanager
def pad_packed_breaks() -> Iterator[None]:
    """Within it Dynamo breaks its graph where packed sequences are padded: numbers alone tell how long they are."""
    padding = getattr(torch._VF, "_pad_packed_sequence", None)
    left_out: Any = getattr(torch._dynamo.trace_rules, "_disallowed_callable_ids", None)
    if padding is None or left_out is None or id(padding) in left_out:
        yield
        return
    left_out.add(id(padding))
    try:
        yield
    finally:
        left_out.remove(id(padding))


def broken_at_generators() -> contextlib.AbstractContextManager[None]:
    """Within it Dynamo breaks its graph where a `random.Random` draws: it would draw the same number at every call."""
    kind: Any = getattr(torch._dynamo.variables.misc, "RandomVariable", None)
    name = "is_supported_random_obj"
    return _exchanged(kind, name, staticmethod(lambda val: False)) if hasattr(kind, name) else contextlib.nullcontext()


def texts_of_numbers() -> contextlib.AbstractContextManager[None]:
    """Within it an f-string of nothing but a number that is an input is a text; Dynamo gives the number itself."""
    kind: Any = torch._dynamo.symbolic_convert.InstructionTranslatorBase
    symbolic: Any = getattr(torch._dynamo.variables, "SymNodeVariable")  # noqa: B009
    text: Any = torch._dynamo.variables.misc.StringFormatVariable
    theirs = getattr(kind, "_format_value", None)

    def format_value(self: Any, spec: Any, flags: int) -> None:
        if isinstance(self.stack[-1], symbolic) and not flags & 3:  # else it is read anew from where it came
            self.push(text.create("{:" + spec.as_python_constant() + "}", [self.pop()], {}))
        else:
            theirs(self, spec, flags)  # type: ignore[misc]

    return contextlib.nullcontext() if theirs is None else _exchanged(kind, "_format_value", format_value)


@contextlib.contextmanager
def building() -> Iterator[None]:
    """Within it this thread alone traces and compiles, also the backwards that torch compiles when they first run.

    Dispatch modes of the user's see nothing of it. What holds torch's own lock (Dynamo, or a backward in the making)
    never waits for `BUILDING`.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    with BUILDING, _dynamos_lock(), _states_of_lstm(), _disable_current_modes(), _anomalies_aside():
        yield


def _anomalies_aside() -> contextlib.AbstractContextManager[None]:
    """Within it anomaly mode is off: it would look for NaN in the stand-ins of a trace."""
    return torch.autograd.set_detect_anomaly(False)  # type: ignore[no-any-return]


def _dynamos_lock() -> Any:
    return getattr(torch._dynamo.convert_frame, "compile_lock", BUILDING)


@contextlib.contextmanager
def modes_apart() -> Iterator[Sequence[TorchDispatchMode]]:
    """Within it no `TorchDispatchMode` of the user's is active; gives those that are around it, the innermost first.

    `_disable_current_modes` would touch the modes of tracing too, which are those of all threads.
    """
    from torch.utils._python_dispatch import _pop_mode, _push_mode

    modes = [_pop_mode() for _ in range(torch._C._len_torch_dispatch_stack())]
    try:
        yield modes
    finally:
        for mode in reversed(modes):
            _push_mode(mode)


@contextlib.contextmanager
def modes_again(modes: Sequence[TorchDispatchMode]) -> Iterator[None]:
    """Within it modes that `modes_apart` has given are active again."""
    from torch.utils._python_dispatch import _pop_mode, _push_mode

    for mode in reversed(modes):
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in modes:
            _pop_mode()


def modes_around() -> bool:
    """Whether any `TorchDispatchMode` is active."""
    return bool(torch._C._len_torch_dispatch_stack())


def mode_around() -> TorchDispatchMode | None:
    """The innermost `TorchDispatchMode` that is active."""
    modes = _get_current_dispatch_mode_stack()
    return modes[-1] if modes else None


def _states_of_lstm() -> contextlib.AbstractContextManager[None]:
    """Within it the last states of an LSTM that is traced have the form that they have when it runs.

    Before torch 2.13 a dimension of size 1 is left in them, for any batch that is larger than 1.
    """
    from torch._decomp import decompositions

    theirs: Any = getattr(decompositions, "one_layer_lstm", None)

    def one_layer_lstm(inp: Any, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        out, states = theirs(inp, hidden, *args, **kwargs)
        formed = (
            made if made.dim() == given.dim() else made.reshape(given.shape)
            for made, given in zip(states, hidden, strict=False)
        )
        return out, tuple(formed)

    return contextlib.nullcontext() if theirs is None else _exchanged(decompositions, "one_layer_lstm", one_layer_lstm)


@contextlib.contextmanager
def exporting() -> Iterator[None]:
    """Within it this thread alone exports, and no other reads the tensors of modules; torch is left as it was found."""
    with building(), TENSORS, restored_transforms(), _kept_buffer_hooks(), _lazily(), whole_powers():
        depth = getattr(_CAPTURING, "depth", 0)
        _CAPTURING.depth = depth + 1
        try:
            yield
        finally:
            _CAPTURING.depth = depth


@contextlib.contextmanager
def _kept_buffer_hooks() -> Iterator[None]:
    """Within it torch may watch what becomes a buffer. Torch 2.11 goes on doing so where it cannot trace a model."""
    hooks = torch.nn.modules.module._global_buffer_registration_hooks
    before = set(hooks)
    try:
        yield
    finally:
        for one in set(hooks) - before:
            hooks.pop(one, None)


AUTOGRAD_FUNCTION: Any = torch._functorch.autograd_function.autograd_function_apply  # how Dynamo writes one of a user's


def with_regions(traced: fx.GraphModule) -> fx.GraphModule:
    """A trace in which regions of autocast and of `no_grad` are operators with bodies, as torch.export has them."""
    from torch._export.passes import replace_autocast_with_hop_pass as autocast
    from torch._export.passes import replace_set_grad_with_hop_pass as set_grad

    hops = torch.ops.higher_order
    _switch_behind_regions(traced.graph)

    def split(module: fx.GraphModule, once: Callable[..., Any]) -> fx.GraphModule:
        module, _ = once(module, None)
        for node in module.graph.find_nodes(op="get_attr"):
            inner = getattr(module, node.target)
            for user in node.users if isinstance(inner, fx.GraphModule) else ():
                # A switch to what holds already is dropped: what holds within is what the region sets.
                if user.target in (hops.wrap_with_autocast, hops.wrap_with_set_grad_enabled):
                    switched = user.target is hops.wrap_with_set_grad_enabled
                    with torch.set_grad_enabled(user.args[0] if switched else torch.is_grad_enabled()):
                        setattr(module, node.target, split(inner, once))
        return module

    for kind in (autocast, set_grad):  # in the other order torch loses what is switched within a region of autocast
        traced = split(traced, kind._sequential_split_and_maybe_inline_subgraphs)
    return traced


def _switch_behind_regions(graph: fx.Graph) -> None:
    """Where gradients are switched within a region of autocast and stay so, switch them behind it again."""
    enabled, outer = True, [True]
    for node in graph.nodes:
        called = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if node.target is SET_GRAD_ENABLED:
            enabled = node.args[0]
        elif called == "_enter_autocast":
            outer.append(enabled)
        elif called == "_exit_autocast" and outer.pop() != enabled:
            with graph.inserting_after(node):
                graph.call_function(SET_GRAD_ENABLED, (enabled,))


def source_text(node: fx.Node) -> str:
    """Where an input of one of Dynamo's graphs comes from, such as `L['args'][0]`; empty where it does not say."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", "")
    return name() if callable(name) else str(name)


def opaque_call(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a higher-order operator while it is traced, and let it be one node of the trace.

    Args:
        target: the operator.
        args: its graphs as modules, and its operands.
        kwargs: its options.
    """
    from torch.fx.experimental import proxy_tensor

    mode = proxy_tensor.get_proxy_mode()
    if mode is None:
        return target(*args, **kwargs)
    tracer: Any = mode.tracer
    with proxy_tensor.disable_proxy_modes_tracing():
        results = target(*args, **kwargs)
    operands = []
    for one in args:
        if isinstance(one, torch.nn.Module):
            known = dict(tracer.root.named_children())
            tracer.root.add_module(next(f"body_{n}" for n in range(len(known) + 1) if f"body_{n}" not in known), one)
        operands.append(tracer.unwrap_proxy(one))
    proxy = tracer.create_proxy("call_function", target, tuple(operands), dict(kwargs))
    return proxy_tensor.track_tensor_tree(results, proxy, constant=None, tracer=tracer)


TENSOR_OF_NUMBER: Any = torch._refs.tensor  # how Dynamo writes `torch.tensor` of a number that is an input
SET_GRAD_ENABLED = torch._C._set_grad_enabled  # how a graph switches gradients off and on


@contextlib.contextmanager
def inference_mode_as_no_grad() -> Iterator[None]:
    """Within it `torch.inference_mode` is `torch.no_grad` to this thread: tracing notes the one and not the other.

    Where the mode is on already there are no gradients to lose, and all stays as it is.
    """
    if torch.is_inference_mode_enabled():
        yield
        return
    module: Any = torch._C
    theirs, thread = module._InferenceMode, threading.get_ident()
    module._InferenceMode = lambda mode: _GradientsOff(mode) if threading.get_ident() == thread else theirs(mode)
    try:
        yield
    finally:
        module._InferenceMode = theirs


class _GradientsOff:
    """What stands for torch's guard of the inference mode."""

    def __init__(self, off: bool) -> None:
        self._off, self._before = off, True

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(not self._off)

    def __exit__(self, *_: object) -> None:
        torch._C._set_grad_enabled(self._before)


def captures_here() -> bool:
    """Whether this thread is within `exporting`."""
    return getattr(_CAPTURING, "depth", 0) > 0


def transforms_here() -> bool:
    """Whether this call stands within a transform of torch.func, or a level of forward-mode differentiation."""
    within = getattr(torch._C._functorch, "peek_interpreter_stack", None)
    return (within is not None and within() is not None) or (
        getattr(torch.autograd.forward_ad, "_current_level", -1) >= 0
    )


def skipped_by_dynamo(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A function that Dynamo runs as it is, while it still looks into what that calls.

    `torch.compiler.disable(recursive=False)` does the same, and then raises while any thread of the process exports.
    """
    return torch._dynamo.decorators.skip(function)  # type: ignore[no-any-return]


# Torch 2.14 keeps it for each thread, before it was a flag of the process; the public question warns.
_fx_traces: Callable[[], bool] = getattr(
    torch.fx._symbolic_trace,
    "_get_is_fx_tracing",
    lambda: torch.fx._symbolic_trace._is_fx_tracing_flag,  # type: ignore[attr-defined]
)


def traced_elsewhere(inputs: Callable[[], Sequence[Any]]) -> str:
    """What a call with these inputs is part of, `torch.fx` or `torch.export`; empty where it is part of neither.

    Torch's flags for that are the process's: another thread may have set them.
    """
    if _fx_traces() and any(isinstance(one, fx.Proxy) for one in inputs()):
        return "traced by torch.fx"
    detect = getattr(torch._guards, "detect_fake_mode", None)
    exported = torch.compiler.is_exporting() and (detect is None or detect(list(inputs())) is not None)
    return "exported by torch.export" if exported else ""


@contextlib.contextmanager
def restored_transforms() -> Iterator[None]:
    """Leave behind it what torch.func and forward-mode differentiation keep for the process as it was before.

    A capture that fails inside of `torch.func.jvp`, or that takes its beginning for a node of the graph, would leave a
    level open: from then on every jvp of the process fails.
    """
    functorch, transforms = getattr(torch._C, "_functorch", None), torch._functorch.eager_transforms
    forward_ad = torch.autograd.forward_ad
    depth_of = getattr(functorch, "get_dynamic_layer_stack_depth", None)
    undo = getattr(functorch, "pop_dynamic_layer_stack_and_undo_to_depth", None)
    depth = depth_of() if depth_of is not None else 0
    nesting, level = getattr(transforms, "JVP_NESTING", None), forward_ad._current_level
    enabled = torch._C._is_fwd_grad_enabled()
    try:
        yield
    finally:
        if undo is not None and depth_of is not None and depth_of() > depth:
            undo(depth)
        forward_ad._current_level = level
        with contextlib.suppress(RuntimeError):  # what it raises where there is none to leave; torch has one at most
            torch._C._exit_dual_level(level=level + 1)
        if nesting is not None:
            transforms.JVP_NESTING = nesting
        torch._C._set_fwd_grad_enabled(enabled)


def is_of_transform(node: fx.Node) -> bool:
    """Whether a node of Dynamo's graph begins, ends or is part of a transform of `torch.func`."""
    module = getattr(node.target, "__module__", None) or ""
    return node.op == "call_function" and (bool(transform_of(node)) or module == "torch._functorch.predispatch")


def transform_of(node: fx.Node) -> str:
    """The name of what `torch.func` left of a transform in a captured graph; empty for all else, and for `vmap`.

    A graph that holds one cannot be rewritten: it is open from one node to another, and its end has no user.
    """
    if node.op != "call_function":
        return ""
    module, name = getattr(node.target, "__module__", None) or "", getattr(node.target, "__name__", "")
    if name.partition(".")[0] in _FORWARD_MODE:
        return name
    others = ("vmap", "batch_dim", "lazy_load")
    return name if module.startswith("torch._functorch") and not any(other in name for other in others) else ""


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
        with _dynamos_lock(), own(frame.f_code), _anomalies_aside():
            before = _frames_given_up()
            try:
                return theirs(self, frame, *args, **kwargs)
            finally:
                _CAPTURING.given_up = functions_given_up() + _frames_given_up() - before

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
        with _exchanged(torch.fx._symbolic_trace, "is_fx_symbolic_tracing", lambda: False):
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
_MODELS = [0]  # number of functions that this process has compiled


def frames_taken(wanted: Callable[[CodeType], bool]) -> contextlib.AbstractContextManager[None]:
    """Within it, Dynamo compiles functions of torch's own that it would leave as they are, and none of our operators.

    Autograd runs an operator's backward as Python, which Dynamo would look into like any of the user's functions.

    Args:
        wanted: whether the code of a function that is about to run is to be compiled.
    """
    rules: Any = torch._dynamo.trace_rules
    theirs = rules.check

    def check(looked_at: Any, is_inlined_call: bool = False, *rest: Any, **options: Any) -> Any:
        if not is_inlined_call and isinstance(looked_at, CodeType):
            if looked_at.co_filename.startswith(_OPERATORS):
                return True
            if wanted(looked_at):
                return False
        return theirs(looked_at, is_inlined_call, *rest, **options)

    return _exchanged(rules, "check", check)


def function_here() -> int:
    """The number of the function that Dynamo compiles just now; -1 where that is not known."""
    context = getattr(torch._guards, "CompileContext", None)
    number = getattr(context and context.current_compile_id(), "frame_id", None)
    return -1 if number is None else int(number)


def reason_here() -> str:
    """What no longer held of a function that Dynamo compiles again just now, such as `len(L['self'].log) == 63`."""
    metrics = getattr(getattr(torch._dynamo.utils, "get_metrics_context", lambda: None)(), "_metrics", {})
    return _guard_in(metrics.get("recompile_reason"))


def functions_given_up() -> int:
    """How many functions Dynamo has given up in this thread: what they compute runs as it is."""
    return getattr(_CAPTURING, "given_up", 0)


def _frames_given_up() -> int:
    counted = torch._dynamo.utils.counters["frames"]
    return int(counted["total"] - counted["ok"])


def recompile_limit() -> int:
    """The user's own limit of how often Dynamo compiles a function."""
    return int(torch._dynamo.config.recompile_limit)


def is_recompile_limit(error: BaseException) -> bool:
    """Whether an error, or what it was raised from, says that the limit is reached."""
    kind = getattr(torch._dynamo.exc, "FailOnRecompileLimitHit", ())
    return any(isinstance(one, kind) for one in with_causes(error))


def recompile_reason(error: BaseException) -> str:
    """What did not hold of the last form before the limit, such as `len(G['log']) == 63`; empty where it is not told.

    Dynamo says it in a warning of its logger alone, and keeps it in a variable of the function that raises.
    """
    for one in with_causes(error):
        for frame, _ in traceback.walk_tb(one.__traceback__):
            if found := _guard_in(frame.f_locals.get("recompile_reason")):
                return found
    return ""


def _guard_in(said: Any) -> str:
    found = _FAILED_GUARD.match(said) if isinstance(said, str) else None
    return found[1].strip() if found else ""


_FAILED_GUARD = re.compile(r"\d+/\d+: (.+?)(?:  +#|$)", re.MULTILINE)


@dataclass(frozen=True)
class Break:
    """What Dynamo says of something that it cannot take into a graph.

    Args:
        what: what it is.
        explanation: what that means here; empty where nothing more is said.
        hint: what can be done; empty where nothing is said.
        stack: the user's frames, the innermost last.
        of_model: whether the call itself is wrong, in eager mode too.
        raised: what the model itself raises, such as `ValueError: no such row`; empty where it raises nothing.
        raised_inside: what a backend raises that was given a graph; empty where none does.
    """

    what: str
    explanation: str = ""
    hint: str = ""
    stack: Sequence[traceback.FrameSummary] = ()
    of_model: bool = False
    raised: str = ""
    raised_inside: str = ""


def break_of(error: BaseException) -> Break | None:
    """What Dynamo says in an error that it raises; `None` where that is another one."""
    for one in with_causes(error):
        if isinstance(one, torch._dynamo.exc.TorchDynamoException) and hasattr(one, "real_stack"):
            wrong = isinstance(one, torch._dynamo.exc.TorchRuntimeError)
            inside = one.inner_exception if isinstance(one, torch._dynamo.exc.BackendCompilerFailed) else None
            text = "" if inside is None else f"{type(inside).__name__}: {first_line(inside)}"
            return replace(_read_break(str(one)), stack=one.real_stack or (), of_model=wrong, raised_inside=text)
    return None


def break_before(graph_module: fx.GraphModule) -> Break | None:
    """The graph break that ends one of Dynamo's graphs; `None` where it ends with the function."""
    reason = getattr(graph_module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    return replace(_read_break(reason.reason), stack=reason.user_stack)


def _read_break(text: str) -> Break:
    fields = ("Explanation", "Hint", "Developer debug context")
    said = {name: found[1].strip() for name in fields if (found := re.search(rf"{name}: (.+)", text))}
    raised = re.search(r"(?:: got |^raised exception )(.+)$", said.get(fields[0], "")) or re.search(
        r"^raised exception (.+)$", said.get(fields[2], "")
    )
    shown = re.sub(r"^(\w+)\((['\"])(.*)\2,?\)$", r"\1: \3", raised[1]) if raised else ""
    return Break(text.strip().partition("\n")[0], said.get(fields[0], ""), said.get(fields[1], ""), raised=shown)


def reads_values(error: BaseException) -> bool:
    """Whether an error, or what it was raised from, says that values are needed while only shapes are known."""
    kind = getattr(torch._subclasses.fake_tensor, "DataDependentOutputException", ())
    return any(isinstance(one, kind) for one in with_causes(error))


def dynamo_errors() -> tuple[type[Exception], ...]:
    """What Dynamo raises of its own."""
    limit = getattr(torch._dynamo.exc, "FailOnRecompileLimitHit", None)
    return (torch._dynamo.exc.TorchDynamoException, *([] if limit is None else [limit]))


def is_restart(error: Exception) -> bool:
    """Whether a compiler lets Dynamo capture anew, such as with a number as it is that cannot be an input."""
    return isinstance(error, torch._dynamo.exc.RestartAnalysis)


def whole_powers() -> contextlib.AbstractContextManager[None]:
    """Within it a number that is an input may be negative in `number ** 2`; torch takes every base for positive."""
    theirs: Any = torch.SymFloat.__pow__

    def power(base: Any, exponent: Any) -> Any:
        whole = isinstance(exponent, (int, float)) and exponent > 0 and float(exponent).is_integer()
        return base.__float_pow__(exponent) if whole else theirs(base, exponent)

    return _exchanged(torch.SymFloat, "__pow__", power)


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


def guarded_signs() -> contextlib.AbstractContextManager[None]:
    """Within it a guard on the number 0 tells -0.0 from 0.0, which are equal."""
    guards: Any = torch._dynamo.guards
    theirs = guards.GuardBuilder.CONSTANT_MATCH

    @functools.wraps(theirs)
    def constant_match(self: Any, guard: Any) -> None:
        theirs(self, guard)
        value = self.get(guard)
        if type(value) is float and value == 0.0:
            sign = math.copysign(1.0, value)
            code = guards.get_verbose_code_parts([f"copysign(1.0, {self.arg_ref(guard)}) == {sign}"], guard)
            manager = self.get_guard_manager(guard)
            manager.add_lambda_guard(lambda now: math.copysign(1.0, now) == sign, code, guard.user_stack)

    return _exchanged(guards.GuardBuilder, "CONSTANT_MATCH", constant_match)


def guarded_absent_keys() -> contextlib.AbstractContextManager[None]:
    """Within it a key that a dict lacks is guarded where the dict is asked for it and raises, as in `os.getenv`."""
    kind: Any = torch._dynamo.variables.dicts.ConstDictVariable
    name = "getitem_const_raise_exception_if_absent"
    theirs = getattr(kind, name)

    def getitem(self: Any, tx: Any, arg: Any) -> Any:
        try:
            return theirs(self, tx, arg)
        except torch._dynamo.exc.ObservedKeyError:
            self.install_dict_contains_guard(tx, [arg])
            raise

    return _exchanged(kind, name, getitem)


@contextlib.contextmanager
def _exchanged(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within it a name of torch's stands for another value."""
    theirs = inspect.getattr_static(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, theirs)


def is_pointwise(operator: torch._ops.OpOverload) -> bool:
    """Whether each element of its result is made of one of each operand."""
    aten = torch.ops.aten
    untagged = (aten.leaky_relu.default, aten.hardswish.default, aten._prelu_kernel.default)  # the first in torch 2.11
    return torch.Tag.pointwise in operator.tags or operator in untagged


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


def is_failed_assertion(error: BaseException) -> bool:
    """Whether a graph found a number that a tensor says to be none that it was captured for, such as a size of -1."""
    return isinstance(error, RuntimeError) and str(error).startswith("Runtime assertion failed for expression")


def needs_double_backward(error: BaseException) -> bool:
    """Whether an error says that a compiled backward was to be differentiated; torch has no type for it."""
    # By the second words what the backward reads was given away to it; they come before the first are thought of.
    told = ("does not currently support double backward", "non-empty donated buffers which requires create_graph=False")
    return isinstance(error, RuntimeError) and any(words in str(error) for words in told)


def globals_of_no_module() -> contextlib.AbstractContextManager[None]:
    """Within it, Dynamo takes the globals of code that is no module's: of `exec`, `runpy.run_path` and doctest.

    Dynamo looks them up in the module of the name `__name__`, which has others, or is none at all. And it guards no
    global of a standard module, of which the environment changes.
    """
    from torch._dynamo.source import DictGetItemSource, GlobalSource, SkipGuardSource
    from torch._dynamo.symbolic_convert import InliningInstructionTranslator
    from torch._dynamo.variables.builder import VariableBuilder

    translator: Any = InliningInstructionTranslator
    theirs = translator.get_globals_source_and_value

    def found(self: Any, name: str) -> tuple[Any, Any, Any]:
        module = sys.modules.get(self.f_globals.get("__name__", ""))
        if getattr(module, "__dict__", None) is self.f_globals:
            values, variable, source = theirs(self, name)
            skips = isinstance(source, SkipGuardSource) and vars(module).get(name) is os.environ
            return values, variable, source.base if skips else source
        if self.current_instruction.opname == "STORE_GLOBAL":
            raise torch._dynamo.exc.Unsupported(f"the global '{name}' is written by code that is of no module")
        source = GlobalSource(self.output.install_global_by_id("___unnamed_scope", self.f_globals))
        return self.f_globals, VariableBuilder(self, source)(self.f_globals), DictGetItemSource(source, name)

    return _exchanged(translator, "get_globals_source_and_value", found)


@contextlib.contextmanager
def broken_at_tensor_hooks() -> Iterator[None]:
    """Within it, Dynamo breaks its graphs where a hook is hung on a tensor that they made, so that it is hung really.

    From torch 2.13 on Dynamo takes such a hook into its graph, as a call that acts only while the graph is traced; and
    it gives up on a whole function that calls `retain_grad`.
    """
    from torch._dynamo.variables.tensor import TensorVariable

    hang: Any = getattr(TensorVariable, "_method_register_hook", None)

    def register(self: Any, tx: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        if self.source and hang is not None:
            return hang(self, tx, name, *args, **kwargs)
        raise torch._dynamo.exc.Unsupported(f"{name} on a tensor of the graph")

    def retain(self: Any, tx: Any) -> Any:
        raise torch._dynamo.exc.Unsupported("retain_grad on a tensor of the graph")

    ours = {
        "_method_register_hook": register,
        "method_attr_retain_grad": lambda self, tx: None,
        "method_retain_grad": retain,
    }
    theirs = {name: vars(TensorVariable).get(name) for name in ours}
    methods: Any = getattr(TensorVariable, "tp_methods", {"register_hook": None})  # since torch 2.14
    kind, known = type(methods["register_hook"]), dict(methods)
    for name, method in ours.items():
        setattr(TensorVariable, name, method)
    if known["register_hook"] is not None:
        methods["retain_grad"] = kind(retain)
    try:
        yield
    finally:
        methods.clear()
        methods.update(known)
        for name, original in theirs.items():
            delattr(TensorVariable, name) if original is None else setattr(TensorVariable, name, original)


def own_decompositions() -> contextlib.AbstractContextManager[None]:
    """Within it, tracing opens compound operators as it does for torch's own compiler.

    Without it dropout becomes `empty_like -> bernoulli_`, for which Inductor on a CPU (torch 2.13) writes code that
    reads the empty buffer before it is filled.
    """
    from torch._dispatch.python import enable_python_dispatcher

    return enable_python_dispatcher()  # type: ignore[no-any-return]


def without_fake_tensors() -> contextlib.AbstractContextManager[Any]:
    """Within it, torch makes real tensors also where a trace that is going on makes fake ones."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()  # type: ignore[no-any-return]


def puts_channels_last(graph: fx.Graph) -> bool:
    """Whether Inductor lets the convolutions of a graph that it hands to a pass read images channels-last."""
    try:
        from torch._inductor.graph import GraphLowering
    except ImportError:
        return False
    decide = getattr(GraphLowering, "decide_layout_opt", None)
    return decide is not None and bool(decide(graph.owning_module, is_inference=False))


def inductor_graph_pass(identity: str, work: Sequence[Callable[[fx.Graph], Any]], theirs: Any) -> Any:
    """A pass as Inductor wants it, behind the ones that the user has set there.

    Where Inductor takes one pass alone, as in torch 2.11, that one runs the user's too. Where its passes have no
    identity, none is added.

    Args:
        identity: for Inductor's cache: another text whenever the pass would do something else.
        work: changes each graph, forward and backward, one after another, before Inductor lowers it.
        theirs: what is set there now: nothing, a pass, or several of them.
    """
    try:
        from torch._inductor import custom_graph_pass
    except ImportError:
        return theirs
    before = [] if theirs is None else list(theirs) if isinstance(theirs, (list, tuple)) else [theirs]
    lists = hasattr(custom_graph_pass, "get_custom_graph_passes")

    class GraphPass(custom_graph_pass.CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            for run in [*([] if lists else before), *work]:
                run(graph)

        def uuid(self) -> Any:
            """The user's too; `None`, with which nothing is cached, where one of these has none."""
            known = [one.uuid() if hasattr(one, "uuid") else None for one in ([] if lists else before)]
            return None if None in known else identity if not known else (*known, identity)

    return [*before, GraphPass()] if before and lists else GraphPass()


def no_saved_tensor_hooks() -> contextlib.AbstractContextManager[Any]:
    """Within it, what is saved for a backward passes no hook: those of a user or of checkpointing are not for tracing.

    Where there is none nothing is done: torch.func does not work within hooks, not even within idle ones.
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if top is None or top(False) is None:
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def handle_checkpoints(handle: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Have `torch.utils.checkpoint.checkpoint`, where it really runs, run another function; once and for all.

    Dynamo still takes it into its graphs.

    Args:
        handle: makes that function, from the one that runs otherwise.
    """
    written = getattr(torch.utils.checkpoint.checkpoint, "__wrapped__", None)
    if written is not None:  # torch hides it from Dynamo, and keeps the hidden one here
        written.__dynamo_disable = torch.compiler.disable(handle(written))


def is_idle_checkpoint(function: type) -> bool:
    """Whether a function is what checkpointing applies, here where there are no gradients and nothing is kept.

    Torch 2.11 applies it nevertheless, and then looks whether it has a backward.
    """
    return function.__module__ == "torch.utils.checkpoint" and not torch.is_grad_enabled()


def cpu_allocation(
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> contextlib.AbstractContextManager[None]:
    """Let code that Inductor loads meanwhile ask for CPU memory elsewhere, where this torch can be told.

    Args:
        wrap: gives what is to be asked, from what is asked now.
    """
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    allocate = getattr(guards, _ALLOCATE, None)
    if allocate is None or not isinstance(guards, ModuleType):
        return contextlib.nullcontext()
    return _exchanged(guards, _ALLOCATE, wrap(allocate))


def vector_probes(
    wrap: Callable[[Callable[[str], bool]], Callable[[str], bool]],
) -> contextlib.AbstractContextManager[None]:
    """Let torch ask elsewhere whether a library loads that it built to try the processor's vector instructions.

    Torch 2.11 loads it where it builds it, and is let be.

    Args:
        wrap: gives what is to be asked of the library's path, from what is asked now.
    """
    from torch._inductor.cpu_vec_isa import VecISA

    probe = getattr(VecISA, _PROBE, None)
    if probe is None:
        return contextlib.nullcontext()
    asked = functools.partialmethod(lambda isa, library: wrap(functools.partial(probe, isa))(library))
    return _exchanged(VecISA, _PROBE, asked)


def end_failed_capture(device: torch.device, pool: Any) -> None:
    """Tell the allocator that the capture of a CUDA graph which failed is over, and that its memory may go.

    torch does so at the end of a capture that succeeds. Without it the allocator would keep memory that several streams
    used until a capture ends that is none, and all memory of the failed one for ever.
    """
    end, release = (getattr(torch._C, name, None) for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"))
    if end is None or release is None:
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    with contextlib.suppress(RuntimeError):  # torch had told it already, and then the pool is not ours to release
        end(index, pool)
        release(index, pool)


def clear_cublas_workspaces() -> None:
    """Give the workspaces of cuBLAS back to the allocator; the next product takes new ones, where it runs."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()


def without_owning(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements at the same address as a tensor that does not keep the memory; itself where torch cannot.

    Whoever holds it must know that the memory stays what it is, as that of a captured graph does.
    """
    make = getattr(torch._C, "_construct_storage_from_data_pointer", None)
    if make is None:
        return tensor
    kept = tensor.untyped_storage()
    storage = make(kept.data_ptr(), tensor.device, kept.nbytes())
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def global_module_hooks(backward: bool = False) -> tuple[int, ...]:
    """The hooks that are registered for all modules, forward or backward ones, by their numbers."""
    names = ("_global_backward_hooks", "_global_backward_pre_hooks") if backward else (
        "_global_forward_hooks", "_global_forward_pre_hooks"
    )  # fmt: skip
    return tuple(number for name in names for number in getattr(torch.nn.modules.module, name, ()))


def autograd_sequence() -> int:
    """The number that autograd gives the next backward function that it makes; 0 where this torch does not tell."""
    read = getattr(getattr(torch._C, "_autograd", None), "_get_sequence_nr", None)
    return int(read()) if read is not None else 0


def function_sequence(function: Any) -> int:
    """The number that a backward function was given; -1 where this torch does not tell."""
    read = getattr(function, "_sequence_nr", None)
    return int(read()) if read is not None else -1


def has_native_bf16(device: torch.device) -> bool:
    """True where the device multiplies BF16 matrices in hardware."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type == "cpu":
        probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported", "_is_arm_bf16_supported")
        return any(bool(getattr(torch.cpu, probe)()) for probe in probes if hasattr(torch.cpu, probe))
    return False


def has_bf16_kernels() -> bool:
    """Whether torch has fast BF16 products for this CPU; without them they take 10 to 100 times as long as FP32's.

    oneDNN has them from AVX-512 and from NEON with BF16 on. `AMP_PLAIN_CPU` in the environment, 0 or 1, takes this CPU
    for one that has or lacks them.

    Raises:
        AmpError: `AMP_PLAIN_CPU` is neither.
    """
    told = os.environ.get("AMP_PLAIN_CPU", "")
    if told not in ("", "0", "1"):
        raise AmpError(f"AMP_PLAIN_CPU={told!r} is neither 0 nor 1", hint="unset it, or use one of them")
    if told:
        return told == "0"
    probe = (
        getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None) if torch.backends.mkldnn.is_available() else None
    )
    return has_native_bf16(torch.device("cpu")) or (probe is not None and bool(probe()))


def keeps_compiled() -> bool:
    """Whether torch may keep what it compiles from process to process; a user switches all such caches off at once."""
    from torch.compiler import config

    return not getattr(config, "force_disable_caches", False)


def trace_settings() -> list[str] | None:
    """All of torch that decides what a trace gives, as text; `None` where something does that has no text.

    That is a mode of the user's, a transform, a hook on saved tensors or another kernel for one of torch's operators.
    """
    kernels: set[str] | None = getattr(torch.library, "_impls", None)
    guard = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    active = [getattr(torch._C, f"_len_torch_{kind}_stack", None) for kind in ("dispatch", "function")]
    if kernels is None or guard is None or None in active:
        return None
    # The last are in no trace of ours: those of vmap, and one of torch 2.14.
    torchs = re.compile(r"(?!aten/).*|.*/(Meta|MPS|CUDA|FuncTorch\w+|PythonTLSSnapshot)")
    own = [key for key in kernels if not torchs.fullmatch(key)]
    if own or any(count() for count in active if count is not None) or transforms_functions() or saved_tensor_hooks():
        return None
    from torch._functorch import config as functorch
    from torch.fx.experimental import _config as tracing

    backends, cuda = torch.backends, torch.backends.cuda
    configs: tuple[Any, ...] = (tracing, functorch)
    deterministic: Any = torch.utils.deterministic
    settings = [
        *(torch.__version__, torch.__config__.show(), torch.backends.cpu.get_cpu_capability()),
        guard.GlobalStateGuard().__getstate__(),
        *(config.get_hash().hex() for config in configs),
        *(torch.get_float32_matmul_precision(), torch.get_default_device(), torch.is_inference_mode_enabled()),
        *(deterministic.fill_uninitialized_memory, torch.is_anomaly_enabled()),
        *(cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()),
        *(cuda.cudnn_sdp_enabled(), cuda.fp16_bf16_reduction_math_sdp_allowed(), cuda.preferred_linalg_library()),
        *(cuda.preferred_blas_library(), cuda.matmul.allow_fp16_accumulation),
        *(backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic, backends.cudnn.allow_tf32),
        *(backends.mkldnn.enabled, backends.mkldnn.is_available(), backends.nnpack.is_available()),
        *(backends.mha.get_fastpath_enabled(), backends.opt_einsum.enabled, backends.opt_einsum.strategy),
    ]
    if torch.cuda.is_available():
        devices = range(torch.cuda.device_count())
        settings += [torch.cuda.current_device(), torch.version.cuda, backends.cudnn.version()]
        settings += [(torch.cuda.get_device_name(one), torch.cuda.get_device_capability(one)) for one in devices]
    return list(map(str, settings))


def why_not_captured() -> str:
    """Why Dynamo would run a call as it is, without a graph; empty where it would not."""
    if transforms_here():
        return "torch.func or forward_ad is around the call"
    if modes_around() and global_module_hooks():
        return "a dispatch mode with hooks on all modules (FlopCounterMode) is around the call"
    if torch._C._get_tracing_state() is not None:
        return "a tracer (torch.jit.trace) is around the call"
    if torch._C._len_torch_dispatch_stack():
        keys = torch._C._TorchDispatchModeKey
        if any(torch._C._get_dispatch_mode(key) is not None for key in (keys.FAKE, keys.PROXY, keys.FUNCTIONAL)):
            return "a tracer (make_fx, FakeTensorMode) is around the call"
    stance = getattr(getattr(torch._dynamo.eval_frame, "_stance", None), "stance", "default")
    if stance == "force_eager":
        return 'torch.compiler.set_stance("force_eager") holds'
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1" or torch._dynamo.config.disable:
        return "TORCHDYNAMO_DISABLE is set"
    return ""
