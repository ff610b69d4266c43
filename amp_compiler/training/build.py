"""Building a `StepProgram`: capture, plan, and the pipelines FORWARD, STEP and DEVICE."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from amp_compiler.backends.cuda_graph import GraphedRun, graph_obstacle
from amp_compiler.backends.step_runner import is_on_cpu, kernels_for, most_inner, run_cut_step
from amp_compiler.forward.program import build_run, normalize, plan_captured, rewrite
from amp_compiler.forward.settings import Settings
from amp_compiler.fx.capture.generators import generators_kept
from amp_compiler.fx.capture.hooks import refuse_parameter_hooks
from amp_compiler.fx.captured import Captured, Source
from amp_compiler.fx.garbage import without_full_collections
from amp_compiler.fx.graph import copy_graph, results_of, torch_dtype
from amp_compiler.fx.meta import Key
from amp_compiler.fx.synchronized_norms import check_marks, marked_norms
from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.ops import native
from amp_compiler.ops.cpu.arena import ArenaRun
from amp_compiler.ops.loss_scale import LossScale
from amp_compiler.ops.update.rounding import Storage
from amp_compiler.passes.pipeline import Late, Pipeline, Stages
from amp_compiler.passes.step.fold_loss_scale import SCALE
from amp_compiler.passes.step.separate_buffers import written_placeholders
from amp_compiler.ranks.parts import Parts
from amp_compiler.ranks.reduction import Reduction
from amp_compiler.ranks.traffic import bytes_of, traffic_of
from amp_compiler.training.capture import CapturedLoss, capture_once, with_parameters
from amp_compiler.training.inputs import StepInputs, TrainedWeights
from amp_compiler.training.loss_module import ROOT
from amp_compiler.training.program import CompiledStep, StepProgram, StepReport
from amp_compiler.training.setup import StepSetup
from amp_compiler.training.weights import check_parameters

_SCALE, _SKIPPED = ("scale", "scale", 0), ("scale", "skipped_steps", 0)


@dataclass(frozen=True)
class StepOptions:
    """What a step graph is built for.

    Args:
        setup: what the step was asked for, and holds.
        scale: the loss scale.
        divisor: number of batches, on all ranks together, whose gradients are averaged.
        gather: as for `GatherGradients`.
        reduction: how the gradients of several ranks are summed; `None` for one process.
        gathered: ids of the parameters that gradients of batches before were gathered of, which it uses.
        weighs: whether batches have weights, see `Samples`.
    """

    setup: StepSetup
    scale: LossScale
    divisor: int = 1
    gather: str = ""
    reduction: Reduction | None = None
    gathered: frozenset[int] = frozenset()
    weighs: bool = False

    @property
    def settings(self) -> Settings:
        """Rules, dtype, backend, pipelines."""
        return self.setup.settings

    def under(self, **changes: Any) -> StepOptions:
        """The same for other settings.

        Args:
            changes: of fields of `Settings`.
        """
        return replace(self, setup=replace(self.setup, settings=replace(self.settings, **changes)))


@without_full_collections()
def build_step(loss: CapturedLoss, options: StepOptions, stages: Stages) -> StepProgram:
    """Build the program of one training step.

    Args:
        loss: as it was captured.
        options: what to build.
        stages: takes the text behind each pass.

    Raises:
        CaptureError: the loss depends on no parameter of the optimizers.
        LoweringError: the graph cannot be compiled.
        PassError: a pass of the user's broke the contract.
    """
    with generators_kept():
        return finish(*begin(loss, options, stages))


@without_full_collections()
def begin_gradients(
    batch: tuple[Any, ...], options: StepOptions, stages: Stages, whole: bool = False
) -> tuple[fx.GraphModule, TrainedWeights, Begun]:
    """Forward and backward for a batch as one graph, which takes the loss scale: all that stands before the update.

    Args:
        batch: arguments of the loss function behind the model.
        options: what to build.
        stages: takes the text behind each pass.
        whole: with the update.

    Raises:
        CaptureError: the loss is not one graph.
    """
    setup = options.setup
    model = setup.module
    model.adopt(setup.optimizers)
    low = torch_dtype(setup.low) if setup.enabled else None
    with generators_kept():
        begun, options = begin(capture_once(model, batch, low), options, stages)
    pipeline = options.settings.pipelines["STEP"]
    passes = pipeline if whole else pipeline.stop_after("sum_gradients")
    joint, weights = run_step_passes(begun, options, passes)
    for node in joint.graph.find_nodes(op="placeholder"):
        if node.name == SCALE:
            node.meta[Key.STATE] = _SCALE
    return joint, weights, begun


def begin(loss: CapturedLoss, options: StepOptions, stages: Stages) -> tuple[Begun, StepOptions]:
    """The first half of a build: the forward, planned and rewritten, and what else it is for."""
    setup = options.setup
    model = setup.module
    check_parameters(model, setup.optimizers, torch_dtype(setup.low), setup.enabled)
    refuse_parameter_hooks((name.partition(".")[2], parameter) for name, parameter in model.named_parameters())
    if not loss.is_dynamic:
        options = options.under(dynamic_shapes=None)
    captured = with_parameters(loss.copy(), model, _from_elsewhere(options))
    norms = marked_norms(captured.graph_module)
    plan, emulated = _forward(captured, options, stages)
    check_marks(norms, captured.graph_module)
    graph = captured.graph_module.graph
    buffers = [entry.name for entry in captured.inputs if entry.source is Source.BUFFER]
    written = written_placeholders(graph, buffers)
    begun = Begun(captured, loss.inputs, len(results_of(graph)), written, held=loss.held)
    return replace(begun, plan=plan, emulated=emulated, stages=stages), options


def _from_elsewhere(options: StepOptions) -> frozenset[int]:
    """Ids of the parameters of which other ranks, or batches before this one, may have a gradient where it has none."""
    if options.reduction is None:
        return options.gathered
    return frozenset(id(p) for one in options.setup.optimizers for group in one.param_groups for p in group["params"])


@dataclass(frozen=True)
class Begun:
    """What the second half of a build starts from.

    Args:
        captured: the rewritten forward; or, where gradients are made elsewhere, a graph that takes parameters and
            buffers, and returns what it is given beside them.
        leaves: what a call gives it, flat.
        results: number of its results.
        written: placeholders of the buffers that get new values; from elsewhere, these stand behind the results.
        gradients: placeholders of the parameters whose gradients come from elsewhere; `None` where they are made here.
        in_fp32: those of them whose gradient is FP32, whatever they are.
        plan: what was decided for the forward.
        emulated: whether every down-cast must really round.
        held: as for `StepInputs`.
        stages: takes the text of the graph behind each pass.
    """

    captured: Captured
    leaves: Sequence[Any]
    results: int
    written: tuple[str, ...]
    gradients: tuple[str, ...] | None = None
    in_fp32: tuple[str, ...] = ()
    plan: PrecisionPlan | None = None
    emulated: bool = False
    held: Mapping[str, Tensor] = field(default_factory=dict)
    stages: Stages = field(default_factory=Stages)


def finish(begun: Begun, options: StepOptions) -> StepProgram:
    """Build a program from a rewritten forward, or from gradients that are made elsewhere.

    Args:
        begun: what there is so far.
        options: what to build.

    Raises:
        CaptureError: the loss depends on no parameter of the optimizers.
        LoweringError: the graph cannot be compiled.
        PassError: a pass of the user's broke the contract.
    """
    settings, state, stages, results = options.settings, options.setup.state, begun.stages, begun.results
    pipeline = settings.pipelines["STEP" if begun.gradients is None else "UPDATE"]
    step, weights = run_step_passes(begun, options, pipeline)
    resolve = weights.resolvers(step, state)
    static = settings.dynamic_shapes is None or begun.gradients is not None
    placeholders, known = step.graph.find_nodes(op="placeholder"), weights.fixed(step)
    examples = [one(begun.leaves) for one in resolve] if static else [node.meta["val"] for node in placeholders]
    # An error of rounding is there to be kept only where a cast of a compiled update really rounds.
    exact = begun.emulated or state.storage.rounding is Storage.KAHAN
    compiled = _compile(step, examples, settings, exact, stages)
    if settings.runs_on.asks_arena and static and is_on_cpu(step):
        compiled = ArenaRun(compiled, results + 3, state.memory)
    names = [node.name for node in placeholders]
    places = [place for place, name in enumerate(names) if name not in known]
    keys = [node.meta.get(Key.STATE) for node in placeholders]
    compiled = _with_scale(compiled, keys.index(_SCALE) if _SCALE in keys else None, results + 1)
    if options.scale.checks_finite and options.gather != "add":
        constant = options.scale.constant
        scale = results + 1 if constant is None else float(constant)
        compiled = state.events.watched(
            compiled, weights.names(), flags=results + 2, skipped=keys.index(_SKIPPED), scale=scale
        )
    notes = _notes_on_ranks(step, weights, options, results + 3)
    run = GraphedRun(compiled, names, places, results, state.graphs, _no_cuda_graph(step, settings, options.reduction))
    return StepProgram(
        compiled=CompiledStep(
            run=run,
            resolve=resolve,
            batch=places,
            groups=weights.groups,
            results=results,
            buffers=tuple(weights.inputs.getters[name] for name in begun.written),
            operands=weights.operands(step),
        ),
        report=StepReport(
            graph_module=step,
            plan=None if begun.plan is None else replace(begun.plan, notes=notes),
            notes=notes,
            stages=stages,
            updated=weights.names(),
            parts=weights.parts,
            divisor=options.divisor,
        ),
        agreement=replace(weights.agreement, written=begun.written),
    )


def run_step_passes(begun: Begun, options: StepOptions, pipeline: Pipeline) -> tuple[fx.GraphModule, TrainedWeights]:
    """Run the passes of a step, or the first of them, on a rewritten forward.

    Returns:
        The graph, and what says where its inputs come from.
    """
    storage = options.setup.state.storage
    inputs = converted_inputs(begun, options)
    weights = TrainedWeights(inputs, storage.rounding if storage.low else None, options.gathered)
    pass_options = _step_options(weights, begun, options)
    return pipeline.run(begun.captured.graph_module, pass_options, begun.stages), weights


def converted_inputs(begun: Begun, options: StepOptions) -> StepInputs:
    """The inputs of a step; weights that are stored in 16 bits alone, or split over the ranks, are so from now on."""
    setup, captured = options.setup, begun.captured
    graph, inputs = captured.graph_module.graph, StepInputs(setup.module, captured, setup.optimizers, begun.held)
    low, ops = torch_dtype(setup.low), options.settings.rules.ops
    if setup.state.storage.low:
        inputs.store_low(graph, low, ops, setup.state.storage)
    if options.reduction is not None and options.reduction.shards:
        inputs.split(graph, low, ops, setup.state, options.reduction.agree_on_parts)
    return inputs


def _with_scale(run: Callable[..., Sequence[Any]], place: int | None, result: int) -> Callable[..., Sequence[Any]]:
    """A step one of whose results is the loss scale as it was before the step: part of the graph that is replayed."""

    @functools.wraps(run, assigned=(), updated=())
    def with_scale(*inputs: Any) -> Sequence[Any]:
        before = None if place is None else inputs[place].clone()
        results = [*run(*inputs)]
        results[result] = before
        return results

    return with_scale


def _forward(captured: Captured, options: StepOptions, stages: Stages) -> tuple[PrecisionPlan | None, bool]:
    """Plan and rewrite the captured loss; also says whether the low type is emulated."""
    setup, settings = options.setup, options.settings
    if not setup.enabled:
        normalize(captured.graph_module, settings, stages, ROOT)
        return None, False
    nest = setup.module.nest
    name = type(nest).__name__ if isinstance(nest, nn.Module) else ""
    plan = plan_captured(captured, settings, setup.low, stages, ROOT, name=name)
    return plan, rewrite(captured.graph_module, plan, settings, stages, past_weights=False, keeps_amaxes=True)


def _step_options(weights: TrainedWeights, begun: Begun, options: StepOptions) -> dict[str, Any]:
    """The options of the passes of the pipelines STEP and UPDATE, by name."""
    state = options.setup.state
    return {
        "buffers": Late(lambda _: (*begun.written, *weights.amaxes)),
        "stored": weights.inputs.stored(),
        "trained": weights.inputs.trained,
        "masters": weights.storage is None,
        "split": weights.inputs.of_parts(state.parts),
        "wrt": Late(weights.wrt),
        "owner": Late(weights.owner),
        "absent": Late(weights.absent),
        "owners": Late(lambda graph_module: weights.taken(graph_module, begun.gradients or ())),
        "in_fp32": begun.in_fp32,
        "groups": Late(lambda _: weights.specs(state.parts)),
        "updated": Late(lambda _: weights.updated),
        "skips_overflow": state.storage.skips,
        "results": begun.results,
        "scale": options.scale,
        "clip_norm": options.setup.clip_norm,
        "divisor": options.divisor,
        "weighs": options.weighs,
        "gather": options.gather,
        "stage": native.FORWARD,
        **_reduction_options(weights, options, begun.written, state.parts),
    }


def _reduction_options(
    weights: TrainedWeights, options: StepOptions, written: tuple[str, ...], parts: Parts
) -> dict[str, Any]:
    reduction = options.reduction
    if reduction is None:
        return {}
    keeps = options.gather == "add"  # these gradients stay here
    agree = functools.partial(reduction.agree, buffers=written)
    sizes = reduction.bucket_bytes, reduction.in_fp32
    return {
        "group": reduction.group,
        "ranks": reduction.ranks,
        "buckets": Late(lambda graph_module: weights.split(graph_module, agree, keeps, parts, *sizes)),
        "parts": Late(lambda _: weights.parts),
        "shared": Late(lambda graph_module: weights.share(graph_module, agree, keeps)),
        "bucket_bytes": reduction.bucket_bytes,
        "reduce_in_fp32": reduction.in_fp32,
        "broadcast_buffers": reduction.broadcast_buffers,
    }


def _notes_on_ranks(
    step: fx.GraphModule, weights: TrainedWeights, options: StepOptions, before: int
) -> tuple[str, ...]:
    """What each of several ranks sends and holds; nothing where gradients are only gathered.

    Args:
        step: the whole graph.
        weights: that it trains.
        options: what it is built for.
        before: number of its results in front of the gradients.
    """
    reduction = options.reduction
    if reduction is None or options.gather == "add":
        return ()
    gradients = [node.meta["val"] for node in results_of(step.graph)[before + weights.parts :]]
    whole = weights.names()[weights.parts :] if reduction.shards else ()
    return traffic_of(step.graph, reduction.ranks, weights.updated).notes(whole, sum(map(bytes_of, gradients)))


def _compile(
    step: fx.GraphModule, examples: Sequence[Any], settings: Settings, round_exactly: bool, stages: Stages
) -> Callable[..., Sequence[Any]]:
    """The step graph, which stays as it is for reading, as a function of its placeholders' tensors."""

    def build(subgraph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return build_run(subgraph, inputs, settings, round_exactly, stages)

    with torch.no_grad():
        if not settings.runs_on.compiled:
            return build(step, examples)
        kernels = kernels_for(step)
        options = {"most_inner": most_inner(kernels), "kernels": tuple(kernels)}
        cut = settings.pipelines["DEVICE"].run(copy_graph(step), options, stages)
        return run_cut_step(cut, examples, build, kernels)


def _no_cuda_graph(step: fx.GraphModule, settings: Settings, reduction: Reduction | None = None) -> str:
    """Why the step cannot be replayed as a CUDA graph, as far as it is known before it runs."""
    if settings.runs_on.no_cuda_graph:
        return settings.runs_on.no_cuda_graph
    if settings.dynamic_shapes is not None:
        return "the shapes are dynamic (dynamic_shapes=)"
    if reduction is not None:
        return "its ranks send one another gradients in the midst of it"
    return graph_obstacle(step.graph)
