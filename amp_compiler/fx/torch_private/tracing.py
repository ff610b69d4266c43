"""What is private of torch's tracing and graphs."""

import contextlib
import operator
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
import torch.utils.checkpoint
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx

from amp_compiler.fx.torch_private.runtime import TorchDispatchMode, exchanged, saved_tensor_hooks, transforms_here

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


def recomputed(region: int = 0) -> dict[str, Any]:
    """Marks on a node by which torch's partitioner makes its value anew for the backward.

    Args:
        region: what one region computes and a later one reads is kept.
    """
    return {"recompute": torch.utils.checkpoint.CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": region}


def new_graph_module(root: Any, graph: fx.Graph) -> fx.GraphModule:
    """A module of a graph that writes its code when it is first called or shown.

    Most graphs are rewritten many times and never called. Torch's own class writes the code at each `recompile()`.
    """
    return _LazyGraphModule(root, graph)


def traced_graph(function: Callable[..., Any], *inputs: Any, **options: Any) -> fx.GraphModule:
    """What `make_fx(function, **options)(*inputs)` gives, as a module such as `new_graph_module` makes.

    What the function makes anew is of the fake mode of the inputs.
    """
    fake_mode = next((one.fake_mode for one in inputs if isinstance(one, FakeTensor)), None)
    with _use_lazy_graph_module(True), fake_mode or contextlib.nullcontext():
        # Without a table torch 2.14 writes each `detach` as an `alias`. Autograd's zeros that take no memory are real
        # ones behind any operator of our own, also where all is fake.
        table = {torch.ops.aten._efficientzerotensor.default: torch.ops.aten.zeros.default}
        return make_fx(function, decomposition_table=table, **options)(*inputs)  # type: ignore[no-any-return]


def recorded_graph(function: Callable[..., Any], *inputs: Any) -> fx.Graph:
    """The graph of `traced_graph` for a function of a few operators, in a fifth of the time that `make_fx` takes.

    Where a size is a symbol `make_fx` traces, which writes down how it is worked out.
    """
    if len({id(one) for one in inputs}) < len(inputs):  # by which their nodes are known
        inputs = tuple(one.detach() for one in inputs)
    if not all(type(size) is int for one in inputs for size in one.shape):
        return traced_graph(lambda *args: function(*args), *inputs, _allow_non_fake_inputs=True).graph
    recorder = _Recorder(graph := fx.Graph(), inputs)
    with torch.no_grad(), getattr(inputs[0], "fake_mode", contextlib.nullcontext()), recorder:
        results = function(*inputs)
    graph.output(pytree.tree_map(recorder.node_of, results))
    return graph


class _Recorder(TorchDispatchMode):
    """Writes each operator that runs into a graph, under the name that `make_fx` gives it."""

    def __init__(self, graph: fx.Graph, inputs: Sequence[Any]) -> None:
        super().__init__()
        self._graph, self._nodes, self._alive = graph, dict[int, fx.Node](), list[Any]()
        for one in inputs:
            self._note(graph.placeholder(f"input_{len(graph.nodes)}"), one)

    def node_of(self, value: Any) -> Any:
        return self._nodes[id(value)] if isinstance(value, torch.Tensor) else value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **kwargs or {})
        if func is torch.ops.aten.detach.default:  # as C++ calls it of what it has just made
            self._note(self.node_of(args[0]), results)
        elif func._schema.is_mutable or isinstance(results, (torch.Tensor, list, tuple)):  # a device is no node
            args, kwargs = pytree.tree_map(self.node_of, (args, kwargs or {}))
            node = self._graph.create_node("call_function", func, args, kwargs, func.overloadpacket.__name__)
            self._note(node, results)
        return results

    def _note(self, node: fx.Node, value: Any) -> None:
        node.meta["val"] = value
        self._nodes[id(value)] = node
        self._alive.append(value)  # else its id would be another's
        for place, one in enumerate(value if isinstance(value, (list, tuple)) else ()):
            self._note(self._graph.call_function(operator.getitem, (node, place)), one)


def wrap_while_it_lives(module: fx.GraphModule) -> None:
    """Let torch.fx forget a module's code with the module.

    Where nodes have the mark `is_wrapped`, torch keeps the globals of the code for good, and patches each function that
    is named in them at every later trace of the process: of some hundred modules that is most of a trace's time.
    """
    weakref.finalize(module, _forget_wrapped, id(type(module).forward.__globals__)).atexit = False


def _forget_wrapped(code: int) -> None:
    known: dict[tuple[int, str], Any] = fx._symbolic_trace._wrapped_fns_to_patch
    for key in [key for key in known if key[0] == code]:
        known.pop(key, None)


def forward_of(module: fx.GraphModule) -> Callable[..., Any]:
    """The forward of a graph's module, its code written."""
    write = getattr(module, "real_recompile", None)
    if write is not None:
        write()
    return module.forward  # type: ignore[no-any-return]


@contextlib.contextmanager
def building() -> Iterator[None]:
    """Within it this thread alone traces and compiles, also the backwards that torch compiles when they first run.

    Dispatch modes of the user's see nothing of it. What holds torch's own lock (Dynamo, or a backward in the making)
    never waits for `BUILDING`.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    with BUILDING, dynamos_lock(), _states_of_lstm(), _disable_current_modes(), anomalies_aside():
        yield


def forget_real_tensors(graph: fx.Graph) -> None:
    """Let what made the stand-ins of a graph refer to no parameter, not even weakly: else torch swaps none of them.

    Args:
        graph: of an exported program.
    """
    try:
        from torch._dynamo.convert_frame import _clear_fake_mode_weakrefs  # from 2.13 on
    except ImportError:
        return
    stand_ins = [node.meta.get("val") for node in graph.find_nodes(op="placeholder")]
    for mode in {id(one.fake_mode): one.fake_mode for one in stand_ins if isinstance(one, FakeTensor)}.values():
        _clear_fake_mode_weakrefs(mode)


def anomalies_aside() -> contextlib.AbstractContextManager[None]:
    """Within it anomaly mode is off: it would look for NaN in the stand-ins of a trace."""
    return torch.autograd.set_detect_anomaly(False)  # type: ignore[no-any-return]


def dynamos_lock() -> Any:
    """What Dynamo holds while it captures."""
    return torch._dynamo.convert_frame.compile_lock


def _states_of_lstm() -> contextlib.AbstractContextManager[None]:
    """Within it the last states of an LSTM that is traced have the form that they have when it runs.

    Before torch 2.13 a dimension of size 1 is left in them, for any batch that is larger than 1.
    """
    from torch._decomp import decompositions

    theirs: Any = decompositions.one_layer_lstm

    def one_layer_lstm(inp: Any, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        out, states = theirs(inp, hidden, *args, **kwargs)
        formed = (
            state if state.dim() == initial.dim() else state.reshape(initial.shape)
            for state, initial in zip(states, hidden, strict=False)
        )
        return out, tuple(formed)

    return exchanged(decompositions, "one_layer_lstm", one_layer_lstm)


@contextlib.contextmanager
def exporting() -> Iterator[None]:
    """Within it this thread alone exports, and no other reads the tensors of modules; torch is left as it was found."""
    from torch.export import _trace

    with building(), TENSORS, restored_transforms(), _use_lazy_graph_module(True), whole_powers():
        depth, trace = getattr(_CAPTURING, "depth", 0), vars(_trace)
        _CAPTURING.depth = depth + 1
        trace["print"] = lambda *_, **__: None  # of the graph so far, where it fails; its error says what matters
        try:
            yield
        finally:
            _CAPTURING.depth = depth
            trace.pop("print", None)


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


SET_GRAD_ENABLED = torch._C._set_grad_enabled  # how a graph switches gradients off and on


def inference_mode_as_no_grad() -> contextlib.AbstractContextManager[None]:
    """Within it `torch.inference_mode` is `torch.no_grad` to this thread: tracing notes the one and not the other.

    Where the mode is on already there are no gradients to lose, and all stays as it is.
    """
    if torch.is_inference_mode_enabled():
        return contextlib.nullcontext()
    theirs, thread = torch._C._InferenceMode, threading.get_ident()

    def guard(off: bool) -> Any:
        if threading.get_ident() != thread:
            return theirs(off)
        return torch.no_grad() if off else torch.enable_grad()

    return exchanged(torch._C, "_InferenceMode", guard)


def captures_here() -> bool:
    """Whether this thread is within `exporting`."""
    return getattr(_CAPTURING, "depth", 0) > 0


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
    functorch: Any = torch._C._functorch
    transforms: Any = torch._functorch.eager_transforms
    forward_ad, depth = torch.autograd.forward_ad, functorch.get_dynamic_layer_stack_depth()
    nesting, level = transforms.JVP_NESTING, forward_ad._current_level
    enabled = torch._C._is_fwd_grad_enabled()
    try:
        yield
    finally:
        if functorch.get_dynamic_layer_stack_depth() > depth:
            functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        forward_ad._current_level = level
        with contextlib.suppress(RuntimeError):  # what it raises where there is none to leave; torch has one at most
            torch._C._exit_dual_level(level=level + 1)
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


def whole_powers() -> contextlib.AbstractContextManager[None]:
    """Within it a number that is an input may be negative in `number ** 2`; torch takes every base for positive."""
    theirs: Any = torch.SymFloat.__pow__

    def power(base: Any, exponent: Any) -> Any:
        whole = isinstance(exponent, (int, float)) and exponent > 0 and float(exponent).is_integer()
        return base.__float_pow__(exponent) if whole else theirs(base, exponent)

    return exchanged(torch.SymFloat, "__pow__", power)


def is_pointwise(operator: torch._ops.OpOverload) -> bool:
    """Whether each element of its result is made of one of each operand."""
    aten = torch.ops.aten
    untagged = (aten.leaky_relu.default, aten.hardswish.default, aten._prelu_kernel.default)  # the first in torch 2.11
    return torch.Tag.pointwise in operator.tags or operator in untagged


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


def trace_settings() -> list[str] | None:
    """All of torch that decides what a trace gives, as text; `None` where something does that has no text.

    That is a mode of the user's, a transform, a hook on saved tensors or another kernel for one of torch's operators.
    """
    # The last are in no trace of ours: those of vmap, and one of torch 2.14.
    torchs = re.compile(r"(?!aten/).*|.*/(Meta|MPS|CUDA|FuncTorch\w+|PythonTLSSnapshot)")
    own = [key for key in torch.library._impls if not torchs.fullmatch(key)]
    modes = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
    if own or modes or transforms_here(levels=False) or saved_tensor_hooks():
        return None
    from torch._functorch import config as functorch
    from torch.fx.experimental import _config as tracing

    backends, cuda = torch.backends, torch.backends.cuda
    configs: tuple[Any, ...] = (tracing, functorch)
    deterministic: Any = torch.utils.deterministic
    settings = [
        *(torch.__version__, torch.__config__.show(), torch.backends.cpu.get_cpu_capability()),
        torch._C._dynamo.guards.GlobalStateGuard().__getstate__(),
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
