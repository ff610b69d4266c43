"""What is private of Inductor."""

import contextlib
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._ordered_set import OrderedSet

from amp_compiler.fx.capture.generators import generators_kept
from amp_compiler.fx.torch_private.breaks import needs_double_backward
from amp_compiler.fx.torch_private.runtime import exchanged

_PROBE = "_probe_load"
_ALLOCATE = "_empty_strided_cpu"  # read by the head of every module that Inductor writes
_GIVES_TABLE = "get_decomp_fn"  # since torch 2.12 Inductor hands on what gives the operators that it opens
Decomposition = Callable[..., Any]
LATE: ContextVar[Callable[[], contextlib.AbstractContextManager[Any]]] = ContextVar(
    "late", default=contextlib.nullcontext
)
"""Makes what a backward is compiled within where it is compiled when it first runs."""


def compile_with_inductor(
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    options: Mapping[str, Any],
    opened: Callable[[Mapping[Any, Decomposition]], Mapping[Any, Decomposition]],
    identity: str,
    as_error: Callable[[Exception], Exception],
) -> Callable[..., Any]:
    """Compile an ATen graph, and the backward that autograd makes of it, with Inductor.

    Args:
        graph_module: flat inputs, a tuple as output. It may be changed.
        inputs: example inputs, real or fake.
        options: of `torch._inductor.config`, by name; those that this torch does not know are left out.
        opened: from what it would open operators into, by operator, those that it is to open into something else.
        identity: for its cache: another text whenever `opened` may give something else.
        as_error: makes of what Inductor and the C++ compiler behind it raise what is raised in its place: here, or in
            the first backward, which is compiled when it runs.

    Raises:
        Exception: what `as_error` makes.
    """
    from torch._inductor import compile_fx as inductor
    from torch._inductor import config
    from torch._inductor.decomposition import select_decomp_table

    known = {name: value for name, value in options.items() if hasattr(config, name)}
    changed = OpenedOps(select_decomp_table(), opened, identity)

    late, finished = LATE.get(), False

    def compile_one(*args: Any, **kwargs: Any) -> Any:
        if _GIVES_TABLE in kwargs:
            kwargs[_GIVES_TABLE] = _Giving(changed)
        try:
            with late() if finished else contextlib.nullcontext(), generators_kept(), _reads_after_writes():
                return inductor.compile_fx_inner(*args, **kwargs)
        except Exception as cause:
            raise as_error(cause) from cause

    with _whole_permutations():
        compiled: Any = inductor.compile_fx(
            graph_module, _cacheable(inputs), inner_compile=compile_one, config_patches=known, decompositions=changed
        )
    finished = True  # what comes now is a backward that is compiled when it first runs
    return compiled  # type: ignore[no-any-return]


def _reads_after_writes() -> contextlib.AbstractContextManager[None]:
    """Let a loop that reads what was written in place run after that, also where Inductor has changed its ranges.

    Torch 2.13 then names what was there before the write, but for loops that have dependencies of other kinds.
    """
    from torch._inductor.scheduler import SchedulerNode

    recompute = SchedulerNode.recompute_size_and_body

    def renamed(node: Any, *args: Any, **kwargs: Any) -> None:
        recompute(node, *args, **kwargs)
        node.set_read_writes(node.read_writes.rename(node.mutation_renames))

    return exchanged(SchedulerNode, "recompute_size_and_body", renamed)


def _whole_permutations() -> contextlib.AbstractContextManager[None]:
    """Let `x[torch.randperm(len(x))]` be compiled: torch 2.13 knows it as `x[torch.randperm(len(x))[:slice_shape]]`,
    and raises where that slice is left out."""
    from torch._inductor import pattern_matcher as matcher

    if (match := getattr(matcher, name := "_unflatten_match_kwargs", None)) is None:
        return contextlib.nullcontext()
    return exchanged(matcher, name, functools.partial(match, defaults={"slice_shape": sys.maxsize}))


def rounds_each_cast() -> bool:
    """Whether Inductor, with `emulate_precision_casts`, rounds wherever a graph casts down and up again.

    Before torch 2.13 that option does not reach casts that stand in the graph.
    """
    from torch._inductor.fx_passes import joint_graph

    return hasattr(joint_graph, "_is_lossless_fp_widening_cast")


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


def draws(target: Any) -> bool:
    """Whether an operator draws random numbers."""
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def ordered_draws(graph: fx.Graph) -> None:
    """Let what draws of the random state run in the order of a graph that Inductor is about to lower, seeds first."""
    drawing = [node for node in graph.nodes if draws(node.target)]
    if len(drawing) < 2:
        return
    from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering

    seeds = [node for node in drawing if node.target is torch.ops.prims.inductor_seeds.default]
    for node in seeds:
        next(iter(graph.nodes)).prepend(node)
    ordered = [*seeds, *(node for node in drawing if node not in seeds)]
    preserve_node_ordering(graph, {node: OrderedSet([before]) for before, node in pairwise(ordered)})


def opened_draws(call: Callable[..., tuple[torch.Tensor, ...]], inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
    """A call as Inductor is given it, with operators that draw random numbers opened, and no others."""
    from torch._functorch.aot_autograd import aot_export_joint_simple
    from torch._inductor.decomposition import select_decomp_table

    table: dict[Any, Any] = {target: into for target, into in select_decomp_table().items() if draws(target)}
    opened: Any = aot_export_joint_simple(call, tuple(inputs), trace_joint=False, decompositions=table)
    return opened  # type: ignore[no-any-return]


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


def inductor_option(name: str) -> Any:
    """What a setting of Inductor is now; `None` where this torch does not know it."""
    from torch._inductor import config

    return getattr(config, name, None)


def puts_channels_last(graph: fx.Graph) -> bool:
    """Whether Inductor lets the convolutions of a graph that it hands to a pass read images channels-last."""
    from torch._inductor.graph import GraphLowering

    return bool(GraphLowering.decide_layout_opt(graph.owning_module, is_inference=False))  # type: ignore[arg-type]


def inductor_graph_pass(identity: str, work: Sequence[Callable[[fx.Graph], Any]], theirs: Any) -> Any:
    """A pass as Inductor wants it, behind the ones that the user has set there.

    Where Inductor takes one pass alone, as in torch 2.11, that one runs the user's too.

    Args:
        identity: for Inductor's cache: another text whenever the pass would do something else.
        work: changes each graph, forward and backward, one after another, before Inductor lowers it.
        theirs: what is set there now: nothing, a pass, or several of them.
    """
    from torch._inductor import custom_graph_pass

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
    return exchanged(guards, _ALLOCATE, wrap(allocate))


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
    wrapped = functools.partialmethod(lambda isa, library: wrap(functools.partial(probe, isa))(library))
    return exchanged(VecISA, _PROBE, wrapped)


def keeps_compiled() -> bool:
    """Whether torch may keep what it compiles from process to process; a user switches all such caches off at once."""
    from torch.compiler import config

    return not getattr(config, "force_disable_caches", False)


def kernel_folder() -> Path:
    """Where Inductor keeps its code."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


def kernel_libraries() -> list[Path]:
    """The libraries for a CPU that this process has compiled or loaded, which torch's portable cache leaves out."""
    from torch._inductor import codecache

    keys = {*codecache.CppCodeCache.cache, *codecache.CppPythonBindingsCodeCache.cache}
    return [file for key in sorted(keys) for file in sorted((kernel_folder() / key[1:3]).glob(f"{key}.*so"))]


_INSTEAD = "amp_instead"


def compiled_node(results: Sequence[Any]) -> Any:
    """The node of autograd that a compiled graph has made of a call; `None` where it recorded none, or none is known.

    Args:
        results: of the call; a node that was taken over is that of an earlier call.
    """
    nodes = [one.grad_fn for one in results if isinstance(one, torch.Tensor) and one.requires_grad]
    compiled = (one for one in nodes if hasattr(getattr(type(one), "_forward_cls", None), "_aot_id"))
    return next((one for one in compiled if not hasattr(one, _INSTEAD)), None)


def take_over_backward(node: Any, instead: Callable[[Any, Sequence[Any]], tuple[Any, ...]]) -> None:
    """Let a function make the gradients of a call of compiled code where the compiled backward cannot.

    That is where they are to be differentiated, and where a backward that uses up what it reads is to run again.

    Args:
        node: as `compiled_node` gives it.
        instead: is given the node and the gradients of what it returned, and returns those of the inputs.
    """
    kind = type(node)._forward_cls
    if not hasattr(kind, _INSTEAD):
        setattr(kind, _INSTEAD, None)
        kind.backward = staticmethod(_taken_over(kind.backward, getattr(kind, "boxed_grads_call", False)))
    setattr(node, _INSTEAD, instead)


def _taken_over(compiled: Callable[..., Any], boxed: bool) -> Callable[..., Any]:
    def backward(ctx: Any, *gradients: Any) -> Any:
        instead, again = getattr(ctx, _INSTEAD, None), torch._C._autograd._get_current_graph_task_keep_graph()
        if not again and not torch.is_grad_enabled():
            setattr(ctx, _INSTEAD, None)  # what it holds goes with what autograd has saved
        elif instead is not None:
            flat = [*(gradients[0] if boxed else gradients)]
            if torch.is_grad_enabled():
                return instead(ctx, flat)
            try:
                return compiled(ctx, *gradients)
            except RuntimeError as error:
                if not needs_double_backward(error):
                    raise
                return instead(ctx, flat)
        return compiled(ctx, *gradients)

    return torch.compiler.disable(backward)  # type: ignore[no-any-return]  # Dynamo may be around a user's own loop
