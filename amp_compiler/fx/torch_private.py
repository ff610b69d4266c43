"""The one place that touches torch's private interfaces, each looked for before it is used (torch 2.11 to 2.15)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from amp_compiler.errors import LoweringError
from amp_compiler.ops.cpu.arena import allocator

_LAST_PASS = "post_grad_custom_post_pass"
# GCC 12 and its SLP vectorizer make code for 16-bit tiles that Inductor transposes which reads them before they are
# written. This option of Inductor is the one that is put into the compiler's command line as it stands.
_CONTRACTION = "cpp.enable_floating_point_contract_flag"
_NO_SLP = "-fno-tree-slp-vectorize"
_ALLOCATE = "_empty_strided_cpu"  # read by the head of every module that Inductor writes
BUILDING = threading.RLock()  # torch traces and exports with state of the whole process: one graph at a time


def inductor_compile(
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    round_exactly: bool = False,
    last_pass: tuple[str, Callable[[fx.Graph], None]] | None = None,
) -> Callable[..., Any]:
    """Compile an ATen graph, forward and backward, with Inductor.

    Args:
        graph_module: flat inputs, a tuple as output; parameters are inputs. It may be changed.
        inputs: example inputs, real or fake.
        round_exactly: round wherever the graph casts down. Otherwise Inductor may keep a value in FP32 inside a fused
            loop where the graph rounds it to 16 bits and widens it again.
        last_pass: changes each graph, forward and backward, before Inductor lowers it; with a text that is another one
            whenever it would do something else, for Inductor's cache.

    Returns:
        A function of the same inputs that autograd can go through.

    Raises:
        LoweringError: where Inductor is not in this torch, or cannot compile the graph.
    """
    try:
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx
    except ImportError as cause:
        raise LoweringError(
            f"torch {torch.__version__} has no Inductor that this version knows", mend="use backend='eager'"
        ) from cause
    try:
        # torch 2.13's reordering for peak memory can move a read before the scatter that it reads: behind a max-pool
        # every gradient of a small CNN then comes out as zero, in FP32 too (tests/test_demo.py holds that).
        # Weights are plain inputs here: Inductor's own CUDA graphs (TORCHINDUCTOR_CUDAGRAPHS=1) would copy them at each
        # call, and could not be part of the graph that a training step is replayed as.
        wanted: dict[str, Any] = {
            "reorder_for_peak_memory": False,
            "emulate_precision_casts": round_exactly,
            "triton.cudagraphs": False,
        }
        if hasattr(config, _CONTRACTION) and _narrow_on_cpu(graph_module):
            wanted[_CONTRACTION] = f"{getattr(config, _CONTRACTION)} {_NO_SLP}"
        if last_pass is not None:
            wanted[_LAST_PASS] = _graph_passes(*last_pass, getattr(config, _LAST_PASS, None))
        patches = {name: value for name, value in wanted.items() if hasattr(config, name)}
        with _own_allocator():
            compiled: Any = compile_fx(graph_module, list(inputs), config_patches=patches)
        return compiled  # type: ignore[no-any-return]
    except Exception as cause:  # Inductor and the C++ compiler behind it raise many types
        raise LoweringError(
            f"Inductor cannot compile the graph: {type(cause).__name__}: {_first_line(cause)}",
            mend="use backend='eager' to run the same graph node by node",
        ) from cause


def _narrow_on_cpu(graph_module: fx.GraphModule) -> bool:
    values = [value for node in graph_module.graph.nodes if isinstance(value := node.meta.get("val"), torch.Tensor)]
    return any(value.device.type == "cpu" and value.dtype in (torch.bfloat16, torch.float16) for value in values)


def unrolled_recurrence() -> contextlib.AbstractContextManager[Any]:
    """Within it, Dynamo takes recurrent layers into its graphs, where this torch has that option."""
    config = torch._dynamo.config
    return config.patch(allow_rnn=True) if hasattr(config, "allow_rnn") else contextlib.nullcontext()  # type: ignore[no-any-return]


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


def _graph_passes(identity: str, run: Callable[[fx.Graph], None], theirs: Any) -> Any:
    """A pass as Inductor wants it, behind the ones that the user has set there.

    Where this torch takes one pass only, the user's stays alone; where its passes have no identity, none is added.
    """
    try:
        from torch._inductor.custom_graph_pass import CustomGraphPass
    except ImportError:
        return theirs

    class GraphPass(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
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
def _own_allocator() -> Iterator[None]:
    """Let code that Inductor loads meanwhile ask `runtime.arena` for CPU memory, where this torch can be told."""
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    allocate = getattr(guards, _ALLOCATE, None)
    if allocate is None or not isinstance(guards, ModuleType):
        yield
        return
    setattr(guards, _ALLOCATE, allocator(allocate))
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


def _first_line(cause: Exception) -> str:
    lines = str(cause).strip().splitlines()
    return lines[0] if lines else ""


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
