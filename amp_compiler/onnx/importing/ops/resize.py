"""Resize and Upsample, by `F.interpolate` where it takes the same samples, else by matrices; sampling by grids."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from amp_compiler.errors import CaptureError
from amp_compiler.onnx.importing.ops.registry import op
from amp_compiler.onnx.importing.ops.values import axes_of, numbers

_TORCH_MODES = {
    ("nearest", 3): "nearest", ("nearest", 4): "nearest", ("nearest", 5): "nearest", ("linear", 3): "linear",
    ("linear", 4): "bilinear", ("linear", 5): "trilinear", ("cubic", 4): "bicubic",
}  # fmt: skip


Aspect = Literal["stretch", "not_larger", "not_smaller"]
Rounding = Literal["round_prefer_floor", "round_prefer_ceil", "floor", "ceil", ""]


@op("Upsample", host=(1,))
def _upsample(
    x: Tensor,
    scales_input: Any = None,
    *,
    mode: Literal["nearest", "linear", "bilinear"] = "nearest",
    scales: Any = None,
) -> Tensor:
    factors = list(scales) if scales_input is None else numbers(scales_input)
    return _resize(
        x,
        None,
        np.array(factors),
        opset=11,
        coordinate_transformation_mode="asymmetric",
        mode="nearest" if mode == "nearest" else "linear",
        nearest_mode="floor",
    )


@op("Resize", host=(1, 2, 3))
def _resize(
    x: Tensor, roi: Any = None, scales: Any = None, sizes: Any = None, *, opset: int, antialias: int = 0,
    axes: Any = None, coordinate_transformation_mode: str = "half_pixel", cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0, extrapolation_value: float = 0.0, keep_aspect_ratio_policy: Aspect = "stretch",
    mode: Literal["nearest", "linear", "cubic"] = "nearest", nearest_mode: Rounding = "round_prefer_floor",
) -> Tensor:  # fmt: skip
    if opset < 11:  # its inputs are data and scales, and its rule is that of TensorFlow 1
        scales, roi = roi if scales is None else scales, None
        coordinate_transformation_mode, nearest_mode = "asymmetric", "floor"
    over = list(range(x.dim())) if axes is None else axes_of(axes, x.dim())
    requested, wanted = ([] if one is None else numbers(one) for one in (scales, sizes))
    lengths, factors = _targets([x.shape[a] for a in over], requested, wanted, keep_aspect_ratio_policy)
    plan = [(a, n, f) for a, n, f in zip(over, lengths, factors, strict=True)]
    regions = numbers(roi) if roi is not None else []
    cropped = coordinate_transformation_mode.startswith("tf")
    moved = [(a, n, f) for a, n, f in plan if cropped or not _same(a, x.shape[a], n, f)]
    kind = _Kind(
        mode, coordinate_transformation_mode, nearest_mode, cubic_coeff_a, bool(exclude_outside), bool(antialias)
    )
    quick = _interpolated(x, moved, kind)
    if quick is not None:
        return quick
    for a, n, f in moved:
        place = over.index(a)
        region = (regions[place], regions[place + len(over)]) if regions else (0.0, 1.0)
        x = _along(x, a, int(n), float(f), kind, region, extrapolation_value)
    return x


class _Kind:
    """How samples are taken."""

    def __init__(self, mode: str, coordinates: str, nearest: str, a: float, exclude: bool, antialias: bool) -> None:
        self.mode, self.coordinates, self.nearest = mode, coordinates, nearest
        self.a, self.exclude, self.antialias = a, exclude, antialias


def _same(axis: int, size: Any, length: Any, factor: Any) -> bool:
    if isinstance(size, int) and isinstance(length, int):
        return bool(size == length and factor == 1)
    return axis < 2 and bool(size == length)  # a symbolic batch: the comparison is with itself


def _targets(sizes: list[Any], scales: list[Any], wanted: list[Any], policy: str) -> tuple[list[Any], list[Any]]:
    if scales:
        lengths = [
            math.floor(size * scale) if isinstance(scale, float) else size * scale
            for size, scale in zip(sizes, scales, strict=True)
        ]
        return lengths, scales
    factors = [length / size for length, size in zip(wanted, sizes, strict=True)]
    if policy == "stretch":
        return wanted, factors
    chosen = min(factors) if policy == "not_larger" else max(factors)
    return [math.floor(size * chosen + 0.5) for size in sizes], [chosen] * len(sizes)


def _interpolated(x: Tensor, moved: list[tuple[int, Any, Any]], kind: _Kind) -> Tensor | None:
    """The result by `F.interpolate`, or `None` where that takes other samples."""
    name = _TORCH_MODES.get((kind.mode, x.dim()))
    if name is None or kind.antialias or any(a < 2 for a, _, _ in moved) or not x.is_floating_point():
        return None
    lengths = {a: n for a, n, _ in moved}
    size = [lengths.get(a, x.shape[a]) for a in range(2, x.dim())]
    symbolic = any(isinstance(n, torch.SymInt) for n in size)
    if not symbolic and any(abs(x.shape[a] * f - n) > 1e-5 for a, n, f in moved):
        return None  # a scale that the sizes do not tell
    if kind.mode == "nearest":
        whole = symbolic or all(n % x.shape[a] == 0 for a, n, _ in moved)
        same = kind.coordinates == "asymmetric" and kind.nearest == "floor"
        same |= whole and kind.coordinates.endswith("half_pixel") and kind.nearest.startswith("round_prefer")
        return F.interpolate(x, size=size, mode=name) if same else None
    if kind.mode == "cubic" and (kind.a != -0.75 or kind.exclude):
        return None
    if kind.coordinates == "align_corners":
        return F.interpolate(x, size=size, mode=name, align_corners=True)
    plain = kind.coordinates == "half_pixel" or (
        kind.coordinates == "pytorch_half_pixel" and not symbolic and all(n > 1 for _, n, _ in moved)
    )
    return F.interpolate(x, size=size, mode=name, align_corners=False) if plain and not kind.exclude else None


def _along(
    x: Tensor, axis: int, length: int, scale: float, kind: _Kind, region: tuple[float, float], outside: float
) -> Tensor:
    size = x.shape[axis]
    if not isinstance(size, int):
        raise CaptureError("Resize of this kind needs sizes that are known", hint="capture it without dynamic_shapes")
    points = _points(size, length, scale, kind.coordinates, region)
    if kind.mode == "nearest":
        places = np.clip(_nearest(points, kind.nearest), 0, size - 1)
        result = x.index_select(axis, torch.from_numpy(places).to(x.device))
    else:
        matrix = torch.tensor(_matrix(points, size, scale, kind).tolist(), dtype=x.dtype, device=x.device)
        result = torch.matmul(x.movedim(axis, -1), matrix.t()).movedim(-1, axis)
    if kind.coordinates == "tf_crop_and_resize":
        inside = torch.tensor(((points >= 0) & (points <= size - 1)).tolist(), device=x.device)
        view = [-1 if a == axis else 1 for a in range(x.dim())]
        result = torch.where(inside.reshape(view), result, outside)
    return result


def _points(size: int, length: int, scale: float, coordinates: str, region: tuple[float, float]) -> np.ndarray:
    """Where each output position lies among the inputs."""
    y = np.arange(length, dtype=np.float64)
    wide = scale * size
    if coordinates == "align_corners":
        return np.zeros(length) if wide == 1 else y * (size - 1) / (wide - 1)
    if coordinates == "asymmetric":
        return y / scale
    if coordinates == "tf_crop_and_resize":
        low, high = region
        inner = (high - low) * (size - 1)
        return low * (size - 1) + (np.full(length, inner / 2) if wide == 1 else y * inner / (wide - 1))
    if coordinates == "pytorch_half_pixel" and wide == 1:
        return np.full(length, -0.5)
    centred = (y + 0.5) / scale - 0.5
    if coordinates == "half_pixel_symmetric":
        return centred + size / 2 * (1 - length / wide)
    if coordinates not in ("half_pixel", "pytorch_half_pixel"):
        raise CaptureError(
            f"there is no Resize with coordinate_transformation_mode '{coordinates}'",
            hint="export the model with one that ONNX defines, such as half_pixel or asymmetric",
        )
    return centred


def _nearest(points: np.ndarray, mode: str) -> np.ndarray:
    low = np.floor(points)
    part = points - low
    up = {"floor": np.zeros_like(part, bool), "ceil": part > 0, "round_prefer_floor": part > 0.5}.get(mode, part >= 0.5)
    return (low + up).astype(np.int64)  # type: ignore[no-any-return]


def _matrix(points: np.ndarray, size: int, scale: float, kind: _Kind) -> np.ndarray:
    """Weights of the inputs for each output, with the edge repeated outside."""
    shrink = min(scale, 1.0) if kind.antialias else 1.0
    reach = math.ceil((1 if kind.mode == "linear" else 2) / shrink)
    matrix = np.zeros((len(points), size))
    for row, point in enumerate(points):
        near = np.arange(math.floor(point) - reach, math.floor(point) + reach + 2)
        weights = _kernel((near - point) * shrink, kind)
        if kind.exclude:
            weights = np.where((near < 0) | (near >= size), 0.0, weights)
        if kind.exclude or kind.antialias:
            weights = weights / weights.sum()
        np.add.at(matrix[row], np.clip(near, 0, size - 1), weights)
    return matrix


def _kernel(x: np.ndarray, kind: _Kind) -> np.ndarray:
    x = np.abs(x)
    if kind.mode == "linear":
        return np.clip(1 - x, 0, None)  # type: ignore[no-any-return]
    a = kind.a
    inner = (a + 2) * x**3 - (a + 3) * x**2 + 1
    outer = a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a
    return np.where(x <= 1, inner, np.where(x < 2, outer, 0.0))


# ---- sampling by grids

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
