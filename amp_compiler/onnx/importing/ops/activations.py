"""Activation functions."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from amp_compiler.onnx.importing.ops.registry import op

for _name, _function in {"Relu": torch.relu, "Sigmoid": torch.sigmoid}.items():
    op(_name)(_function)


@op("Softplus")
def _softplus(x: Tensor) -> Tensor:
    return F.softplus(x, threshold=40.0)  # torch's own threshold of 20 cuts digits that FP32 still has


@op("LeakyRelu")
def _leaky_relu(x: Tensor, *, alpha: float = 0.01) -> Tensor:
    return F.leaky_relu(x, alpha)


@op("PRelu")
def _prelu(x: Tensor, slope: Tensor) -> Tensor:
    return torch.where(x < 0, x * slope, x)


@op("Elu")
def _elu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return F.elu(x, alpha)


@op("Selu")
def _selu(x: Tensor, *, opset: int, alpha: float | None = None, gamma: float | None = None) -> Tensor:
    first = opset < 6  # whose defaults have four digits
    alpha = (1.6732 if first else 1.6732632423543772) if alpha is None else alpha
    gamma = (1.0507 if first else 1.0507009873554805) if gamma is None else gamma
    return gamma * F.elu(x, alpha)


@op("Gelu")
def _gelu(x: Tensor, *, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    return F.gelu(x, approximate=approximate)


@op("Softmax", "LogSoftmax", "Hardmax")
def _softmax(x: Tensor, *, kind: str, opset: int, axis: int | None = None) -> Tensor:
    place = (-1 if opset >= 13 else 1) if axis is None else axis
    function: Any = {"Softmax": torch.softmax, "LogSoftmax": torch.log_softmax}.get(kind, _hardmax)
    if opset >= 13:
        return function(x, place)  # type: ignore[no-any-return]
    place %= x.dim()  # before opset 13: over all axes from this one on
    flat = x.reshape(math.prod(x.shape[:place]), -1)
    return function(flat, 1).reshape(x.shape)  # type: ignore[no-any-return]


def _hardmax(x: Tensor, axis: int) -> Tensor:
    highest = x.argmax(axis, keepdim=True)
    return torch.zeros_like(x).scatter(axis, highest, torch.ones_like(highest, dtype=x.dtype))


@op("Dropout", many=True, pure=False)
def _dropout(
    x: Tensor, ratio_input: Any = None, training_mode: Any = None, *, seed: int = 0, ratio: float = 0.5,
    is_test: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    # ONNX's inference form does nothing; `training_mode` as an input is the only way to ask for more.
    p = float(ratio if ratio_input is None else ratio_input)
    if training_mode is None or not bool(training_mode) or p == 0.0:
        return x, torch.ones_like(x, dtype=torch.bool)
    keep = torch.rand_like(x) >= p
    return x * keep / (1 - p), keep
