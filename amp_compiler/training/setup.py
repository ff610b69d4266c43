"""`StepSetup`: what a training step was asked for, checked, and what it holds from call to call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree

from amp_compiler.backends import BackendArgument
from amp_compiler.backends.backend import Mode
from amp_compiler.backends.cuda_capture import TorchGraphs
from amp_compiler.backends.cuda_graph import GraphSettings
from amp_compiler.forward.low_weights import refuse_as_trained
from amp_compiler.forward.settings import Settings, check_enabled, device_of, make_settings
from amp_compiler.forward.unwrap import refuse_spread, unwrapped_model
from amp_compiler.fx.graph import torch_dtype
from amp_compiler.ir.dtypes import DType, DTypeArgument
from amp_compiler.onnx.importing.api import trained_module
from amp_compiler.ops.loss_scale import LossScale, LossScaleArgument, NoLossScale, make_loss_scale
from amp_compiler.ops.loss_scale.held import HeldScale
from amp_compiler.ops.update.rounding import RoundingState, WeightStorage
from amp_compiler.passes.pipeline import CAPTURE, DEVICE, FORWARD, INFERENCE, PLAN, STEP, SUBGRAPH, UPDATE
from amp_compiler.ranks.coordinator import RankCoordinator
from amp_compiler.ranks.joining import join_ranks
from amp_compiler.ranks.parts import Parts
from amp_compiler.ranks.ranks import Ranks
from amp_compiler.ranks.reduction import Reduction
from amp_compiler.training.arguments import (
    Uneven,
    check_loss_function,
    check_numbers,
    check_uneven,
    shapes_of_batch,
)
from amp_compiler.training.build import PARALLEL
from amp_compiler.training.loss_module import ROOT, LossModule
from amp_compiler.training.optimizers.fused import check_optimizers, check_split, check_storage
from amp_compiler.training.optimizers.state import keep_state_types
from amp_compiler.training.reporting.events import Events
from amp_compiler.training.samples import Samples
from amp_compiler.training.state import Amaxes, StepState
from amp_compiler.training.weights import MasterWeights, check_parameters, weight_storage

RUN = (CAPTURE, PLAN, FORWARD, INFERENCE, STEP, UPDATE, DEVICE, SUBGRAPH)  # the pipelines of a step


@dataclass(frozen=True, kw_only=True)
class StepSetup:
    """What a training step was asked for, and what it holds.

    Args:
        model: what is trained, as the user has it.
        module: the loss as a module.
        optimizers: checked optimizers.
        settings: rules, dtype, backend, pipelines.
        clip_norm: largest global gradient norm, `None` for no clipping.
        accumulate: number of calls whose gradients are averaged.
        enabled: mixed precision.
        device: of the parameters.
        low: the 16-bit type.
        state: the tensors that all programs share, and what goes with them.
        group: the process group as it was given.
        coordinator: what the ranks do together at each call; `None` for one process.
        reduction: how the gradients of several ranks are summed; `None` for one process.
    """

    model: Any
    module: LossModule
    optimizers: tuple[torch.optim.Optimizer, ...]
    settings: Settings
    clip_norm: float | None
    accumulate: int
    enabled: bool
    device: torch.device
    low: DType
    state: StepState
    group: Any
    coordinator: RankCoordinator | None
    reduction: Reduction | None

    @property
    def ranks(self) -> Ranks | None:
        """The processes that train one model; `None` for one."""
        return None if self.coordinator is None else self.coordinator.ranks

    @property
    def speaks(self) -> bool:
        """Whether notices are this process's to give: of several ranks the first one gives them."""
        return self.coordinator is None or self.coordinator.ranks.is_first

    @property
    def between(self) -> str:
        """What is done to gradients behind the backward of a call, inside of its graph."""
        accumulates = "accumulate=" if self.accumulate > 1 else ""
        clips = "clip_norm=" if self.clip_norm is not None else ""
        ranks = "the sum over the ranks" if self.coordinator is not None else ""
        return accumulates or clips or ranks


def set_up(
    model: Any,
    loss_fn: Callable[..., Any],
    optimizer: Any,
    *,
    rules: Any,
    dtype: DTypeArgument,
    loss_scale: LossScaleArgument,
    clip_norm: float | None,
    accumulate: int,
    dynamic_shapes: Any,
    backend: BackendArgument,
    enabled: bool,
    passes: Any,
    mode: Mode,
    process_group: Any,
    broadcast_buffers: bool = True,
    uneven: Uneven = "refuse",
    ranks: Ranks | None = None,
) -> StepSetup:
    """Check the arguments of `amp.training_step`, which has their meaning, and make what a step holds.

    Raises:
        AmpError: one of them is wrong, or the ranks differ.
    """
    check_enabled(enabled)
    for one in pytree.tree_leaves(model):
        refuse_as_trained(one)
    model, optimizer = trained_module(unwrapped_model(model, PARALLEL), optimizer)
    check_numbers(clip_norm, accumulate)
    check_uneven(uneven)
    settings = make_settings(rules, dtype, backend, shapes_of_batch(dynamic_shapes), passes, RUN, mode)
    module = LossModule(model, loss_fn)
    refuse_spread(module, PARALLEL)
    optimizers = check_optimizers(optimizer)
    check_loss_function(loss_fn)
    device = device_of(module.parameters())
    scale = HeldScale.of(_chosen_scale(loss_scale, settings, device, enabled), loss_scale, device)
    storage = weight_storage(settings.rules.weights) if enabled else WeightStorage()
    check_storage(optimizers, storage.low)
    rounding, parts = RoundingState(storage, device), Parts(ranks)
    low = settings.low(device)
    check_parameters(module, optimizers, torch_dtype(low), enabled)
    coordinator, reduction = None, None
    if ranks is not None:
        shards = enabled and settings.rules.reduce.get("shard") == "update"
        if shards:
            check_split(optimizers, storage.low)
        options = {
            "enabled": enabled,
            "dtype": low.short,
            "loss_scale": scale.config,
            "clip_norm": clip_norm,
            "accumulate": accumulate,
            "uneven": uneven,
        }
        split = parts if shards else None
        coordinator, reduction = join_ranks(
            ranks, module, ROOT, optimizers, scale, rounding, split, settings, options, broadcast_buffers
        )
    samples = None
    if uneven == "weight" and (coordinator is not None or accumulate > 1):
        samples = Samples(device, (lambda own: (own,)) if coordinator is None else coordinator.samples)
    for one in optimizers:
        keep_state_types(one)
    state = StepState(
        scale=scale,
        storage=storage,
        rounding=rounding,
        parts=parts,
        masters=MasterWeights(parts),
        samples=samples,
        amaxes=Amaxes(device),
        graphs=GraphSettings(TorchGraphs()),
        events=Events(device),
    )
    return StepSetup(
        model=model,
        module=module,
        optimizers=optimizers,
        settings=settings,
        clip_norm=clip_norm,
        accumulate=accumulate,
        enabled=enabled,
        device=device,
        low=low,
        state=state,
        group=process_group,
        coordinator=coordinator,
        reduction=reduction,
    )


def _chosen_scale(loss_scale: Any, settings: Settings, device: torch.device, enabled: bool) -> LossScale:
    section = settings.rules.loss_scale
    if not enabled:
        return NoLossScale(check_finite=False)
    if loss_scale != "rules":
        return make_loss_scale(loss_scale, section)
    if settings.low(device).short != "fp16":  # BF16 has FP32's range
        return make_loss_scale("none", section)
    return make_loss_scale(section or "dynamic")
