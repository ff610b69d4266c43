"""Hooks that a graph would not run."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from amp_compiler.errors import CaptureError
from amp_compiler.fx.graph import shorten_path

_ON_TENSORS = {
    torch.Tensor.register_hook: "register_hook",
    torch.Tensor.register_post_accumulate_grad_hook: "register_post_accumulate_grad_hook",
    torch.Tensor.retain_grad: "retain_grad",
    torch.Tensor.grad_fn.__get__: "grad_fn",  # type: ignore[union-attr]
}
MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")  # tables of a module
HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")  # attributes of a tensor


def refuse_tensor_hook(function: Any, arguments: Sequence[Any] = ()) -> None:
    """Refuse a hook that the model's code hangs on a tensor while it is traced: no op of a graph stands for it.

    The same for `tensor.grad_fn`, where there is one: hooks are hung on it, and it is none of the graph's backward.

    Args:
        function: what is called.
        arguments: what it is given.

    Raises:
        CaptureError: Dynamo's subgraphs run it.
    """
    name = _ON_TENSORS.get(function)
    if name is not None and (name != "grad_fn" or arguments[0].grad_fn is not None):
        raise CaptureError(
            f"forward asks a tensor for {name}, which one graph cannot give",
            where=calling_line(),
            hint="hang the hook on a tensor that goes into the model or comes out of it, or on a parameter",
        )


def calling_line() -> str:
    """`file:line` of the innermost call that is neither torch's nor this project's; empty where there is none."""
    torch_root = torch.__file__.rpartition("/")[0]
    for frame, line in traceback.walk_stack(None):
        file = frame.f_code.co_filename
        if not file.startswith((torch_root, "<")) and "/amp_compiler/" not in file:
            return f"{shorten_path(file)}:{line}"
    return ""


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
