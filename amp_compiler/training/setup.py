"""`StepSetup`: what a training step was asked for, checked, and what it holds from call to call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from amp_compiler.forward.settings import Settings
from amp_compiler.ir.dtypes import DType
from amp_compiler.ranks.coordinator import RankCoordinator
from amp_compiler.ranks.ranks import Ranks
from amp_compiler.ranks.reduction import Reduction
from amp_compiler.training.loss_module import LossModule
from amp_compiler.training.state import StepState


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
