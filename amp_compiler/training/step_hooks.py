"""Hooks around `optimizer.step()`: those behind it find the new weights, those before it are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from amp_compiler.errors import AmpError
from amp_compiler.forward.tensor_versions import OPTIMIZER_STEPS


def step_hooks(optimizers: Sequence[Optimizer], when: Literal["pre", "post"]) -> list[tuple[Optimizer, Any]]:
    """The hooks that run before or behind an update, each with its optimizer; behind it, in torch's order."""
    everywhere = getattr(torch_optimizer, f"_global_optimizer_{when}_hooks").values()
    shared = [one for one in everywhere if one != OPTIMIZER_STEPS.note]
    own = [(one, one.__dict__.get(f"_optimizer_step_{when}_hooks", {}).values()) for one in optimizers]
    return [(optimizer, hook) for optimizer, hooks in own for hook in (*hooks, *shared)]


def check_hooks(optimizers: Sequence[Optimizer]) -> None:
    """Refuse hooks that run before an update, for which gradients would have to stand in `.grad`.

    Raises:
        AmpError: names the optimizer's class.
    """
    if hooks := step_hooks(optimizers, "pre"):
        raise AmpError(
            f"{type(hooks[0][0]).__name__} has hooks that run before its steps, which find no gradients in `.grad`",
            hint="write what they do to the loss, clip by clip_norm=, and read step.gradients(); or train"
            " amp.compile(model) in a loop of your own",
        )


def run_behind(hooks: Sequence[tuple[Optimizer, Any]]) -> None:
    """Run the hooks behind an update.

    Args:
        hooks: as `step_hooks` gives them.
    """
    for optimizer, hook in hooks:
        hook(optimizer, (), {})
    OPTIMIZER_STEPS.note()  # what they wrote to `parameter.data` shows nowhere else
