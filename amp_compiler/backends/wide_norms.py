"""Norms opened for a compiler with FP32 statistics between forward and backward, as ATen's kernels keep them.

torch 2.13 opens the norms of 16-bit data on a CPU (group norms on every device) into statistics that are rounded to
the type of the data. Where a mean is not near zero tens of percent of a gradient are lost then. Its backward of a group
norm also rounds sums over data and gradient, of which it takes a difference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

_LOW = (torch.float16, torch.bfloat16)
_FORWARD = (
    "native_batch_norm.default",
    "_native_batch_norm_legit.default",
    "_native_batch_norm_legit.no_stats",
    "_native_batch_norm_legit_functional.default",
    "_batch_norm_with_update.default",
    "_batch_norm_with_update_functional.default",
    "native_layer_norm.default",
    "native_group_norm.default",
)  # each reads its data first, and gives its result first
_BACKWARD = ("native_group_norm_backward.default",)
_DATA, _WEIGHT = 1, 4  # arguments of the backward

Opened = Callable[..., Any]


def wide_norms(opened: Mapping[Any, Opened]) -> dict[Any, Opened]:
    """What to open norms into instead.

    Args:
        opened: by operator, what a compiler opens it into.

    Returns:
        The same for the norms among them: they compute on FP32 data, and round their result and the gradient of their
        data alone. FP32 and FP64 data are left to the old one.
    """
    table: dict[Any, Opened] = {}
    for names, widened in ((_FORWARD, _forward), (_BACKWARD, _backward)):
        for name in names:
            operator = _operator(name)
            if operator in opened:
                table[operator] = widened(opened[operator])
    return table


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload, None)  # torch 2.11 to 2.15 differ


def _forward(inner: Opened) -> Opened:
    @functools.wraps(inner)
    def run(data: Tensor, *rest: Any, **named: Any) -> Any:
        if data.dtype not in _LOW:
            return inner(data, *rest, **named)
        results = inner(data.float(), *rest, **named)
        return results if results is NotImplemented else (results[0].to(data.dtype), *results[1:])

    return run


def _backward(inner: Opened) -> Opened:
    @functools.wraps(inner)
    def run(*operands: Any, **named: Any) -> Any:
        low = operands[_DATA].dtype
        if low not in _LOW:
            return inner(*operands, **named)
        weight = operands[_WEIGHT]
        wide = [one.float() if isinstance(one, Tensor) and one.dtype in _LOW else one for one in operands]
        results = inner(*wide, **named)
        types = (low, *[low if weight is None else weight.dtype] * 2)
        return tuple(one if one is None else one.to(dtype) for one, dtype in zip(results, types, strict=True))

    return run
