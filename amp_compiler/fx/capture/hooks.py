"""Hooks that a graph would not run."""

from collections.abc import Iterable

import torch
from torch.utils.hooks import RemovableHandle

from amp_compiler.errors import CaptureError

MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")  # tables of a module
HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")  # attributes of a tensor


def refuse_parameter_hooks(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuse hooks on parameters, where the backward is part of the graph.

    Args:
        named: the parameters with their names.

    Raises:
        CaptureError: names the first parameter; a step in subgraphs runs its hooks.
    """
    for name, parameter in named:
        if has_hooks(parameter):
            raise CaptureError(
                f"parameter '{name}' has a hook on its gradient, which one graph cannot run",
                hint="remove it with the handle that register_hook gave, or do in loss_fn what it does",
            )


def hooks_made() -> int:
    """How many hooks were hung on any module or tensor of this process so far: torch numbers the handles it gives."""
    return RemovableHandle.next_id


def has_hooks(tensor: torch.Tensor) -> bool:
    """Whether something is to be called with the gradient of a tensor."""
    return any(getattr(tensor, name, None) for name in HOOKS)
