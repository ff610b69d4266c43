"""Hooks around `optimizer.step()`: those behind it find the new weights, those before it are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from amp_compiler.errors import AmpError
from amp_compiler.forward.tensor_versions import OPTIMIZER_STEPS
from amp_compiler.ops.loss_scale import LossScale, LossScaleState

_OURS = OPTIMIZER_STEPS.note
_NONE: Mapping[int, Any] = {}


def refuse_hooks_before(optimizers: Sequence[Optimizer]) -> None:
    """Refuse hooks that run before an update: no gradient stands in `.grad` for them.

    Args:
        optimizers: those of a training step.

    Raises:
        AmpError: names the optimizer's class.
    """
    everywhere = torch_optimizer._global_optimizer_pre_hooks
    for optimizer in optimizers:
        if everywhere or _own(optimizer, "_optimizer_step_pre_hooks"):
            raise AmpError(
                f"{type(optimizer).__name__} has hooks that run before its steps, for which gradients have to stand in"
                " `.grad`, and a training step leaves none there",
                hint="write what they do into the loss, clip by clip_norm=, and read step.gradients()",
            )


def _own(optimizer: Optimizer, name: str) -> Mapping[int, Any]:
    own: Mapping[int, Any] = optimizer.__dict__.get(name, _NONE)
    return own


def hooks_behind(optimizers: Sequence[Optimizer]) -> PostHooks | None:
    """The hooks behind the steps of some optimizers, for one call of a training step; `None` where there are none."""
    everywhere = [one for one in torch_optimizer._global_optimizer_post_hooks.values() if one != _OURS]
    if not everywhere and not any(_own(optimizer, "_optimizer_step_post_hooks") for optimizer in optimizers):
        return None
    return PostHooks(
        [
            (optimizer, hook)
            for optimizer in optimizers
            for hook in (*_own(optimizer, "_optimizer_step_post_hooks").values(), *everywhere)
        ]
    )


class PostHooks:
    """Hooks behind the steps of optimizers, for one call of a training step.

    As under `GradScaler`, they do not run where the update is skipped, which they have to wait for on the device.

    Args:
        hooks: the hooks, each with its optimizer.
    """

    def __init__(self, hooks: Sequence[tuple[Optimizer, Any]]) -> None:
        self._found, self._skipped = hooks, 0

    def begin(self, config: LossScale, state: LossScaleState) -> None:
        """Before the update."""
        if config.checks_finite:
            self._skipped = int(state.skipped_steps)

    def run(self, config: LossScale, state: LossScaleState) -> None:
        """Behind the update."""
        if not (config.checks_finite and int(state.skipped_steps) > self._skipped):
            for optimizer, hook in self._found:
                hook(optimizer, (), {})
            OPTIMIZER_STEPS.note()  # what they wrote to `parameter.data` shows nowhere else
