"""A step becomes that of one of several ranks which train one model."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from amp_compiler.distributed.ranks import Ranks
from amp_compiler.forward.settings import Settings, device_of
from amp_compiler.ops.cpu import update as cpu_update
from amp_compiler.training.build import Reduction
from amp_compiler.training.fused_optimizers import check_split
from amp_compiler.training.held_scale import HeldScale
from amp_compiler.training.program import LossModule
from amp_compiler.training.rank_values import RankValues
from amp_compiler.training.together import SAVING, Together, begin
from amp_compiler.training.weights import WeightState

BUCKET_MB = 25  # of gradients that ranks send together, as DistributedDataParallel has it
ALONE_BYTES = 2**20  # of a gradient that goes by itself, where the loops of the update take it as it comes


def joined(
    ranks: Ranks,
    model: LossModule,
    optimizers: Sequence[torch.optim.Optimizer],
    weights: WeightState,
    scale: HeldScale,
    settings: Settings,
    told: Mapping[str, Any],
    broadcast_buffers: bool,
) -> tuple[Together, Reduction]:
    """Compare models and options with those of the other ranks, and take the first one's weights.

    Args:
        ranks: all of them.
        model: the loss as a module.
        optimizers: what is trained.
        weights: how the optimizers hold the parameters.
        scale: the loss scale.
        settings: the options.
        told: further options that have to be the same on all ranks, by name; `enabled` among them.
        broadcast_buffers: as for `training_step`.

    Returns:
        What the ranks do together at each call, and how gradients are summed.
    """
    section: dict[str, Any] = settings.rules.reduce
    device, shards = device_of(model.parameters()), told["enabled"] and section.get("shard") == "update"
    if shards:
        check_split(optimizers, weights.storage.low)
    options = {
        **told,
        "backend": settings.backend,
        "mode": settings.mode,
        "broadcast_buffers": broadcast_buffers,
        "passes": [pipeline.names for pipeline in settings.pipelines.values()],
    }
    begin(ranks, model, optimizers, settings.rules, {"options": [f"{name}={one}" for name, one in options.items()]})
    ranks.broadcast([weights.rounding.tensor])
    values = RankValues(model, optimizers, scale, weights.rounding, broadcast_buffers)
    together = Together(ranks, values, weights.parts if shards else None)
    bucket_bytes, exchange = int(float(section.get("bucket_mb", BUCKET_MB)) * 2**20), ranks.uses_gloo(device)
    loops = exchange and device.type == "cpu" and cpu_update.available()
    if shards:
        for one in optimizers:
            weights.parts.whole_on_save(one, functools.partial(together.comes, SAVING))
    return together, Reduction(
        ranks.name,
        ranks.size,
        bucket_bytes,
        section.get("precision") == "fp32",
        broadcast_buffers,
        shards,
        exchange,
        min(ALONE_BYTES, bucket_bytes) if loops else 0,
        ranks.rank,
    )
