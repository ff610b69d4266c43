"""Operators that make tensors: fills, ranges, random numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from amp_compiler.onnx.importing.ops.registry import op
from amp_compiler.onnx.importing.ops.values import DTYPES, names_known_type, number, numbers, to_tensor


def device_of(like: Tensor | None) -> torch.device | None:
    """The device of a tensor, if there is one."""
    return like.device if isinstance(like, Tensor) else None


@op("ConstantOfShape", host=(0,))
def _constant_of_shape(shape: Any, *, like: Tensor | None = None, value: tuple[Any, str] = (0.0, "float32")) -> Tensor:
    return torch.full(numbers(shape), value[0], dtype=getattr(torch, value[1]), device=device_of(like))


@op("Range", host=(0, 1, 2))
def _range(start: Any, limit: Any, delta: Any, *, like: Tensor | None = None) -> Tensor:
    known = [one.dtype for one in (start, limit, delta) if one.dtype != object]
    dtype = to_tensor(np.empty(0, known[0])).dtype if known else torch.int64
    return torch.arange(number(start), number(limit), number(delta), dtype=dtype, device=device_of(like))


@op("EyeLike", when=names_known_type)
def _eye_like(x: Tensor, *, dtype: int | None = None, k: int = 0) -> Tensor:
    kind = x.dtype if dtype is None else DTYPES[dtype]
    rows = torch.arange(x.shape[0], device=x.device).reshape(-1, 1)
    return (torch.arange(x.shape[1], device=x.device) == rows + k).to(kind)


@op("RandomUniform", "RandomNormal", pure=False, when=names_known_type)
def _random(
    *, kind: str, shape: Any, like: Tensor | None = None, dtype: int = 1, low: float = 0.0, high: float = 1.0,
    mean: float = 0.0, scale: float = 1.0, seed: float = 0.0,
) -> Tensor:  # fmt: skip
    make = torch.randn if kind == "RandomNormal" else torch.rand
    result = make(list(shape), dtype=DTYPES[dtype], device=device_of(like))
    return result * scale + mean if kind == "RandomNormal" else result * (high - low) + low


@op("RandomUniformLike", "RandomNormalLike", pure=False, when=names_known_type)
def _random_like(
    x: Tensor, *, kind: str, dtype: int | None = None, low: float = 0.0, high: float = 1.0, mean: float = 0.0,
    scale: float = 1.0, seed: float = 0.0,
) -> Tensor:  # fmt: skip
    result = x.dtype if dtype is None else DTYPES[dtype]
    if kind == "RandomNormalLike":
        return torch.randn_like(x, dtype=result) * scale + mean
    return torch.rand_like(x, dtype=result) * (high - low) + low


@op("Bernoulli", pure=False, when=names_known_type)
def _bernoulli(x: Tensor, *, dtype: int | None = None, seed: float = 0.0) -> Tensor:
    return torch.bernoulli(x).to(x.dtype if dtype is None else DTYPES[dtype])
