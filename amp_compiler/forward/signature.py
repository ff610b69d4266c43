"""The signature of a model: the form of the inputs of a call, and a `forward` that shows the arguments of another."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from amp_compiler.errors import UnknownFormError


def leaves_key(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Exact form of the flattened inputs: shapes, strides, types, values of what is no tensor, and who is who.

    Raises:
        UnknownFormError: for an input that cannot be a key, such as an object that is not hashable.
    """
    first: dict[int, int] = {}
    key = tuple(
        (leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad, first.setdefault(id(leaf), place))
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
        else _plain_key(leaf)
        for place, leaf in enumerate(leaves)
    )
    try:
        hash(key)
    except TypeError as cause:
        kinds = sorted({type(leaf).__name__ for leaf in leaves if type(leaf).__hash__ is None})
        raise UnknownFormError(
            f"an input of type {', '.join(kinds)} is not hashable, so calls cannot be told apart"
            + (" (of dict() of it they can)" if any(isinstance(leaf, Mapping) for leaf in leaves) else ""),
            hint="pass tensors, numbers, strings, or containers of them",
        ) from cause
    return key


def _plain_key(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.layout, leaf.dtype, leaf.device, leaf.requires_grad
    return type(leaf), repr(leaf) if isinstance(leaf, float) else leaf  # 0.0 and -0.0 differ, nan is itself


def like_forward_of(model: nn.Module, run: Callable[..., Any], doc: str | None) -> Callable[..., Any]:
    """A method `forward` with the signature that the forward of a model has.

    Args:
        model: the module; where its forward says nothing of its arguments, any are shown.
        run: called with the object, the positional and the keyword arguments.
        doc: its docstring.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run(self, args, kwargs)

    forward.__doc__ = doc
    try:
        shown = inspect.signature(model.forward)
    except (TypeError, ValueError):  # written in C
        return forward
    me = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    forward.__signature__ = shown.replace(parameters=[me, *shown.parameters.values()])  # type: ignore[attr-defined]
    return forward
