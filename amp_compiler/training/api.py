"""`amp.training_step`: a training step from a user's arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from typing_extensions import TypeVar

from amp_compiler.backends import BackendArgument
from amp_compiler.backends.backend import Mode
from amp_compiler.backends.cuda_capture import TorchGraphs
from amp_compiler.backends.cuda_graph import GraphSettings
from amp_compiler.forward.low_weights import refuse_as_trained
from amp_compiler.forward.settings import Settings, device_of, make_settings
from amp_compiler.forward.unwrap import unwrapped_model
from amp_compiler.fx.capture.spread import refuse_spread
from amp_compiler.fx.graph import torch_dtype
from amp_compiler.ir.dtypes import DTypeArgument
from amp_compiler.onnx.importing.api import trained_module
from amp_compiler.ops.loss_scale import LossScale, LossScaleArgument, NoLossScale, make_loss_scale
from amp_compiler.ops.loss_scale.held import HeldScale
from amp_compiler.ops.update.rounding import RoundingState, WeightStorage
from amp_compiler.passes.pipeline import CAPTURE, DEVICE, FORWARD, INFERENCE, PLAN, STEP, SUBGRAPH, UPDATE
from amp_compiler.ranks.group import ranks_of
from amp_compiler.ranks.joining import join_ranks
from amp_compiler.ranks.parts import Parts
from amp_compiler.training.arguments import Uneven, check_loss_function, check_options
from amp_compiler.training.loss_module import PARALLEL, ROOT, LossModule
from amp_compiler.training.optimizers.fused import check_optimizers, check_updates
from amp_compiler.training.optimizers.state import keep_state_types
from amp_compiler.training.reporting.events import Events
from amp_compiler.training.samples import Samples
from amp_compiler.training.setup import StepSetup
from amp_compiler.training.state import Amaxes, StepState
from amp_compiler.training.step import TrainingStep
from amp_compiler.training.weights import MasterWeights, check_parameters, weight_storage

RUN = (CAPTURE, PLAN, FORWARD, INFERENCE, STEP, UPDATE, DEVICE, SUBGRAPH)  # the pipelines of a step
ALONE = object()  # in the place of a group: of a step that is never called, whatever groups there are
_Loss = TypeVar("_Loss", default=Any)  # what the loss function returns


def training_step(
    model: Any,
    loss_fn: Callable[..., _Loss],
    optimizer: Any,
    *,
    rules: Any = "default",
    dtype: DTypeArgument = "auto",
    loss_scale: LossScaleArgument = "rules",
    clip_norm: float | None = None,
    accumulate: int = 1,
    dynamic_shapes: Any = "auto",
    backend: BackendArgument = "inductor",
    enabled: bool = True,
    passes: Any = None,
    mode: Mode = "default",
    process_group: Any = None,
    mesh: Any = None,
    broadcast_buffers: bool = True,
    uneven: Uneven = "refuse",
    callbacks: Any = (),
) -> TrainingStep[_Loss]:
    """Make a training step: one compiled graph that runs forward, backward and update.

    Where one graph cannot hold the loss, forward and backward run in subgraphs; `step.execution` says so and why.

    Args:
        model: an `nn.Module`, an ONNX model (a path or a `ModelProto`), or a dict, list or tuple of them.
            `step.model` is the module that is trained.
        loss_fn: `loss_fn(model, *batch)` returns the loss, a floating-point tensor of one element, or `(loss, aux)`.
        optimizer: a `torch.optim` optimizer, a dict of them, or a function that makes one from a list of parameters,
            as an ONNX path needs: `lambda parameters: torch.optim.AdamW(parameters, 1e-4)`. AdamW, Adam and SGD have a
            fused update, and take L1 decay as the key `l1_decay` of a group; of others but LBFGS and SparseAdam the own
            code is traced. Its state and `param_groups` stay the single truth: schedulers, `state_dict()` and
            checkpoints work as always. Several optimizers of one step are skipped together where the gradients of one
            overflow; GradScaler skips that one alone.
        rules: a preset name, a path, a dict or a `RuleSet`. Their `weights` section says how the optimizer holds the
            parameters. `{master: fp32}`: FP32 parameters are their own masters; parameters that come in as FP16 or BF16
            get FP32 masters in `optimizer.state[p]["master"]`. `{master: low}`: at the first call every parameter that
            the plan reads in the low type is converted in place, the same object in 16 bits, with no master; one that
            is read in FP32 alone (the weight of a norm under `default`) stays FP32, and buffers stay as they are.
            Momentum of SGD is 16-bit then, moments of Adam are FP32. `rounding` is `nearest`, `stochastic` or `kahan`.
            Make the step before `optimizer.load_state_dict`: from then on that loads FP32 state of 16-bit parameters
            unrounded.
        dtype: `"fp16"`, `"bf16"`, a `torch.dtype` or its name, or `"auto"`, as for `amp.compile`.
        loss_scale: `"dynamic"` or another mode, a number, `None`, or a `LossScale`. A mode has the settings of the
            `loss_scale` section of the rules where that is of the same mode. By default the section in FP16, and mode
            `"none"` in BF16. One `LossScale` object given to several steps is one scale, as one GradScaler for the two
            optimizers of a GAN.
        clip_norm: largest global L2 norm of the unscaled gradients, a number above 0; `None` clips nothing.
        accumulate: number of calls whose gradients are averaged, in FP32, before the weights are updated;
            `step.flush()` updates them by fewer.
        dynamic_shapes: `"auto"`: the first shape is captured as it is, and where a second one differs from it, what
            differs becomes dynamic. `None`: every new shape is a recompilation. Any other form that
            `torch.export.export` takes: all sizes are dynamic from the first call on.
        backend: `"inductor"` or `"eager"`.
        enabled: mixed precision; without it the same step in plain FP32, whatever the rules say of weights. Parameters
            that came in as FP16 or BF16 are refused then.
        passes: pipelines with passes of your own put in, such as
            `amp.pipelines.STEP.insert_after("simplify_casts", MyPass())`; one or several.
        mode: `"default"`, or `"max-autotune"`: Inductor times several kernels for a product and several sizes of blocks
            for a loop, as under torch.compile's mode of that name, and the first call takes longer by that. On a
            GPU the step is replayed as one CUDA graph in both.
        process_group: of `torch.distributed`: its ranks train one model, each on batches of its own, and gradients are
            averaged over them; see `docs/ranks.md`. All ranks make the step, call it, and have the weights of the first
            one. A group of this rank alone trains by itself. Has to be given where the default group has several ranks.
        mesh: a `DeviceMesh` of one dimension, in the place of a group.
        broadcast_buffers: all ranks take the first one's buffers, such as BatchNorm's statistics, at every update; else
            each has its own.
        uneven: `"refuse"`: several ranks must have batches of one shape, and all batches of `accumulate=` count alike.
            `"weight"`: each counts by its number of samples, over ranks and over `accumulate=`, so that gradients are
            those of all samples as one batch, where the loss is a mean over samples. That number is the size of the
            first dimension of the batch's tensors; a batch whose tensors differ in it is refused.
        callbacks: `amp.callbacks`, a list, such as `[amp.callbacks.JSONLines("run.jsonl", every=10)]`. Each is told the
            numbers of every so many steps; other steps are not read from.

    Returns:
        A callable: `loss = step(*batch)`, of the shape that `loss_fn` gives, detached, without a device sync.

    Raises:
        AmpError: a wrong option. At the first call: `CaptureError`, `LoweringError`.

    Example:
        >>> import torch, amp_compiler as amp
        >>> model = torch.nn.Linear(4, 1)
        >>> step = amp.training_step(model, lambda m, x, y: (m(x) - y).square().mean(),
        ...                          torch.optim.SGD(model.parameters(), 0.1), dtype="bf16", backend="eager")
        >>> losses = [float(step(torch.ones(2, 4), torch.zeros(2, 1))) for _ in range(5)]
        >>> losses[-1] < losses[0]
        True
    """
    ranks = None if process_group is ALONE else ranks_of(process_group, mesh)
    with contextlib.nullcontext() if ranks is None else ranks.announcing_failure():
        for one in pytree.tree_leaves(model):
            refuse_as_trained(one)
        model, optimizer = trained_module(unwrapped_model(model, PARALLEL), optimizer)
        check_options(clip_norm, accumulate, uneven)
        settings = make_settings(rules, dtype, backend, dynamic_shapes, passes, RUN, mode, enabled=enabled)
        module = LossModule(model, loss_fn)
        refuse_spread(module, PARALLEL, of_step=True)
        optimizers = check_optimizers(optimizer)
        check_loss_function(loss_fn)
        device = device_of(module.parameters())
        scale = HeldScale.of(_chosen_scale(loss_scale, settings, device, enabled), loss_scale, device)
        storage = weight_storage(settings.rules.weights) if enabled else WeightStorage()
        shards = ranks is not None and enabled and settings.rules.reduce.get("shard") == "update"
        check_updates(optimizers, storage.low, shards)
        rounding, parts = RoundingState(storage, device), Parts(ranks)
        low = settings.low(device)
        check_parameters(module, optimizers, torch_dtype(low), enabled)
        coordinator, reduction = None, None
        if ranks is not None:
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
        setup = StepSetup(
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
        return TrainingStep(setup, callbacks)


def _chosen_scale(loss_scale: Any, settings: Settings, device: torch.device, enabled: bool) -> LossScale:
    section = settings.rules.loss_scale
    if not enabled:
        return NoLossScale(check_finite=False)
    if loss_scale != "rules":
        return make_loss_scale(loss_scale, section)
    if settings.low(device).short != "fp16":  # BF16 has FP32's range
        return make_loss_scale("none", section)
    return make_loss_scale(section or "dynamic")
