"""`Program`: one captured and rewritten forward, ready to run for inputs of one signature."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn

from amp_compiler.backends import find_backend
from amp_compiler.errors import CaptureError, LoweringError
from amp_compiler.forward.settings import Settings, device_of
from amp_compiler.forward.shape_guards import InputForm
from amp_compiler.forward.tensor_versions import write_mark
from amp_compiler.forward.value_guards import ValueGuards
from amp_compiler.fx.capture import Captured, Source, capture_module, tensor_getter
from amp_compiler.fx.checkpoints import refused_checkpoints
from amp_compiler.fx.garbage import without_full_collections
from amp_compiler.fx.generators import generators_kept
from amp_compiler.fx.graph import copy_graph, sparse_node, torch_dtype
from amp_compiler.fx.lower import lower, lower_graph
from amp_compiler.fx.meta import Key
from amp_compiler.fx.numbers import Changing
from amp_compiler.fx.prints import prints_refused
from amp_compiler.fx.torch_private import TENSORS, reads_values
from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.graph import ValueKind
from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.ops import native
from amp_compiler.ops.stale_copies import CopyWatch
from amp_compiler.passes.pipeline import Pipeline, Stages
from amp_compiler.passes.plan.make_plan import make_plan
from amp_compiler.passes.precision.type_backward import emulates

logger = logging.getLogger("amp_compiler")
EAGER = "eager"  # the backend that runs any graph


def plan_captured(
    captured: Captured,
    settings: Settings,
    low: DType,
    stages: Stages | None = None,
    root: str = "",
    device: str = "",
) -> PrecisionPlan:
    """Bring a captured graph into normal form, in place, and plan it.

    Args:
        captured: as `fx.capture` makes it.
        settings: rules and pipelines.
        low: the 16-bit type.
        stages: takes the text behind each pass.
        root: name of the model in what was captured.
        device: type of the device that is planned for, where that is not the one that the tensors are on.
    """
    normalize(captured.graph_module, settings, stages, root, low)
    graph = lower(captured)
    graph.device = device or graph.device
    return make_plan(graph, settings.rules, low, stages=stages, pipeline=settings.pipelines["PLAN"])


def captures_whole(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a module can be captured as one graph for the shapes of these arguments alone."""
    try:
        with refused_checkpoints(), prints_refused(), generators_kept(model, args, kwargs):
            capture_module(model, args, kwargs)
    except CaptureError:
        return False
    return True


def normalize(
    graph_module: fx.GraphModule,
    settings: Settings,
    stages: Stages | None = None,
    root: str = "",
    low: DType | None = None,
) -> None:
    """Run the pipeline CAPTURE on a captured graph, in place; the arguments are those of `plan_captured`.

    Without `low` nothing is planned.
    """
    if stages is not None:
        stages.note("capture", stages.texts.of(graph_module))
    settings.pipelines["CAPTURE"].run(graph_module, {"root": root, "low": low and torch_dtype(low)}, stages)


def rewrite(
    graph_module: fx.GraphModule,
    plan: PrecisionPlan,
    settings: Settings,
    stages: Stages,
    *,
    past_weights: bool = True,
) -> bool:
    """Run the pipeline FORWARD on the normal-form graph that a plan was made for, in place.

    Args:
        graph_module: the graph.
        plan: its plan.
        settings: rules, pipelines and backend.
        stages: takes the text behind each pass.
        past_weights: as for `TypeBackward`.

    Returns:
        Whether FP32 arithmetic stands for 16-bit one, by a rule or for want of hardware, so that every down-cast must
        really round.
    """
    options = {"plan": plan, "ops": settings.ops, "past_weights": past_weights, "stage": native.FORWARD}
    _for_backend(settings.pipelines["FORWARD"], settings).run(graph_module, options, stages)
    return _emulates(graph_module, plan, stages)


def rewrite_for_inference(
    graph_module: fx.GraphModule, plan: PrecisionPlan, settings: Settings, stages: Stages, weights: tuple[str, ...]
) -> bool:
    """Run the pipeline INFERENCE, which leaves out what a plan says of gradients; see `rewrite`.

    Args:
        graph_module: the graph.
        plan: its plan.
        settings: rules, pipelines and backend.
        stages: takes the text behind each pass.
        weights: placeholders of the weights, the casts of which are kept between calls.
    """
    options = {
        "plan": plan,
        "ops": settings.ops,
        "weights": weights,
        "differentiable": False,
        "stage": native.FORWARD,
    }
    _for_backend(settings.pipelines["INFERENCE"], settings).run(graph_module, options, stages)
    return _emulates(graph_module, plan, stages)


def _for_backend(pipeline: Pipeline, settings: Settings) -> Pipeline:
    """Without the forms that only a compiler runs faster, where the graph is run node by node."""
    stays = settings.runs_on.compiled or "multiply_convolutions" not in pipeline.names
    return pipeline if stays else pipeline.skip("multiply_convolutions")


def build_run(
    graph_module: fx.GraphModule, examples: Sequence[Any], settings: Settings, round_exactly: bool, stages: Stages
) -> Callable[..., Any]:
    """A finished graph, or a piece of one, as a function of its flat inputs; a compiler is given it as PIECE makes it.

    Args:
        graph_module: the graph, which stays as it is for reading.
        examples: example inputs.
        settings: backend and pipelines.
        round_exactly: whether every down-cast in the graph must really round.
        stages: takes the text behind each pass.

    Raises:
        LoweringError: the backend cannot compile it.
    """
    backend = settings.runs_on
    if backend.compiled and (sparse := sparse_node(graph_module.graph)):
        logger.info(
            "a graph runs node by node, not compiled: '%s' is a sparse tensor, for which Inductor has no code", sparse
        )
        return find_backend(EAGER).build(graph_module, examples, True)
    if not backend.compiled:
        return settings.builder(graph_module, examples, round_exactly)
    compiled = copy_graph(graph_module)
    stages.begin_piece(stages.texts.of(compiled))
    settings.pipelines["PIECE"].run(compiled, {}, stages)
    try:
        return settings.builder(compiled, examples, round_exactly)
    except LoweringError as cause:
        if not reads_values(cause):
            raise
        logger.info("a graph runs node by node, not compiled: an operator reads the values of a tensor as numbers")
        return find_backend(EAGER).build(graph_module, examples, True)


def _emulates(graph_module: fx.GraphModule, plan: PrecisionPlan, stages: Stages) -> bool:
    return plan.device == "cpu" and (
        stages.changed("legalize") or stages.changed("widen_math") or emulates(graph_module.graph)
    )


def rewrite_piece(
    graph_module: fx.GraphModule, kinds: dict[str, ValueKind], settings: Settings, low: DType
) -> tuple[PrecisionPlan, bool, Stages]:
    """Plan and rewrite one flat ATen graph in place; returns the plan, what `rewrite` returns, and the stages."""
    stages = Stages()
    normalize(graph_module, settings, stages, low=low)
    graph, pipeline = lower_graph(graph_module, kinds), settings.pipelines["PLAN"]
    plan = make_plan(graph, settings.rules, low, stages=stages, pipeline=pipeline)
    return plan, rewrite(graph_module, plan, settings, stages), stages


@dataclass(eq=False)
class Program:
    """One rewritten forward of a module.

    Args:
        captured: its graph (rewritten) with the origin of each placeholder.
        plan: what was decided.
        run: the graph as a function of the flat inputs.
        weights: low-precision copies of weights that are kept between calls (inference only).
        fetch: for each placeholder, how to get its tensor; `None` for what comes from the arguments, and for numbers.
        form: which inputs it can be used for.
        stages: the text of the graph behind each pass.
        values: the Python values that it holds for.
    """

    captured: Captured
    plan: PrecisionPlan
    run: Callable[..., Any]
    weights: KeptWeights
    fetch: tuple[Callable[[], torch.Tensor] | None, ...]
    form: InputForm
    stages: Stages
    values: ValueGuards

    @property
    def graph_module(self) -> fx.GraphModule:
        """The rewritten graph."""
        return self.captured.graph_module

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """Run on the flattened user arguments."""
        with TENSORS:
            inputs = self.inputs(leaves)
        return self.run_on(inputs)

    def inputs(self, leaves: Sequence[Any]) -> list[Any]:
        """What the graph is given: the user's arguments and today's tensors of the module. Hold `TENSORS` meanwhile."""
        return _given(self.captured, self.fetch, leaves)

    def run_on(self, inputs: list[Any]) -> Any:
        """Run on what `inputs` gave."""
        results = list(self.run(*inputs, *self.weights.current(inputs)))
        self.captured.writes.put(results)
        spec = self.captured.out_spec
        return pytree.tree_unflatten(results[: spec.num_leaves], spec)


def _given(captured: Captured, fetch: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
    return [
        get()
        if get is not None
        else leaves[entry.index]
        if entry.source is Source.USER
        else captured.numbers[entry.name].tensor(leaves)
        for entry, get in zip(captured.inputs, fetch, strict=True)
    ]


class KeptWeights:
    """Low-precision copies of weights, made once and made again when a parameter changes.

    A change is seen as `write_mark` says: after a step of any optimizer of torch all copies are made again. What was
    written past version counters (`parameter.data.mul_()`) is seen by the values, as `CopyWatch` compares them.

    Args:
        casts: for each copy, place and name of the weight among the inputs and the type of the copy.

    Attributes:
        written: the first weight that was seen by its values; empty without one.
    """

    def __init__(self, casts: Sequence[tuple[int, str, torch.dtype]] = ()) -> None:
        self._casts, self.written, self._turn = tuple(casts), "", 0
        self._seen: list[tuple[int, ...] | None] = [None] * len(self._casts)
        self._copies: list[torch.Tensor | None] = [None] * len(self._casts)
        self._watched: CopyWatch | None = None

    def current(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The copies for today's inputs."""
        copies: list[torch.Tensor] = []
        fresh = 0
        for slot, (index, _, dtype) in enumerate(self._casts):
            tensor = inputs[index]
            counted = not tensor.is_inference()  # an inference tensor has no version counter: its copy is never kept
            mark = (id(tensor), *write_mark(tensor)) if counted else None
            copy = self._copies[slot]
            if copy is None or mark is None or self._seen[slot] != mark:
                copy = self._copies[slot] = tensor.detach().to(dtype)
                self._seen[slot], fresh = mark, fresh + 1
            copies.append(copy)
        if fresh:
            self._watched = None  # it holds the copies and weights that were
        return copies if fresh == len(copies) else self._compared(inputs, copies)

    def _compared(self, inputs: Sequence[torch.Tensor], copies: list[torch.Tensor]) -> list[torch.Tensor]:
        """Make those again that their weights no longer agree with, though nothing has told of a write."""
        watched = self._watched
        if watched is None:
            pairs = [(inputs[index], copy) for (index, *_), copy in zip(self._casts, copies, strict=True)]
            self._watched = watched = CopyWatch(pairs)
        self._turn += 1
        stale = watched.look(self._turn)
        if not stale:
            return copies
        self.written, self._watched = self.written or self._casts[stale[0]][1], None
        # A write is seldom of one weight alone, and sampling may see it in one alone.
        self._copies[:] = [inputs[index].detach().to(dtype) for index, _, dtype in self._casts]
        return [copy for copy in self._copies if copy is not None]

    def drop(self) -> None:
        """Forget the copies; the next call makes them again."""
        self._seen, self._copies, self._watched = [None] * len(self._casts), [None] * len(self._casts), None


def kept_weights(captured: Captured) -> KeptWeights:
    """What gives the placeholders that `HoistWeightCasts` added their tensors."""
    placeholders = captured.graph_module.graph.find_nodes(op="placeholder")
    index = {node.name: place for place, node in enumerate(placeholders)}
    added = [node.meta[Key.LOW] for node in placeholders[len(captured.inputs) :]]
    names = {entry.name: entry.target for entry in captured.inputs}
    return KeptWeights([(index[name], names[name], dtype) for name, dtype in added])


@without_full_collections()
def build_program(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    settings: Settings,
    keep_weights: bool,
    stages: Stages | None = None,
    changing: Changing = Changing(),  # noqa: B008  # it is frozen
) -> Program:
    """Capture, plan, rewrite and compile a module for these arguments.

    Args:
        model: the module, in the mode in which it is to run.
        args: positional arguments.
        kwargs: keyword arguments.
        settings: the options.
        keep_weights: keep low-precision weights between calls (no autograd).
        stages: takes the text behind each pass; new ones where it is `None`.
        changing: as for `capture_module`.

    Raises:
        CaptureError: the module cannot be taken as one graph.
        LoweringError: it cannot be rewritten or compiled.
    """
    with generators_kept(model, args, kwargs):
        stages = Stages() if stages is None else stages
        return _build_program(model, args, kwargs, settings, keep_weights, stages, changing)


def _build_program(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    settings: Settings,
    keep_weights: bool,
    stages: Stages,
    changing: Changing,
) -> Program:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    low = settings.low(device_of([*leaves, *model.parameters()]))
    with refused_checkpoints(), prints_refused():
        captured = capture_module(model, args, kwargs, settings.dynamic_shapes, changing, torch_dtype(low))
    users = sum(entry.source is Source.USER for entry in captured.inputs)
    if users != len(leaves) or captured.in_spec != spec:
        raise CaptureError(
            f"capture saw {users} inputs where the call has {len(leaves)}",
            where=type(model).__name__,
            hint="pass arguments that pytree can flatten (tensors, numbers, lists, dicts, dataclasses)",
        )
    form = InputForm.of(captured, leaves)
    if not form.is_dynamic:
        settings = replace(settings, dynamic_shapes=None)
    plan = plan_captured(captured, settings, low, stages)
    if keep_weights:
        held = tuple(entry.name for entry in captured.inputs if entry.source in (Source.PARAMETER, Source.BUFFER))
        emulated = rewrite_for_inference(captured.graph_module, plan, settings, stages, held)
    else:
        emulated = rewrite(captured.graph_module, plan, settings, stages)
    weights = kept_weights(captured)
    fetch = tuple(
        None if entry.source in (Source.USER, Source.NUMBER) else tensor_getter(model, captured, entry)
        for entry in captured.inputs
    )
    examples = _examples(captured, leaves, fetch, weights, settings)
    run = build_run(captured.graph_module, examples, settings, emulated, stages)
    values = ValueGuards(captured.state, captured.constants.values(), captured.numbers.values())
    return Program(captured, plan, run, weights, fetch, form, stages, values)


def _examples(
    captured: Captured, leaves: Sequence[Any], fetch: Sequence[Any], weights: KeptWeights, settings: Settings
) -> list[Any]:
    """Inputs to compile for: the real ones, or the symbolic ones of the capture where shapes are dynamic."""
    real = _given(captured, fetch, leaves)
    if settings.dynamic_shapes is None:
        return [*real, *weights.current(real)]
    nodes = captured.graph_module.graph.find_nodes(op="placeholder")
    return [
        _symbolic(node.meta.get("val", value), value)
        for node, value in zip(nodes, [*real, *weights.current(real)], strict=True)
    ]


def _symbolic(captured: Any, real: Any) -> Any:
    """The captured stand-in of an input, requiring a gradient where the real one does: capture does not note that."""
    if isinstance(captured, torch.Tensor) and isinstance(real, torch.Tensor) and real.requires_grad:
        return captured.detach().requires_grad_()
    return captured
