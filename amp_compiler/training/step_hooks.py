"""Hooks around `optimizer.step()`: those before it find gradients in `.grad`, those behind it the new weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from amp_compiler.errors import AmpError
from amp_compiler.forward.tensor_versions import OPTIMIZER_STEPS


def step_hooks(optimizers: Sequence[Optimizer], when: Literal["pre", "post"]) -> list[tuple[Optimizer, Any]]:
    """The hooks that run before or behind an update, each with its optimizer, in torch's order."""
    everywhere = getattr(torch_optimizer, f"_global_optimizer_{when}_hooks").values()
    shared = [one for one in everywhere if one != OPTIMIZER_STEPS.note]
    own = [one.__dict__.get(f"_optimizer_step_{when}_hooks", {}).values() for one in optimizers]
    if not shared and not any(own):
        return []
    every = [[*shared, *each] if when == "pre" else [*each, *shared] for each in own]
    return [(optimizer, hook) for optimizer, hooks in zip(optimizers, every, strict=True) for hook in hooks]


def check_hooks(optimizers: Sequence[Optimizer], between: str) -> None:
    """Refuse hooks that run before an update where their gradients would not be those of torch's loop.

    Args:
        optimizers: those of a training step.
        between: what is done to gradients between the backward and the update, inside of a graph; empty for nothing.

    Raises:
        AmpError: names the optimizer's class.
    """
    if between and (hooks := step_hooks(optimizers, "pre")):
        raise AmpError(
            f"{type(hooks[0][0]).__name__} has hooks that run before its steps, and {between} stands between them and"
            " the gradients of a training step",
            hint="remove them, or leave that out and do it in a hook",
        )


def with_hooks(
    hooks: Sequence[tuple[Optimizer, Any]], parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Run the hooks before an update on gradients in `.grad`, which is as it was behind it.

    Args:
        hooks: as `step_hooks` gives them.
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


def run_behind(hooks: Sequence[tuple[Optimizer, Any]]) -> None:
    """Run the hooks behind an update.

    Args:
        hooks: as `step_hooks` gives them.
    """
    for optimizer, hook in hooks:
        hook(optimizer, (), {})
    OPTIMIZER_STEPS.note()  # what they wrote to `parameter.data` shows nowhere else
