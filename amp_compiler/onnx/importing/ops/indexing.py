"""Gathering, scattering and selecting."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from amp_compiler.onnx.importing.ops.registry import op
from amp_compiler.onnx.importing.ops.values import numbers


def _from_zero(indices: Tensor, size: Any) -> Tensor:
    """Indices as int64 from 0 on; ONNX lets them count from the end."""
    indices = indices.to(torch.int64)
    return torch.where(indices < 0, indices + size, indices)


@op("Gather")
def _gather(x: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    places = _from_zero(indices, x.shape[axis])
    if axis % x.dim() == 0 and x.dim() == 2 and places.dim() > 0 and x.is_floating_point():
        return F.embedding(places, x)
    if places.dim() == 0:
        return x.index_select(axis, places.reshape(1)).squeeze(axis)
    taken = x.index_select(axis, places.reshape(-1))
    place = axis % x.dim()
    return taken.reshape(*x.shape[:place], *places.shape, *x.shape[place + 1 :])


@op("GatherElements")
def _gather_elements(x: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    return torch.gather(x, axis, _from_zero(indices, x.shape[axis]))


def _nd_index(shape: Any, indices: Tensor, batch_dims: int) -> tuple[Tensor, ...]:
    depth = indices.shape[-1]
    parts = []
    for place in range(batch_dims):
        view = [1] * (indices.dim() - 1)
        view[place] = -1
        parts.append(torch.arange(shape[place], device=indices.device).reshape(view))
    return (*parts, *(_from_zero(indices[..., k], shape[batch_dims + k]) for k in range(depth)))


@op("GatherND")
def _gather_nd(x: Tensor, indices: Tensor, *, batch_dims: int = 0) -> Tensor:
    return x[_nd_index(x.shape, indices, batch_dims)]


Reduction = Literal["none", "add", "mul", "max", "min", ""]
_COMBINE = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


@op("ScatterElements", "Scatter")
def _scatter_elements(
    x: Tensor, indices: Tensor, updates: Tensor, *, axis: int = 0, reduction: Reduction = "none"
) -> Tensor:
    places = _from_zero(indices, x.shape[axis])
    if reduction in ("none", ""):
        return x.scatter(axis, places, updates)
    return x.scatter_reduce(axis, places, updates, _COMBINE[reduction], include_self=True)


@op("ScatterND")
def _scatter_nd(x: Tensor, indices: Tensor, updates: Tensor, *, reduction: Reduction = "none") -> Tensor:
    depth = indices.shape[-1]
    if reduction in ("none", ""):
        return x.index_put(_nd_index(x.shape, indices, 0), updates)
    if reduction == "add":
        return x.index_put(_nd_index(x.shape, indices, 0), updates, accumulate=True)
    rows, width = math.prod(x.shape[:depth]), math.prod(x.shape[depth:])
    flat = torch.zeros((), dtype=torch.int64, device=x.device)
    for place, size in zip(_nd_index(x.shape, indices, 0), x.shape[:depth], strict=True):
        flat = flat * size + place
    where = flat.reshape(-1, 1).expand(-1, width)
    values = updates.reshape(-1, width)
    return x.reshape(rows, width).scatter_reduce(0, where, values, _COMBINE[reduction]).reshape(x.shape)


@op("TensorScatter")
def _tensor_scatter(
    past: Tensor,
    update: Tensor,
    write: Tensor | None = None,
    *,
    axis: int = -2,
    mode: Literal["linear", "circular"] = "linear",
) -> Tensor:
    place, length = axis % past.dim(), update.shape[axis]
    starts = past.new_zeros(past.shape[0], dtype=torch.int64) if write is None else write.to(torch.int64)
    steps = starts.reshape(-1, 1) + torch.arange(length, device=past.device)
    steps = steps.remainder(past.shape[axis]) if mode == "circular" else steps
    view = [1] * past.dim()
    view[0], view[place] = past.shape[0], length
    return past.scatter(place, steps.reshape(view).expand(update.shape), update)


@op("OneHot", host=(1,))
def _one_hot(indices: Tensor, depth: Any, values: Tensor, *, axis: int = -1) -> Tensor:
    size = int(numbers(depth)[0])
    places = _from_zero(indices, size)
    rank = axis % (indices.dim() + 1)
    view = [1] * (indices.dim() + 1)
    view[rank] = size
    hot = places.unsqueeze(rank) == torch.arange(size, device=indices.device).reshape(view)
    return torch.where(hot, values[1], values[0])


@op("NonZero")
def _non_zero(x: Tensor) -> Tensor:
    return torch.nonzero(x).t()


@op("Compress")
def _compress(x: Tensor, condition: Tensor, *, axis: int | None = None) -> Tensor:
    kept = torch.nonzero(condition).reshape(-1)
    return x.reshape(-1).index_select(0, kept) if axis is None else x.index_select(axis, kept)


@op("Trilu", host=(1,))
def _trilu(x: Tensor, diagonal: Any = None, *, upper: int = 1) -> Tensor:
    k = 0 if diagonal is None else int(numbers(diagonal)[0])
    return torch.triu(x, k) if upper else torch.tril(x, k)


@op("ArrayFeatureExtractor", domain="ai.onnx.ml")
def _array_feature(x: Tensor, indices: Tensor) -> Tensor:
    taken = x.index_select(-1, indices.reshape(-1))
    return taken.reshape(1, -1) if x.dim() == 1 else taken


@op("Binarizer", domain="ai.onnx.ml")
def _binarizer(x: Tensor, *, threshold: float = 0.0) -> Tensor:
    return (x > threshold).to(x.dtype)
