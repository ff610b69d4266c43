"""Hooks that a graph would not run."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from amp_compiler.errors import CaptureError
from amp_compiler.fx.graph import shorten_path
from amp_compiler.fx.torch_private.runtime import saved_tensor_hooks

_ON_TENSORS = {
    torch.Tensor.register_hook: "register_hook",
    torch.Tensor.register_post_accumulate_grad_hook: "register_post_accumulate_grad_hook",
    torch.Tensor.retain_grad: "retain_grad",
}
_GRAD_FN = torch.Tensor.grad_fn.__get__  # type: ignore[union-attr]
MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")  # tables of a module
HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")  # attributes of a tensor


def refuse_tensor_hook(function: Any, arguments: Sequence[Any] = ()) -> None:
    """Refuse a hook that the model's code hangs on a tensor while it is traced: no op of a graph stands for it.

    The same for `tensor.grad_fn`, on which hooks are hung, and which is none of the graph's backward.

    Args:
        function: what is called.
        arguments: what it is given.

    Raises:
        CaptureError: Dynamo's subgraphs run it.
    """
    if function == _GRAD_FN and arguments and arguments[0].grad_fn is not None:
        raise CaptureError(
            "forward reads grad_fn of a tensor, which one graph has none of",
            where=calling_line(),
            hint="hang the hook on a tensor that goes into the model or comes out of it, or on a parameter",
        )
    name = _ON_TENSORS.get(function)
    if name is not None:
        raise CaptureError(
            f"forward calls {name} on a tensor, which one graph cannot do",
            where=calling_line(),
            hint="hang the hook on a tensor that goes into the model or comes out of it, or on a parameter",
        )


class SavedTensorHooks:
    """The hooks for saved tensors (`saved_tensors_hooks`, `save_on_cpu`) that stand around a capture.

    Those are autograd's own affair; ones that forward sets would be lost in a graph.
    """

    def __init__(self) -> None:
        self._around = saved_tensor_hooks()

    def refuse_others(self) -> None:
        """Refuse hooks that were set since.

        Raises:
            CaptureError: Dynamo's subgraphs run within them.
        """
        now = saved_tensor_hooks()
        if now is not None and now != self._around and torch.is_grad_enabled():
            raise CaptureError(
                "forward sets hooks for saved tensors (saved_tensors_hooks, save_on_cpu), which one graph would lose",
                where=calling_line(),
                hint="set them around the call of the model",
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
