"""Building a `StepProgram`: capture, plan, rewrite, differentiate, fuse, compile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from amp_compiler.backends import BACKENDS
from amp_compiler.errors import CaptureError
from amp_compiler.frontends.fx_alias import AliasGroups, written_operands
from amp_compiler.frontends.fx_capture import Captured, Input, Source, capture_module, tensor_getter
from amp_compiler.frontends.fx_normalize import normalize
from amp_compiler.fx_tools import CAST, replace_other_uses, results_of
from amp_compiler.optimizers import BoundGroup, bind
from amp_compiler.passes.differentiate import Differentiate
from amp_compiler.passes.fold_loss_scale import FoldLossScale
from amp_compiler.passes.fuse_update import STATE, FuseUpdate, lower_updates
from amp_compiler.passes.simplify_casts import SimplifyCasts
from amp_compiler.plan import PrecisionPlan
from amp_compiler.program import plan_captured, rewrite
from amp_compiler.runtime.loss_scale_base import LossScale, LossScaleState
from amp_compiler.settings import Settings, device_of
from amp_compiler.step_program import LossModule, StepProgram
from amp_compiler.step_state import GradientSums, LowWeights

LOW = "amp_low"  # key in node.meta of a placeholder for a 16-bit weight: (its master's placeholder, torch dtype)
Getters = dict[str, Callable[[], Tensor]]
Hoisted = dict[str, tuple[str, torch.dtype]]


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
    """

    scale: Callable[[], LossScaleState]
    lows: LowWeights
    sums: GradientSums


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
    captured, plan, emulated = _forward(model, batch, leaves, options)
    results = len(results_of(captured.graph_module.graph))
    buffers = _separate_buffers(captured)
    entries = {entry.name: entry for entry in captured.inputs}
    getters = {
        name: tensor_getter(model, captured, entry)
        for name, entry in entries.items()
        if entry.source is not Source.USER
    }
    trained = _trained(entries, getters, options.optimizers)
    hoisted = _hoist_low_weights(captured.graph_module, trained)
    wrt = (*trained, *hoisted)
    owner = (*trained, *[master for master, _ in hoisted.values()])
    joint = Differentiate(wrt)(captured.graph_module).subject
    FoldLossScale()(joint)
    SimplifyCasts()(joint)
    updated = _owners_with_gradient(joint, owner)
    masters = {id(getters[name]()): name for name in updated}
    copies = {id(getters[master]()): name for name, (master, _) in hoisted.items() if master in updated}
    groups = bind(options.optimizers, masters, copies)
    specs = tuple(group.spec for group in groups)
    fuse = FuseUpdate(
        specs, wrt, owner, results, buffers, options.scale, options.clip_norm, options.divisor, options.gather
    )
    step = fuse(joint).subject
    resolve = _resolvers(step, entries, getters, hoisted, groups, state)
    run = _compiled(step, [get(leaves) for get in resolve], options.settings.backend, emulated)
    names = tuple(entries[name].target.partition(".")[2] for name in updated)
    return StepProgram(step, plan, groups, names, run, resolve, captured.out_spec, results)


def _forward(
    model: LossModule, batch: tuple[Any, ...], leaves: Sequence[Any], options: StepOptions
) -> tuple[Captured, PrecisionPlan | None, bool]:
    """Capture the loss and rewrite it; also says whether the low type is emulated."""
    captured = capture_module(model, batch, {}, options.settings.dynamic_shapes)
    if not options.enabled:
        normalize(captured.graph_module)
        return captured, None, False
    low = options.settings.low(device_of([*leaves, *model.parameters()]))
    plan = plan_captured(captured, options.settings.rules, low)
    return captured, plan, rewrite(captured.graph_module, plan, options.settings.rules)


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
        raise CaptureError(
            "the loss depends on no parameter of the optimizer",
            mend="pass an optimizer over the parameters of this model",
        )
    return trained


def _compiled(step: fx.GraphModule, examples: list[Any], backend: str, emulated: bool) -> Callable[..., Any]:
    with torch.no_grad():
        return BACKENDS[backend](step if backend == "eager" else lower_updates(step), examples, emulated)


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


def _hoist_low_weights(graph_module: fx.GraphModule, trained: list[str]) -> Hoisted:
    """Turn each cast of a trained weight into a placeholder; returns its master's placeholder and its type by name."""
    graph = graph_module.graph
    placeholders = graph.find_nodes(op="placeholder")
    by_name = {node.name: node for node in placeholders}
    last = placeholders[-1]
    hoisted: Hoisted = {}
    for name in trained:
        for node in [user for user in by_name[name].users if user.target is CAST]:
            with graph.inserting_after(last):
                last = graph.placeholder(f"{name}_low{len(hoisted)}")
            last.meta = {**node.meta, LOW: (name, node.args[1])}
            hoisted[last.name] = (name, node.args[1])  # type: ignore[assignment]
            node.replace_all_uses_with(last)
            graph.erase_node(node)
    graph.lint()
    graph_module.recompile()
    return hoisted


def _owners_with_gradient(joint: fx.GraphModule, owner: tuple[str, ...]) -> list[str]:
    outputs = results_of(joint.graph)
    gradients = outputs[len(outputs) - len(owner) :]
    found = [name for name, gradient in zip(owner, gradients, strict=True) if isinstance(gradient, fx.Node)]
    return list(dict.fromkeys(found))


def _resolvers(
    step: fx.GraphModule,
    entries: dict[str, Input],
    getters: Getters,
    hoisted: Hoisted,
    groups: list[BoundGroup],
    state: StepState,
) -> list[Callable[[Sequence[Any]], Any]]:
    """For each placeholder of the step graph, how to get its tensor at run time."""

    def resolver(node: fx.Node) -> Callable[[Sequence[Any]], Any]:
        if STATE in node.meta:
            column, group, number = node.meta[STATE]
            if column == "scale":
                return lambda leaves: getattr(state.scale(), group)
            if column == "sum":
                return lambda leaves: state.sums.get(getters[group]())
            return lambda leaves: groups[group].tensor(column, number)
        if node.name in hoisted:
            master, dtype = hoisted[node.name]
            return lambda leaves: state.lows.get(getters[master](), dtype)
        if node.name in getters:
            return lambda leaves: getters[node.name]().detach()
        index = entries[node.name].index
        return lambda leaves: leaves[index]

    return [resolver(node) for node in step.graph.find_nodes(op="placeholder")]
