"""`StepProgram`: one whole training step for inputs of one signature, captured, differentiated, fused and compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from amp_compiler.backends import BACKENDS
from amp_compiler.errors import AmpError, CaptureError
from amp_compiler.frontends.fx_alias import AliasGroups, written_operands
from amp_compiler.frontends.fx_capture import Captured, Source, capture_module, tensor_getter
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
from amp_compiler.step_state import GradientSums, LowWeights

LOW = "amp_low"  # key in node.meta of a placeholder for a 16-bit weight: (position of its master, torch dtype)


class LossModule(nn.Module):
    """`loss_fn(model, *batch)` as a module, so that it can be captured with the parameters of all models in it."""

    def __init__(self, model: Any, loss_fn: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__["nest"], self.__dict__["loss_fn"] = model, loss_fn
        if isinstance(model, nn.Module):
            self.add_module("model", model)
            return
        for path, leaf in pytree.tree_flatten_with_path(model, is_leaf=lambda x: isinstance(x, nn.Module))[0]:
            if not isinstance(leaf, nn.Module):
                raise AmpError(
                    f"model holds a {type(leaf).__name__} at {pytree.keystr(path)}",
                    mend="pass an nn.Module, or a dict, list or tuple of them",
                )
            self.add_module("model_" + "_".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in path), leaf)

    def forward(self, *batch: Any) -> tuple[Tensor, Any]:
        """The loss and aux (`None` where the loss function gives none)."""
        result = self.__dict__["loss_fn"](self.__dict__["nest"], *batch)
        loss, aux = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            raise AmpError(
                f"loss_fn returned {_describe(loss)} as the loss",
                mend="return one floating-point number, or (loss, aux)",
            )
        return loss, aux


def _describe(loss: Any) -> str:
    return f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"


@dataclass
class StepOutput:
    """What one run of a step program gives.

    Args:
        loss: detached loss.
        aux: what the loss function returned beside it.
        norm: FP32 L2 norm of the unscaled gradients.
        flags: uint8 per parameter of `StepProgram.updated`: 1 where its gradient was not finite.
        gradients: raw (scaled) gradients per parameter of `StepProgram.updated`.
    """

    loss: Tensor
    aux: Any
    norm: Tensor
    flags: Tensor
    gradients: tuple[Tensor, ...]


@dataclass
class StepProgram:
    """A compiled step.

    Args:
        graph_module: the step graph, for reading.
        plan: what was decided for the forward; `None` in plain FP32.
        groups: the update groups.
        updated: qualified names of the updated parameters, in the order of the gradients.
        run: the compiled graph.
        resolve: one function per placeholder, from the batch leaves to its tensor.
        out_spec: tree of `(loss, aux)`.
        results: number of flat values in it.
    """

    graph_module: fx.GraphModule
    plan: PrecisionPlan | None
    groups: list[BoundGroup]
    updated: tuple[str, ...]
    run: Callable[..., Any]
    resolve: list[Callable[[Sequence[Any]], Any]]
    out_spec: pytree.TreeSpec
    results: int

    def __call__(self, leaves: Sequence[Any]) -> StepOutput:
        """Run one step on the flattened batch."""
        for group in self.groups:
            group.refresh()
        with torch.no_grad():
            flat = list(self.run(*[get(leaves) for get in self.resolve]))
        loss, aux = pytree.tree_unflatten(flat[: self.results], self.out_spec)
        norm, _, flags = flat[self.results : self.results + 3]
        return StepOutput(loss, aux, norm, flags, tuple(flat[self.results + 3 :]))


def build_step(
    model: LossModule,
    batch: tuple[Any, ...],
    settings: Settings,
    optimizers: Sequence[torch.optim.Optimizer],
    scale: LossScale,
    scale_state: Callable[[], LossScaleState],
    lows: LowWeights,
    *,
    clip_norm: float | None = None,
    enabled: bool = True,
    sums: GradientSums | None = None,
    gather: str = "",
    divisor: int = 1,
) -> StepProgram:
    """Capture, plan, rewrite, differentiate, fuse and compile one training step.

    Args:
        model: the loss as a module.
        batch: arguments of the loss function behind the model.
        settings: rules, dtype, backend.
        optimizers: checked optimizers.
        scale: the loss scale.
        scale_state: gives its present state.
        lows: the 16-bit weights, shared by all programs of a step.
        clip_norm: largest global gradient norm.
        enabled: mixed precision; without it the same graph in FP32.
        sums: sums of gradients over several batches, shared by all programs of a step.
        gather: as for `FuseUpdate`.
        divisor: number of batches whose gradients are averaged.

    Raises:
        CaptureError: the loss cannot be captured as one graph.
        LoweringError: the graph cannot be compiled.
    """
    leaves, _ = pytree.tree_flatten((batch, {}))
    captured = capture_module(model, batch, {}, settings.dynamic_shapes)
    low = settings.low(device_of([*leaves, *model.parameters()]))
    plan, emulated = None, False
    if enabled:
        plan = plan_captured(captured, settings.rules, low)
        emulated = rewrite(captured.graph_module, plan, settings.rules)
    else:
        normalize(captured.graph_module)
    results = len(results_of(captured.graph_module.graph))
    buffers = _separate_buffers(captured)
    fetch = {entry.name: entry for entry in captured.inputs}
    getters = {
        entry.name: tensor_getter(model, captured, entry)
        for entry in captured.inputs
        if entry.source is not Source.USER
    }
    owned = {
        id(parameter) for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]
    }
    trained = [
        name for name, get in getters.items()
        if fetch[name].source is Source.PARAMETER and get().requires_grad and id(get()) in owned
    ]  # fmt: skip
    if not trained:
        raise CaptureError(
            "the loss depends on no parameter of the optimizer",
            mend="pass an optimizer over the parameters of this model",
        )
    hoisted = _hoist_low_weights(captured.graph_module, trained)
    wrt = (*trained, *hoisted)
    owner = (*trained, *[hoisted[name][0] for name in hoisted])
    joint = Differentiate(wrt)(captured.graph_module).subject
    FoldLossScale()(joint)
    SimplifyCasts()(joint)
    with_gradient = _owners_with_gradient(joint, owner)
    masters = {id(getters[name]()): name for name in trained if name in with_gradient}
    copies = {id(getters[master]()): name for name, (master, _) in hoisted.items() if master in with_gradient}
    groups = bind(optimizers, masters, copies)
    fuse = FuseUpdate(
        tuple(group.spec for group in groups), wrt, owner, results, buffers, scale, clip_norm, divisor, gather
    )
    step = fuse(joint).subject
    resolve = _resolvers(step, fetch, getters, hoisted, groups, scale_state, lows, sums or GradientSums())
    examples = [get(leaves) for get in resolve]
    build = BACKENDS[settings.backend]
    with torch.no_grad():
        run = build(lower_updates(step) if settings.backend != "eager" else step, examples, emulated)
    names = tuple(fetch[name].target.partition(".")[2] for name in with_gradient)
    return StepProgram(step, plan, groups, names, run, resolve, captured.out_spec, results)


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


def _hoist_low_weights(graph_module: fx.GraphModule, trained: list[str]) -> dict[str, tuple[str, torch.dtype]]:
    """Turn each cast of a trained weight into a placeholder; returns its master's placeholder and its type by name."""
    graph = graph_module.graph
    placeholders = graph.find_nodes(op="placeholder")
    by_name = {node.name: node for node in placeholders}
    last = placeholders[-1]
    hoisted: dict[str, tuple[str, torch.dtype]] = {}
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
    fetch: dict[str, Any],
    getters: dict[str, Callable[[], Tensor]],
    hoisted: dict[str, tuple[str, torch.dtype]],
    groups: list[BoundGroup],
    scale_state: Callable[[], LossScaleState],
    lows: LowWeights,
    sums: GradientSums,
) -> list[Callable[[Sequence[Any]], Any]]:
    """For each placeholder of the step graph, how to get its tensor at run time."""

    def resolver(node: fx.Node) -> Callable[[Sequence[Any]], Any]:
        if STATE in node.meta:
            column, group, number = node.meta[STATE]
            if column == "scale":
                return lambda leaves: getattr(scale_state(), group)
            if column == "sum":
                return lambda leaves: sums.get(getters[group]())
            return lambda leaves: groups[group].tensor(column, number)
        if node.name in hoisted:
            master, dtype = hoisted[node.name]
            return lambda leaves: lows.get(getters[master](), dtype)
        if node.name in getters:
            return lambda leaves: getters[node.name]().detach()
        index = fetch[node.name].index
        return lambda leaves: leaves[index]

    return [resolver(node) for node in step.graph.find_nodes(op="placeholder")]
