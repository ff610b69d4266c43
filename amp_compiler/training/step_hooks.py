"""Hooks around `optimizer.step()`: those before it find gradients in `.grad`, those behind it the new weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from amp_compiler.errors import AmpError
from amp_compiler.forward.tensor_versions import OPTIMIZER_STEPS
from amp_compiler.ops.loss_scale import LossScale, LossScaleState

_OURS = OPTIMIZER_STEPS.note
_NONE: Mapping[int, Any] = {}


def hooks_before(optimizers: Sequence[Optimizer]) -> list[tuple[Optimizer, Any]]:
    """The hooks that run before an update, each with its optimizer."""
    everywhere = [*torch_optimizer._global_optimizer_pre_hooks.values()]
    if not everywhere and not any(_own(optimizer, "_optimizer_step_pre_hooks") for optimizer in optimizers):
        return []
    return [
        (optimizer, hook)
        for optimizer in optimizers
        for hook in (*everywhere, *_own(optimizer, "_optimizer_step_pre_hooks").values())
    ]


def check_hooks(optimizers: Sequence[Optimizer], between: str) -> None:
    """Refuse hooks that run before an update where their gradients would not be those of torch's loop.

    Args:
        optimizers: those of a training step.
        between: what is done to gradients between the backward and the update, inside of a graph; empty for nothing.

    Raises:
        AmpError: names the optimizer's class.
    """
    if between and (hooks := hooks_before(optimizers)):
        raise AmpError(
            f"{type(hooks[0][0]).__name__} has hooks that run before its steps, and {between} stands between them and"
            " the gradients of a training step",
            hint="remove them, or leave that out and do it in a hook",
        )


def _own(optimizer: Optimizer, name: str) -> Mapping[int, Any]:
    own: Mapping[int, Any] = optimizer.__dict__.get(name, _NONE)
    return own


def with_hooks(
    hooks: Sequence[tuple[Optimizer, Any]], parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Run the hooks before an update on gradients in `.grad`, which is as it was behind it.

    Args:
        hooks: as `hooks_before` gives them.
        parameters: all of the model, by name.
        gradients: of some of them, unscaled, in the type of the parameter.

    Returns:
        What the hooks left in `.grad`; a parameter whose gradient they took away is left out.

    Raises:
        AmpError: one changes the arguments of `optimizer.step()`, which is never called.
    """
    before = {name: parameter.grad for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.grad = gradients.get(name)
        for optimizer, hook in hooks:
            if hook(optimizer, (), {}) not in (None, ((), {})):
                raise AmpError(
                    f"a hook before the steps of {type(optimizer).__name__} gives other arguments for step(), which a"
                    " training step never calls",
                    hint="let it return None",
                )
        OPTIMIZER_STEPS.note()  # what they wrote to `parameter.data` shows nowhere else
        return {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
    finally:
        for name, parameter in parameters.items():
            parameter.grad = before[name]


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
