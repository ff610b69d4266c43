"""Hooks around `optimizer.step()`: a training step calls those behind it, and refuses those before it."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from amp_compiler.errors import AmpError
from amp_compiler.forward.tensor_versions import OPTIMIZER_STEPS
from amp_compiler.ops.loss_scale import LossScale, LossScaleState

_OWN = (OPTIMIZER_STEPS.note,)


def check_hooks(optimizers: Sequence[Optimizer]) -> None:
    """Refuse hooks that run before an update: they look at gradients in `.grad`, where the graph leaves none.

    Args:
        optimizers: those of a training step.

    Raises:
        AmpError: names the optimizer's class.
    """
    for optimizer in optimizers:
        if getattr(optimizer, "_optimizer_step_pre_hooks", None) or torch_optimizer._global_optimizer_pre_hooks:
            raise AmpError(
                f"{type(optimizer).__name__} has hooks that run before its steps, which a training step never calls:"
                " it keeps no gradients for them",
                mend="remove them; write what they do to the loss, clip by clip_norm=, and read step.gradients()",
            )


class PostHooks:
    """The hooks behind the steps of some optimizers, for one call of a training step.

    As under `GradScaler`, they do not run where the update is skipped, which they have to wait for on the device.

    Args:
        optimizers: those of the training step.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        everywhere = [one for one in torch_optimizer._global_optimizer_post_hooks.values() if one not in _OWN]
        self._found = [
            (optimizer, hook)
            for optimizer in optimizers
            for hook in (*getattr(optimizer, "_optimizer_step_post_hooks", {}).values(), *everywhere)
        ]
        self._skipped = 0

    def begin(self, config: LossScale, state: LossScaleState) -> None:
        """Before the update."""
        if self._found and config.checks_finite:
            self._skipped = int(state.skipped_steps)

    def run(self, config: LossScale, state: LossScaleState) -> None:
        """Behind the update."""
        if self._found and not (config.checks_finite and int(state.skipped_steps) > self._skipped):
            for optimizer, hook in self._found:
                hook(optimizer, (), {})
            OPTIMIZER_STEPS.note()  # what they wrote to `parameter.data` shows nowhere else
