"""Sampling of images by grids."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from amp_compiler.errors import CaptureError
from amp_compiler.onnx.importing.ops.registry import op
from amp_compiler.onnx.importing.ops.values import numbers

Mode = Literal["bilinear", "linear", "nearest", "bicubic", "cubic"]
Padding = Literal["zeros", "border", "reflection"]
_MODES = {"bilinear": "bilinear", "linear": "bilinear", "nearest": "nearest", "bicubic": "bicubic", "cubic": "bicubic"}


@op("GridSample")
def _grid_sample(
    x: Tensor, grid: Tensor, *, align_corners: int = 0, mode: Mode = "linear", padding_mode: Padding = "zeros"
) -> Tensor:
    if x.dim() not in (4, 5) or (x.dim() == 5 and _MODES[mode] == "bicubic"):
        raise CaptureError(
            f"torch has no GridSample of rank {x.dim()} in mode '{mode}'",
            hint="use rank 4, or 5 in another mode than cubic",
        )
    return F.grid_sample(x, grid, _MODES[mode], padding_mode, bool(align_corners))


@op("AffineGrid", host=(1,))
def _affine_grid(theta: Tensor, size: Any, *, align_corners: int = 0) -> Tensor:
    sizes = numbers(size)
    if align_corners and 1 in sizes[2:]:  # a single one is at -1, 1 or 0: ONNX's reference, ONNX Runtime, torch
        raise CaptureError(
            f"AffineGrid between the corners of {sizes[2:]} elements has another result in each runtime",
            hint="use align_corners=0, or at least two elements in each direction",
        )
    return F.affine_grid(theta, sizes, bool(align_corners))


@op("GridSample", domain="com.microsoft")
def _grid_sample_ms(
    x: Tensor, grid: Tensor, *, align_corners: int = 0, mode: Mode = "bilinear", padding_mode: Padding = "zeros"
) -> Tensor:
    return _grid_sample(x, grid, align_corners=align_corners, mode=mode, padding_mode=padding_mode)


@op("Gelu", "QuickGelu", "FastGelu", "BiasGelu", domain="com.microsoft")
def _gelu_ms(x: Tensor, bias: Tensor | None = None, *, kind: str, alpha: float = 1.702) -> Tensor:
    x = x if bias is None else x + bias
    if kind == "QuickGelu":
        return x * torch.sigmoid(alpha * x)
    return F.gelu(x, approximate="tanh" if kind == "FastGelu" else "none")
