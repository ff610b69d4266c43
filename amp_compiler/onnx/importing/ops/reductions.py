"""Reductions, arguments of extremes, and sorting."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from amp_compiler.onnx.importing.ops.registry import op
from amp_compiler.onnx.importing.ops.values import axes_of, number, numbers

REDUCTIONS = (
    "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSum",
    "ReduceLogSumExp", "ReduceSumSquare",
)  # fmt: skip


@op(*REDUCTIONS, host=(1,))
def _reduce(
    x: Tensor, axes_input: Any = None, *, kind: str, axes: Any = None, keepdims: int = 1,
    noop_with_empty_axes: int = 0,
) -> Tensor:  # fmt: skip
    chosen = numbers(axes_input) if axes_input is not None else list(axes or [])
    if not chosen and noop_with_empty_axes:
        return _reduce_over(x, kind, [], False)
    over = axes_of(chosen, x.dim()) if chosen else list(range(x.dim()))
    return _reduce_over(x, kind, over, bool(keepdims))


def _reduce_over(x: Tensor, kind: str, axes: list[int], keep: bool) -> Tensor:
    if kind in ("ReduceMax", "ReduceMin"):
        return _extreme(x, kind, axes, keep)
    if kind == "ReduceProd":
        return _product(x, axes, keep)
    if kind == "ReduceLogSumExp":
        return torch.logsumexp(x, axes, keep) if axes else x
    if kind == "ReduceMean":
        if not x.is_floating_point():
            count = math.prod(x.shape[axis] for axis in axes)
            return torch.div(_sum(x, axes, keep), count, rounding_mode="trunc")
        return x.mean(axes, keep) if axes else x
    if kind == "ReduceL1":
        return _sum(x.abs(), axes, keep)
    if kind == "ReduceL2":
        return _sum(x * x, axes, keep).sqrt()
    if kind == "ReduceSumSquare":
        return _sum(x * x, axes, keep)
    total = _sum(x, axes, keep)
    return total.log() if kind == "ReduceLogSum" else total


def _sum(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    return x.sum(axes, keep, dtype=x.dtype) if axes else x


def _product(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted(axes, reverse=True):
        x = x.prod(axis, keep, dtype=x.dtype)
    return x


def _extreme(x: Tensor, kind: str, axes: list[int], keep: bool) -> Tensor:
    if not axes:
        return x
    largest = kind == "ReduceMax"
    if any(x.shape[axis] == 0 for axis in axes):
        kept = [1 if a in axes else size for a, size in enumerate(x.shape) if keep or a not in axes]
        if x.is_floating_point():
            return x.new_full(kept, -math.inf if largest else math.inf)
        if x.dtype == torch.bool:
            return x.new_full(kept, not largest)
        return x.new_full(kept, torch.iinfo(x.dtype).min if largest else torch.iinfo(x.dtype).max)
    if x.dtype == torch.bool:
        return _extreme(x.to(torch.uint8), kind, axes, keep).to(torch.bool)
    return torch.amax(x, axes, keep) if largest else torch.amin(x, axes, keep)


@op("ArgMax", "ArgMin")
def _arg(x: Tensor, *, kind: str, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    function = torch.argmax if kind == "ArgMax" else torch.argmin
    if not select_last_index:
        return function(x, axis, bool(keepdims))
    return x.shape[axis] - 1 - function(x.flip(axis), axis, bool(keepdims))


@op("TopK", host=(1,), many=True)
def _top_k(
    x: Tensor, count: Any = None, *, k: int = 0, axis: int = -1, largest: int = 1, sorted: int = 1
) -> tuple[Tensor, Tensor]:
    # A stable sort gives the lower index first among equals, which ONNX asks for and torch.topk does not promise.
    values, indices = torch.sort(x, dim=axis, descending=bool(largest), stable=True)
    length = k if count is None else number(count)
    return values.narrow(axis, 0, length), indices.narrow(axis, 0, length)


@op("Unique", many=True)
def _unique(x: Tensor, *, axis: int | None = None, sorted: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = x.reshape(-1) if axis is None else x
    place = axis or 0
    values, inverse, counts = torch.unique(x, sorted=True, return_inverse=True, return_counts=True, dim=place)
    positions = torch.arange(inverse.shape[0], device=x.device)
    first = torch.full_like(counts, inverse.shape[0]).scatter_reduce(0, inverse, positions, "amin")
    if not sorted:
        order = torch.argsort(first)
        rank = torch.argsort(order)
        values, inverse = values.index_select(place, order), rank[inverse]
        first, counts = first[order], counts[order]
    return x.index_select(place, first), first, inverse, counts
