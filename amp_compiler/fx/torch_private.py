"""The one place that touches torch's private interfaces, each looked for before it is used (torch 2.11 to 2.15)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

_ALLOCATE = "_empty_strided_cpu"  # read by the head of every module that Inductor writes
BUILDING = threading.RLock()  # torch traces and exports with state of the whole process: one graph at a time


def compile_with_inductor(
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    options: Mapping[str, Any],
    whole: Mapping[Any, Callable[..., bool]],
) -> Callable[..., Any]:
    """Compile an ATen graph, and the backward that autograd makes of it, with Inductor.

    Args:
        graph_module: flat inputs, a tuple as output. It may be changed.
        inputs: example inputs, real or fake.
        options: of `torch._inductor.config`, by name; those that this torch does not know are left out.
        whole: operators that it is to write loops for as they are, not for what it would open them into, each with a
            function of a call's arguments that says whether.

    Raises:
        ImportError: where this torch has no Inductor, see `has_inductor`.
        Exception: whatever Inductor and the C++ compiler behind it raise.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.decomposition import select_decomp_table

    known = {name: value for name, value in options.items() if hasattr(config, name)}
    opened = dict(select_decomp_table())
    for op, stays in whole.items():
        if op in opened:
            opened[op] = _unless(stays, opened[op])
    compiled: Any = compile_fx(graph_module, list(inputs), config_patches=known, decompositions=opened)
    return compiled  # type: ignore[no-any-return]


def _unless(stays: Callable[..., bool], opened: Callable[..., Any]) -> Callable[..., Any]:
    """A decomposition that leaves the calls as they are that `stays` says so of."""

    def open_or_not(*args: Any, **kwargs: Any) -> Any:
        return NotImplemented if stays(*args, **kwargs) else opened(*args, **kwargs)

    return open_or_not


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


def unrolled_recurrence() -> contextlib.AbstractContextManager[Any]:
    """Within it, Dynamo takes recurrent layers into its graphs, where this torch has that option."""
    config = torch._dynamo.config
    return config.patch(allow_rnn=True) if hasattr(config, "allow_rnn") else contextlib.nullcontext()  # type: ignore[no-any-return]


def unspecialised_integers() -> contextlib.AbstractContextManager[Any]:
    """Within it, a number of a module that changes at every call (`self.n += 1`) becomes an input of Dynamo's graphs.

    Without it Dynamo captures the model again for each number, and gives up after eight of them.
    """
    config, name = torch._dynamo.config, "allow_unspec_int_on_nn_module"
    return config.patch({name: True}) if hasattr(config, name) else contextlib.nullcontext()  # type: ignore[no-any-return]


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
    for name, method in ours.items():
        setattr(TensorVariable, name, method)
    try:
        yield
    finally:
        for name, original in theirs.items():
            delattr(TensorVariable, name) if original is None else setattr(TensorVariable, name, original)


def dynamo_error() -> type[Exception]:
    """The base of what Dynamo raises."""
    return torch._dynamo.exc.TorchDynamoException


def own_decompositions() -> contextlib.AbstractContextManager[None]:
    """Within it, tracing opens compound operators as it does for torch's own compiler.

    Without it dropout becomes `empty_like -> bernoulli_`, for which Inductor on a CPU (torch 2.13) writes code that
    reads the empty buffer before it is filled.
    """
    from torch._dispatch.python import enable_python_dispatcher

    return enable_python_dispatcher()  # type: ignore[no-any-return]


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

    Where this torch takes one pass only, the user's stays alone; where its passes have no identity, none is added.

    Args:
        identity: for Inductor's cache: another text whenever the pass would do something else.
        work: changes each graph, forward and backward, one after another, before Inductor lowers it.
        theirs: what is set there now.
    """
    try:
        from torch._inductor.custom_graph_pass import CustomGraphPass
    except ImportError:
        return theirs

    class GraphPass(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            for run in work:
                run(graph)

        def uuid(self) -> str:
            return identity

    if theirs is None:
        return GraphPass()
    try:
        from torch._inductor.custom_graph_pass import get_custom_graph_passes
    except ImportError:
        return theirs
    return [*get_custom_graph_passes(theirs), GraphPass()]


@contextlib.contextmanager
def cpu_allocation(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Let code that Inductor loads meanwhile ask for CPU memory elsewhere, where this torch can be told.

    Args:
        wrap: gives what is to be asked, from what is asked now.
    """
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    allocate = getattr(guards, _ALLOCATE, None)
    if allocate is None or not isinstance(guards, ModuleType):
        yield
        return
    setattr(guards, _ALLOCATE, wrap(allocate))
    try:
        yield
    finally:
        setattr(guards, _ALLOCATE, allocate)


def end_failed_capture(device: torch.device, pool: Any) -> None:
    """Tell the allocator that the capture of a CUDA graph which failed is over.

    torch does so at the end of a capture that succeeds. Without it the allocator would keep memory that several streams
    used until a capture ends that is none.
    """
    end = getattr(torch._C, "_cuda_endAllocateToPool", None)
    if end is None:
        return
    with contextlib.suppress(RuntimeError):  # torch had told it already
        end(torch.cuda.current_device() if device.index is None else device.index, pool)


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
