"""The form of a batch: what a graph that was captured for one takes of another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from amp_compiler.errors import CaptureError


def leaves_key(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Exact form of the flattened inputs: shapes, strides, types, values of what is no tensor, and who is who.

    Raises:
        CaptureError: for an input that cannot be a key, such as an object that is not hashable.
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
        raise CaptureError(
            f"an input of type {', '.join(kinds)} is not hashable, so calls cannot be told apart"
            + (" (of dict() of it they can)" if any(isinstance(leaf, Mapping) for leaf in leaves) else ""),
            hint="pass tensors, numbers, strings, or containers of them",
        ) from cause
    return key


def _plain_key(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.layout, leaf.dtype, leaf.device, leaf.requires_grad
    return type(leaf), repr(leaf) if isinstance(leaf, float) else leaf  # 0.0 and -0.0 differ, nan is itself
