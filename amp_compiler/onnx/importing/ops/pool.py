"""Pooling."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from amp_compiler.errors import CaptureError
from amp_compiler.onnx.importing.ops.conv import pad_spatial, spatial_pads
from amp_compiler.onnx.importing.ops.registry import op
from amp_compiler.onnx.importing.ops.values import AutoPad, numbers

_MAX: Any = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_MEAN: Any = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


class _Windows:
    """The windows of a pool along each spatial axis."""

    def __init__(
        self, x: Tensor, kernel: Any, strides: Any, dilations: Any, pads: Any, auto_pad: str, ceil_mode: int
    ) -> None:
        rank = len(kernel)
        self.kernel, self.strides = list(kernel), list(strides or [1] * rank)
        self.dilations = list(dilations or [1] * rank)
        self.sizes = list(x.shape[2:])
        self.pads = spatial_pads(auto_pad, pads, self.sizes, self.kernel, self.strides, self.dilations)
        self.counts, self.extra = [], []
        for n, k, s, d, (a, b) in zip(self.sizes, self.kernel, self.strides, self.dilations, self.pads, strict=True):
            extent = (k - 1) * d + 1
            room = n + a + b - extent
            count = (-(-room // s) if ceil_mode else room // s) + 1
            if ceil_mode and (count - 1) * s >= n + a:  # a window must begin inside the data or the padding before it
                count -= 1
            self.counts.append(count)
            self.extra.append(max((count - 1) * s + extent - (n + a + b), 0))

    @property
    def plain(self) -> bool:
        """True where torch's own pools take the same windows."""
        even = all(a == b and 2 * a <= k for (a, b), k in zip(self.pads, self.kernel, strict=True))
        return even and not any(self.extra)

    def padded(self, x: Tensor, value: float) -> Tensor:
        """The data with padding and what the last windows overhang."""
        return pad_spatial(x, [(a, b + e) for (a, b), e in zip(self.pads, self.extra, strict=True)], value)

    def sum(self, x: Tensor) -> Tensor:
        """Sums over the windows, axis by axis."""
        x = self.padded(x, 0.0)
        for place, (k, s, d, c) in enumerate(zip(self.kernel, self.strides, self.dilations, self.counts, strict=True)):
            axis = place + 2
            x = sum(_every(x, axis, i * d, s, c) for i in range(k))  # type: ignore[assignment]
        return x

    def filled(self, x: Tensor, include_pads: bool) -> Tensor:
        """How many elements each window holds: of the data, or of data and padding."""
        result = torch.ones((), dtype=x.dtype, device=x.device)
        for n, k, s, d, (a, b), c in zip(
            self.sizes, self.kernel, self.strides, self.dilations, self.pads, self.counts, strict=True
        ):
            low, high = (-a, n + b) if include_pads else (0, n)
            held = [sum(low <= j * s - a + i * d < high for i in range(k)) for j in range(c)]
            result = result.unsqueeze(-1) * torch.tensor(held, dtype=x.dtype, device=x.device)
        return result


def _every(x: Tensor, axis: int, start: int, step: int, count: int) -> Tensor:
    cut = (slice(None),) * axis
    return x[(*cut, slice(start, start + (count - 1) * step + 1, step))]


@op("AveragePool")
def _average_pool(
    x: Tensor, *, kernel_shape: Any, auto_pad: AutoPad = "NOTSET", ceil_mode: int = 0, count_include_pad: int = 0,
    dilations: Any = None, pads: Any = None, strides: Any = None,
) -> Tensor:  # fmt: skip
    windows = _Windows(x, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    rank = len(windows.kernel)
    if windows.plain and set(windows.dilations) == {1} and rank in _MEAN:
        padding = [a for a, _ in windows.pads]
        return _MEAN[rank](  # type: ignore[no-any-return]
            x, windows.kernel, windows.strides, padding, bool(ceil_mode), bool(count_include_pad)
        )
    return windows.sum(x) / windows.filled(x, bool(count_include_pad))


@op("LpPool")
def _lp_pool(
    x: Tensor, *, kernel_shape: Any, auto_pad: AutoPad = "NOTSET", ceil_mode: int = 0, dilations: Any = None,
    p: int = 2, pads: Any = None, strides: Any = None,
) -> Tensor:  # fmt: skip
    windows = _Windows(x, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    return windows.sum(x.abs() ** p) ** (1.0 / p)


@op("MaxPool", many=True)
def _max_pool(
    x: Tensor, *, outputs: int, kernel_shape: Any, auto_pad: AutoPad = "NOTSET", ceil_mode: int = 0,
    dilations: Any = None, pads: Any = None, storage_order: int = 0, strides: Any = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    windows = _Windows(x, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    rank = len(windows.kernel)
    if rank not in _MAX:
        raise CaptureError(f"torch has no MaxPool over {rank} axes", hint="pool over 1, 2 or 3 axes")
    if windows.plain and outputs == 1:
        padding = [a for a, _ in windows.pads]
        return (_MAX[rank](x, windows.kernel, windows.strides, padding, windows.dilations, bool(ceil_mode)),)
    lowest = -math.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
    padded = windows.padded(x, lowest)
    result = _MAX[rank](
        padded, windows.kernel, windows.strides, 0, windows.dilations, False, return_indices=outputs > 1
    )
    if outputs == 1:
        return (result,)
    return result[0], _flat_indices(result[1], list(padded.shape[2:]), windows, x, storage_order)


def _flat_indices(indices: Tensor, padded: list[int], windows: _Windows, x: Tensor, column_major: int) -> Tensor:
    """Positions in the padded plane as positions in the whole unpadded tensor."""
    places = []
    for size, (before, _) in zip(reversed(padded), reversed(windows.pads), strict=True):
        places.append(indices % size - before)
        indices = indices // size
    order = list(zip(reversed(places), windows.sizes, strict=True))
    flat = torch.zeros_like(indices)
    for place, size in reversed(order) if column_major else order:
        flat = flat * size + place
    planes = torch.arange(x.shape[0] * x.shape[1], device=x.device).reshape(*x.shape[:2], *[1] * len(windows.sizes))
    return flat + planes * math.prod(windows.sizes)


@op("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def _global_pool(x: Tensor, *, kind: str, p: int = 2) -> Tensor:
    axes = list(range(2, x.dim()))
    if kind == "GlobalAveragePool":
        return x.mean(axes, keepdim=True)
    if kind == "GlobalMaxPool":
        return x.amax(axes, keepdim=True)
    return (x.abs() ** p).sum(axes, keepdim=True) ** (1.0 / p)


@op("MaxUnpool", host=(2,))
def _max_unpool(
    x: Tensor, indices: Tensor, shape: Any = None, *, kernel_shape: Any, pads: Any = None, strides: Any = None
) -> Tensor:
    rank = len(kernel_shape)
    stride, edges = list(strides or [1] * rank), list(pads or [0] * (2 * rank))
    natural = list(x.shape[:2]) + [
        (n - 1) * s - a - b + k
        for n, s, a, b, k in zip(x.shape[2:], stride, edges[:rank], edges[rank:], kernel_shape, strict=True)
    ]
    result = x.new_zeros(math.prod(natural)).scatter(0, indices.reshape(-1), x.reshape(-1)).reshape(natural)
    if shape is None:
        return result
    return pad_spatial(result, [(0, size - have) for size, have in zip(numbers(shape), natural, strict=True)])
