"""The Inductor backend: the rewritten graph compiled, forward and backward."""

from __future__ import annotations

import copy
import functools
import hashlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import fx

from amp_compiler.backends import vector_probes
from amp_compiler.backends.backend import TUNED, Backend
from amp_compiler.backends.decompositions import IDENTITY, own_decompositions
from amp_compiler.errors import LoweringError, first_line
from amp_compiler.fx.checkpoints import recomputed_in
from amp_compiler.fx.graph import is_single_number, own_upcasts
from amp_compiler.fx.meta import Key
from amp_compiler.fx.torch_private import inductor as torch_inductor
from amp_compiler.fx.torch_private.dynamo import is_restart
from amp_compiler.fx.torch_private.tracing import recomputed, whole_powers
from amp_compiler.ops.cpu.arena import allocator
from amp_compiler.ops.native import JOINT
from amp_compiler.passes import find_pass
from amp_compiler.passes.base import LatePass
from amp_compiler.passes.device.native_ops import sources
from amp_compiler.passes.pipeline import LATE

# GCC 12 and its SLP vectorizer make code for 16-bit tiles that Inductor transposes which reads them before they are
# written. This option of Inductor is the one that is put into the compiler's command line as it stands.
_CONTRACTION = "cpp.enable_floating_point_contract_flag"
_NO_SLP = "-fno-tree-slp-vectorize"
# Kernels that share no memory become one all the same. The threshold is the bytes that a fusion must save.
_ONE_KERNEL = {"combo_kernels": True, "score_fusion_memory_threshold": 1}
# On a GPU Inductor (torch 2.11 to 2.13) leaves loops as they were written, to order them anew when it fuses. A cast
# behind a change of shape, as that of every gradient which enters a matrix product, then has other loops than the
# norm's backward before it, and becomes a kernel of its own. Merged loops fuse.
_MERGED_LOOPS = {"loop_ordering_after_fusion": False}
# Inductor moves what nothing but the results reads to the end of a graph (torch 2.11 to 2.13): gradients of weights.
# What these are made of would be kept until then, the values of the forward and the gradients of all layers.
_GRADIENTS_IN_PLACE = {"reorder_for_locality": False}
# A gradient that residual branches add up is read by two loops of each batch norm on its way, and by the next sum. Made
# once, of three values, it is written once; else each of them adds up anew what the sums before it were made of.
_SUMS_KEPT = {"realize_reads_threshold": 2}
# As torch.compile's mode of that name, whose CUDA graphs a training step has in every mode.
_TUNING = {"max_autotune": True, "coordinate_descent_tuning": True}
_NORM_BACKWARD = torch.ops.aten.native_batch_norm_backward.default
_CONTIGUOUS = torch.ops.aten.contiguous.default
_LAST_PASS = "post_grad_custom_post_pass"


def build(
    graph_module: fx.GraphModule, inputs: Sequence[Any], round_exactly: bool = False, tuned: bool = False
) -> Callable[..., Any]:
    """Compile the graph, as the pipeline SUBGRAPH made it, for inputs like these; it stays as it is, for reading.

    Args:
        graph_module: the graph.
        inputs: example inputs, real or fake.
        round_exactly: as for `compile_graph`.
        tuned: as for `compile_graph`.

    Raises:
        LoweringError: where Inductor cannot compile it.
    """
    return compile_graph(copy.deepcopy(graph_module), inputs, round_exactly, tuned)


def compile_graph(
    graph_module: fx.GraphModule, inputs: Sequence[Any], round_exactly: bool = False, tuned: bool = False
) -> Callable[..., Any]:
    """Compile an ATen graph with Inductor, and the backward that autograd makes of it.

    Args:
        graph_module: flat inputs, a tuple as output; parameters are inputs. It may be changed.
        inputs: example inputs, real or fake.
        round_exactly: round wherever the graph casts down. Otherwise Inductor may keep a value in FP32 inside a fused
            loop where the graph rounds it to 16 bits and widens it again.
        tuned: let Inductor time several kernels for a product, and several sizes of blocks for a loop.

    Returns:
        A function of the same inputs that autograd can go through.

    Raises:
        LoweringError: Inductor cannot compile the graph.
    """
    regions = recomputed_in(list(graph_module.graph.nodes)) if torch.is_grad_enabled() else {}
    for node in (*regions, *_widened(graph_module.graph)):
        node.meta[Key.RECOMPUTED] = True
    options = _options(graph_module, round_exactly) | (_TUNING if tuned else {})
    for node in graph_module.graph.nodes:
        # Names of sizes that depend on data, in the capture: Inductor's trace gives them others, and knows no old ones.
        node.meta.pop("unbacked_bindings", None)
        if Key.RECOMPUTED in node.meta:
            node.meta.update(recomputed(regions.get(node, 0)))
    try:
        with (
            torch_inductor.cpu_allocation(allocator),
            torch_inductor.vector_probes(vector_probes.remembered),
            whole_powers(),
        ):
            return torch_inductor.compile_with_inductor(
                graph_module, inputs, options, own_decompositions, IDENTITY, _not_compiled
            )
    except LoweringError:
        raise
    except Exception as cause:  # Inductor and the C++ compiler behind it raise many types
        if is_restart(cause):
            raise
        raise _not_compiled(cause) from cause


def _widened(graph: fx.Graph) -> list[fx.Node]:
    """What widens a 16-bit value for one product, and copies of it: a backward makes them anew, not to keep FP32."""
    upcasts = own_upcasts(graph)
    return [*upcasts, *(user for node in upcasts for user in node.users if user.target is _CONTIGUOUS)]


def _not_compiled(cause: Exception) -> LoweringError:
    return LoweringError(
        f"Inductor cannot compile the graph: {type(cause).__name__}: {first_line(cause)}",
        hint="use backend='eager' to run the same graph node by node",
    )


def _options(graph_module: fx.GraphModule, round_exactly: bool) -> dict[str, Any]:
    """Inductor's settings for a graph, by their names in `torch._inductor.config`."""
    # torch 2.13's reordering for peak memory can move a read before the scatter that it reads: behind a max-pool
    # every gradient of a small CNN then comes out as zero, in FP32 too (tests/cli/test_demo.py holds that).
    # Weights are plain inputs here: Inductor's own CUDA graphs (TORCHINDUCTOR_CUDAGRAPHS=1) would copy them at each
    # call, and could not be part of the graph that a training step is replayed as.
    options: dict[str, Any] = {
        "reorder_for_peak_memory": False,
        "emulate_precision_casts": round_exactly,
        "triton.cudagraphs": False,
    }
    contraction = torch_inductor.inductor_option(_CONTRACTION)
    if contraction is not None and _narrow_on_cpu(graph_module):
        options[_CONTRACTION] = f"{contraction} {_NO_SLP}"
    on_gpu = any(value.device.type == "cuda" for value in _values(graph_module))
    if on_gpu:
        options.update(_MERGED_LOOPS | _GRADIENTS_IN_PLACE)
        options.update(_SUMS_KEPT if graph_module.graph.find_nodes(op="call_function", target=_NORM_BACKWARD) else {})
    if _is_numbers_on_gpu(graph_module):
        known = {name: value for name, value in _ONE_KERNEL.items() if torch_inductor.inductor_option(name) is not None}
        options.update(known)
    late = [one for one in cast("list[LatePass]", LATE.instances({"stage": JOINT})) if one.awaited(graph_module.graph)]
    # Also where there is nothing to do: what another version of ours has put into torch's caches is not for this one.
    # And what was made for another processor is not for this one: loops count in steps of its vectors, which torch's
    # own key leaves out, so that a folder that machines share gives wrong numbers.
    parts = [_identity(), torch.backends.cpu.get_cpu_capability(), *(one.identity() for one in late)]
    recomputed = [node.name for node in graph_module.graph.nodes if Key.RECOMPUTED in node.meta]
    if recomputed:
        parts.append(f"recomputed: {' '.join(recomputed)}")  # torch's own key leaves out what is marked
    theirs, identity = torch_inductor.inductor_option(_LAST_PASS), ", ".join(parts)
    work = [*(one.rewrite for one in late), torch_inductor.ordered_draws]
    options[_LAST_PASS] = torch_inductor.inductor_graph_pass(identity, work, theirs)
    return options


@functools.cache
def _identity() -> str:
    """Another text whenever a graph may be compiled otherwise: operators, decompositions, passes, changes to torch."""
    modules = [__name__, torch_inductor.__name__, *(find_pass(name).__module__ for name in LATE.names)]
    own = b"".join(Path(str(sys.modules[one].__file__)).read_bytes() for one in modules)
    return f"{sources()}, {IDENTITY}, {hashlib.sha256(own).hexdigest()}"


def _narrow_on_cpu(graph_module: fx.GraphModule) -> bool:
    low = (torch.bfloat16, torch.float16)
    return any(value.device.type == "cpu" and value.dtype in low for value in _values(graph_module))


def _is_numbers_on_gpu(graph_module: fx.GraphModule) -> bool:
    """Whether all values are single numbers, for each of which a kernel of its own would be too much."""
    values = _values(graph_module)
    return bool(values) and all(one.device.type == "cuda" and is_single_number(one) for one in values)


def _values(graph_module: fx.GraphModule) -> list[torch.Tensor]:
    return [value for node in graph_module.graph.nodes if isinstance(value := node.meta.get("val"), torch.Tensor)]


BACKEND = Backend(
    "inductor", build, compiled=True, asks_arena=True, modes={TUNED: functools.partial(build, tuned=True)}
)
