"""Building a `StepProgram`: capture, plan, rewrite, differentiate, fuse, compile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from amp_compiler.backends.cuda_graph import GraphedRun, GraphSettings, graph_obstacle
from amp_compiler.backends.step_pieces import compile_step
from amp_compiler.errors import CaptureError
from amp_compiler.forward.program import plan_captured, rewrite
from amp_compiler.forward.settings import Settings, device_of
from amp_compiler.forward.shape_guards import InputForm
from amp_compiler.fx.alias import AliasGroups, written_operands
from amp_compiler.fx.capture import Captured, Input, Source, capture_module, tensor_getter
from amp_compiler.fx.graph import replace_other_uses, results_of, torch_dtype
from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.ops.cpu.arena import ArenaMemory, ArenaRun
from amp_compiler.ops.loss_scale import LossScale, LossScaleState
from amp_compiler.ops.native import FORWARD
from amp_compiler.passes.capture.canonicalize import normalize
from amp_compiler.passes.device.native_ops import NativeOps
from amp_compiler.passes.step.differentiate import Differentiate
from amp_compiler.passes.step.fold_loss_scale import FoldLossScale
from amp_compiler.passes.step.fuse_update import STATE, FuseUpdate
from amp_compiler.passes.step.place_weights import PlacedWeights, insert_upcasts, place_weights
from amp_compiler.passes.step.simplify_casts import SimplifyCasts
from amp_compiler.training.fused_optimizers import BoundGroup, bind
from amp_compiler.training.program import ROOT, LossModule, StepProgram
from amp_compiler.training.state import GradientSums, LowWeights
from amp_compiler.training.traced_optimizers import TracedGroup
from amp_compiler.training.weights import COMPENSATION, WeightState, check_types, store_low, widened

Getters = dict[str, Callable[[], Tensor]]


@dataclass(frozen=True)
class StepOptions:
    """What a step graph is built for.

    Args:
        settings: rules, dtype, backend.
        optimizers: checked optimizers.
        scale: the loss scale.
        clip_norm: largest global gradient norm, `None` for no clipping.
        enabled: mixed precision; without it the same graph in FP32.
        divisor: number of batches whose gradients are averaged.
        gather: as for `FuseUpdate`.
    """

    settings: Settings
    optimizers: tuple[torch.optim.Optimizer, ...]
    scale: LossScale
    clip_norm: float | None = None
    enabled: bool = True
    divisor: int = 1
    gather: str = ""


@dataclass(frozen=True)
class StepState:
    """The tensors that all programs of a training step share.

    Args:
        scale: gives the loss scale's present state.
        lows: the 16-bit weights.
        sums: sums of gradients over several batches.
        graphs: what their CUDA graphs share.
        weights: FP32 masters of 16-bit parameters, or what storage without masters needs.
        memory: where a CPU keeps intermediate values.
    """

    scale: Callable[[], LossScaleState]
    lows: LowWeights
    sums: GradientSums
    graphs: GraphSettings
    weights: WeightState
    memory: ArenaMemory = field(default_factory=ArenaMemory)


def build_step(model: LossModule, batch: tuple[Any, ...], options: StepOptions, state: StepState) -> StepProgram:
    """Build the program of one training step.

    Args:
        model: the loss as a module.
        batch: arguments of the loss function behind the model.
        options: what to build.
        state: the tensors that it works on.

    Raises:
        CaptureError: the loss cannot be captured as one graph, or depends on no parameter of the optimizers.
        LoweringError: the graph cannot be compiled.
    """
    leaves, _ = pytree.tree_flatten((batch, {}))
    low = torch_dtype(options.settings.low(device_of([*leaves, *model.parameters()])))
    check_parameters(model, options.optimizers, low, options.enabled)
    with widened(model.parameters()):
        captured, form, plan, emulated = _forward(model, batch, leaves, options)
    results = len(results_of(captured.graph_module.graph))
    buffers = _separate_buffers(captured)
    entries = {entry.name: entry for entry in captured.inputs}
    getters = {
        name: tensor_getter(model, captured, entry)
        for name, entry in entries.items()
        if entry.source is not Source.USER
    }
    trained = _trained(entries, getters, options.optimizers)
    held = {name: get for name, get in getters.items() if entries[name].source is Source.PARAMETER}
    storage = state.weights.storage
    placed = place_weights(captured.graph_module, trained, held, storage, low, options.settings.rules.ops, store_low)
    wrt, owner = placed.wrt, placed.owner
    NativeOps(FORWARD)(captured.graph_module)
    joint = Differentiate(wrt)(captured.graph_module).subject
    insert_upcasts(joint, placed)
    FoldLossScale()(joint)
    SimplifyCasts()(joint)
    updated = _owners_with_gradient(joint, owner)
    if not updated:
        raise _depends_on_nothing()
    groups = bind(options.optimizers, *placed.for_update(updated, held, storage))
    specs = tuple(group.spec for group in groups)
    fuse = FuseUpdate(
        specs, wrt, owner, results, buffers, options.scale, options.clip_norm, options.divisor, options.gather
    )
    step = fuse(joint).subject
    resolve = _resolvers(step, entries, getters, placed, groups, options.optimizers, state)
    placeholders = step.graph.find_nodes(op="placeholder")
    dynamic = options.settings.dynamic_shapes is not None
    examples = [node.meta["val"] for node in placeholders] if dynamic else [get(leaves) for get in resolve]
    compiled = compile_step(step, examples, options.settings.runs_on, emulated)
    if options.settings.runs_on.asks_arena and not dynamic and _on_cpu(step):
        compiled = ArenaRun(compiled, results + 3, state.memory)
    inputs = [node.name for node in placeholders]
    known = {*placed.wrt, *getters, *[node.name for node in placeholders if STATE in node.meta]}
    places = [place for place, name in enumerate(inputs) if name not in known]
    why_not = _no_cuda_graph(step, options.settings)
    run = GraphedRun(compiled, inputs, places, results + 3, state.graphs, why_not)
    names = tuple(entries[placed.parameter(name)].target.partition(".")[2] for name in updated)
    written = tuple(getters[name] for name in buffers)
    return StepProgram(step, plan, groups, names, run, resolve, captured.out_spec, results, form, written)


def _forward(
    model: LossModule, batch: tuple[Any, ...], leaves: Sequence[Any], options: StepOptions
) -> tuple[Captured, InputForm, PrecisionPlan | None, bool]:
    """Capture the loss and rewrite it; also says for which batches, and whether the low type is emulated."""
    captured = capture_module(model, batch, {}, options.settings.dynamic_shapes)
    _name_modules(captured.graph_module.graph)
    form = InputForm.of(captured, leaves)
    if not options.enabled:
        normalize(captured.graph_module)
        return captured, form, None, False
    low = options.settings.low(device_of([*leaves, *model.parameters()]))
    plan = plan_captured(captured, options.settings.rules, low)
    compiled = options.settings.runs_on.compiled
    return captured, form, plan, rewrite(captured.graph_module, plan, options.settings.rules, compiled=compiled)


def _name_modules(graph: fx.Graph) -> None:
    """Name the modules as in the model, without the loss around it, so that rules match what they match elsewhere."""
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        inner = {
            key: (path.removeprefix(ROOT).removeprefix("."), kind)
            for key, (path, kind) in stack.items()
            if path.partition(".")[0] == ROOT
        }
        if stack:
            node.meta["nn_module_stack"] = inner


def check_parameters(
    model: LossModule, optimizers: Sequence[torch.optim.Optimizer], low: torch.dtype, enabled: bool
) -> None:
    """Refuse parameters of types that a step cannot train; see `master_weights.check_types`.

    Raises:
        AmpError: names the first of them.
    """
    owned = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    named = ((name.partition(".")[2], parameter) for name, parameter in model.named_parameters())
    check_types(named, owned, low, enabled)


def _trained(entries: dict[str, Input], getters: Getters, optimizers: Sequence[torch.optim.Optimizer]) -> list[str]:
    """Placeholders of the parameters that require a gradient and belong to an optimizer."""
    owned = {
        id(parameter) for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]
    }
    trained = [
        name
        for name, get in getters.items()
        if entries[name].source is Source.PARAMETER and get().requires_grad and id(get()) in owned
    ]
    if not trained:
        raise _depends_on_nothing()
    return trained


def _depends_on_nothing() -> CaptureError:
    return CaptureError(
        "the loss depends on no parameter of the optimizer",
        mend="pass an optimizer over the parameters of this model, and detach nothing on the way to the loss",
    )


def _on_cpu(step: fx.GraphModule) -> bool:
    values = [node.meta["val"] for node in step.graph.find_nodes(op="placeholder")]
    return all(value.device.type == "cpu" for value in values if isinstance(value, Tensor))


def _no_cuda_graph(step: fx.GraphModule, settings: Settings) -> str:
    """Why the step cannot be replayed as a CUDA graph, as far as it is known before it runs."""
    if settings.runs_on.no_cuda_graph:
        return settings.runs_on.no_cuda_graph
    if settings.dynamic_shapes is not None:
        return "the shapes are dynamic (dynamic_shapes=)"
    return graph_obstacle(step.graph)


def _separate_buffers(captured: Captured) -> tuple[str, ...]:
    """Let the forward work on copies of the buffers that it changes; their final values become outputs."""
    graph = captured.graph_module.graph
    groups = AliasGroups(graph)
    written = {groups.root(target) for node in graph.nodes for target in written_operands(node)}
    placeholders = graph.find_nodes(op="placeholder")
    buffers = [
        node
        for node, entry in zip(placeholders, captured.inputs, strict=True)
        if entry.source is Source.BUFFER and groups.root(node) in written
    ]
    copies = []
    for node in buffers:
        with graph.inserting_after(placeholders[-1]):
            copy = graph.call_function(torch.ops.aten.clone.default, (node,))
        copy.meta["val"] = node.meta["val"]
        replace_other_uses(node, copy)
        copies.append(copy)
    graph.output_node().args = ((*results_of(graph), *copies),)
    graph.lint()
    captured.graph_module.recompile()
    return tuple(node.name for node in buffers)


def _owners_with_gradient(joint: fx.GraphModule, owner: tuple[str, ...]) -> list[str]:
    outputs = results_of(joint.graph)
    gradients = outputs[len(outputs) - len(owner) :]
    found = [name for name, gradient in zip(owner, gradients, strict=True) if isinstance(gradient, fx.Node)]
    return list(dict.fromkeys(found))


def _resolvers(
    step: fx.GraphModule,
    entries: dict[str, Input],
    getters: Getters,
    placed: PlacedWeights,
    groups: list[BoundGroup | TracedGroup],
    optimizers: Sequence[torch.optim.Optimizer],
    state: StepState,
) -> list[Callable[[Sequence[Any]], Any]]:
    """For each placeholder of the step graph, how to get its tensor at run time."""

    holders = {id(p): one for one in optimizers for group in one.param_groups for p in group["params"]}

    def master(get: Callable[[], Tensor]) -> Tensor:
        parameter = get()
        return state.weights.masters.get(parameter, holders[id(parameter)].state[parameter])

    def resolver(node: fx.Node) -> Callable[[Sequence[Any]], Any]:
        if STATE in node.meta:
            column, group, number = node.meta[STATE]
            if column == "scale":
                return lambda leaves: getattr(state.scale(), group)
            if column == "sum":
                return lambda leaves: state.sums.get(getters[placed.parameter(group)]())
            if column == "rng":
                return lambda leaves: state.weights.rounding.tensor
            if column == COMPENSATION:
                parameter = groups[group].parameters[number]
                check = state.weights.compensations.checked
                return lambda leaves: check(parameter, groups[group].tensor(column, number))
            return lambda leaves: groups[group].tensor(column, number)
        if node.name in placed.copies:
            name, dtype = placed.copies[node.name]
            return lambda leaves: state.lows.get(getters[name](), dtype)
        if node.name in placed.masters:
            return lambda leaves: master(getters[placed.masters[node.name]])
        if node.name in getters:
            return lambda leaves: getters[node.name]().detach()
        index = entries[node.name].index
        return lambda leaves: leaves[index]

    return [resolver(node) for node in step.graph.find_nodes(op="placeholder")]
