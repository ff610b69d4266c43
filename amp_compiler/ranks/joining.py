"""A step becomes that of one of several ranks which train one model."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from amp_compiler.forward.settings import Settings
from amp_compiler.ops.loss_scale.held import HeldScale
from amp_compiler.ops.update.rounding import RoundingState
from amp_compiler.ranks.coordinator import SAVING, RankCoordinator, begin
from amp_compiler.ranks.parts import Parts
from amp_compiler.ranks.ranks import Ranks
from amp_compiler.ranks.reduction import Reduction
from amp_compiler.ranks.values import RankValues

BUCKET_MB = 25  # of gradients that ranks send together, as DistributedDataParallel has it


def join_ranks(
    ranks: Ranks,
    model: torch.nn.Module,
    root: str,
    optimizers: Sequence[torch.optim.Optimizer],
    scale: HeldScale,
    rounding: RoundingState,
    parts: Parts | None,
    settings: Settings,
    options: Mapping[str, Any],
    broadcast_buffers: bool,
) -> tuple[RankCoordinator, Reduction]:
    """Compare models and options with those of the other ranks, and take the first one's weights.

    Args:
        ranks: all of them.
        model: the loss as a module.
        root: name of what is trained in it.
        optimizers: what is trained.
        scale: the loss scale.
        rounding: the random state of stochastic rounding.
        parts: which weights are split over the ranks; `None` where none are.
        settings: the options.
        options: further options that have to be the same on all ranks, by name.
        broadcast_buffers: as for `training_step`.

    Returns:
        What the ranks do together at each call, and how gradients are summed.
    """
    section: dict[str, Any] = settings.rules.reduce
    options = {
        **options,
        "backend": settings.runs_on.name,
        "mode": settings.mode,
        "broadcast_buffers": broadcast_buffers,
        "passes": [pipeline.names for pipeline in settings.pipelines.values()],
    }
    begin(ranks, model, optimizers, settings.rules, {"options": [f"{name}={one}" for name, one in options.items()]})
    ranks.broadcast([rounding.tensor])
    values = RankValues(model, root, optimizers, scale, rounding, broadcast_buffers)
    coordinator = RankCoordinator(ranks, values, parts)
    if parts is not None:
        for one in optimizers:
            parts.whole_on_save(one, functools.partial(coordinator.join, SAVING))
    return coordinator, Reduction(
        ranks.name,
        ranks.size,
        int(float(section.get("bucket_mb", BUCKET_MB)) * 2**20),
        section.get("precision") == "fp32",
        broadcast_buffers,
        parts is not None,
    )
