"""Operators that move data and compute nothing."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from amp_compiler.onnx.importing.ops.registry import op
from amp_compiler.onnx.importing.ops.values import axes_of, number, numbers, slices


@op("Reshape", host=(1,))
def _reshape(x: Tensor, shape_input: Any = None, *, shape: Any = None, allowzero: int = 0) -> Tensor:
    sizes = list(shape) if shape_input is None else numbers(shape_input)
    if not allowzero:
        sizes = [x.shape[place] if isinstance(size, int) and size == 0 else size for place, size in enumerate(sizes)]
    if -1 in [size for size in sizes if isinstance(size, int)] and any(
        isinstance(size, int) and size == 0 for size in x.shape
    ):  # an empty tensor: torch refuses to guess
        known = math.prod(size for size in sizes if size != -1)
        sizes = [(x.numel() // known if known else 0) if size == -1 else size for size in sizes]
    return x.reshape(sizes)


@op("Flatten")
def _flatten(x: Tensor, *, axis: int = 1) -> Tensor:
    place = axis % x.dim() if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:place]), math.prod(x.shape[place:]))


@op("Transpose")
def _transpose(x: Tensor, *, perm: Any = None) -> Tensor:
    return x.permute(list(range(x.dim()))[::-1] if perm is None else list(perm))


@op("Squeeze", host=(1,))
def _squeeze(x: Tensor, axes_input: Any = None, *, axes: Any = None) -> Tensor:
    chosen = axes if axes_input is None else numbers(axes_input)
    if chosen is None:
        return x.squeeze()
    return x.squeeze(tuple(axes_of(chosen, x.dim())))


@op("Unsqueeze", host=(1,))
def _unsqueeze(x: Tensor, axes_input: Any = None, *, axes: Any = None) -> Tensor:
    chosen = list(axes) if axes_input is None else numbers(axes_input)
    for axis in sorted(axes_of(chosen, x.dim() + len(chosen))):
        x = x.unsqueeze(axis)
    return x


@op("Concat")
def _concat(*values: Tensor, axis: int) -> Tensor:
    return torch.cat(values, axis) if len(values) > 1 else values[0]


@op("Split", host=(1,), many=True)
def _split(
    x: Tensor, sizes: Any = None, *, outputs: int, axis: int = 0, split: Any = None, num_outputs: int | None = None
) -> tuple[Tensor, ...]:
    chosen = split if sizes is None else numbers(sizes)
    if chosen is not None:
        return torch.split(x, list(chosen), axis)
    part = -(-x.shape[axis] // outputs)
    lengths = [part] * (outputs - 1)
    return torch.split(x, [*lengths, x.shape[axis] - part * (outputs - 1)], axis)


@op("Slice", host=(1, 2, 3, 4))
def _slice(x: Tensor, *inputs: Any, starts: Any = None, ends: Any = None, axes: Any = None) -> Tensor:
    for axis, a, b, c in slices(inputs, starts, ends, axes):
        x = _slice_one(x, axis % x.dim(), a, b, c)
    return x


def _slice_one(x: Tensor, axis: int, start: Any, end: Any, step: int) -> Tensor:
    if step > 0:
        if isinstance(start, int) and isinstance(end, int) and start == 0 and end >= 2**31 - 1 and step == 1:
            return x
        cut = (slice(None),) * axis
        return x[(*cut, slice(start, end, step))]
    taken = range(*slice(start, None if end < -x.shape[axis] else end, step).indices(x.shape[axis]))
    return x.index_select(axis, torch.tensor(list(taken), dtype=torch.int64, device=x.device))


@op("Expand", host=(1,))
def _expand(x: Tensor, shape: Any) -> Tensor:
    return x.expand(_broadcast(list(x.shape), numbers(shape)))


def _broadcast(a: list[Any], b: list[Any]) -> list[Any]:
    rank = max(len(a), len(b))
    a, b = [1] * (rank - len(a)) + a, [1] * (rank - len(b)) + b
    return [right if isinstance(left, int) and left == 1 else left for left, right in zip(a, b, strict=True)]


@op("Tile", host=(1, 2))
def _tile(x: Tensor, repeats: Any, axis: Any = None) -> Tensor:
    if axis is None:
        return x.repeat(numbers(repeats))
    counts = [1] * x.dim()  # before opset 6
    counts[number(axis)] = number(repeats)
    return x.repeat(counts)


PadMode = Literal["constant", "reflect", "edge", "wrap"]


@op("Pad", host=(1, 3), scalars=True)
def _pad(
    x: Tensor, pads_input: Any = None, constant: Any = None, axes: Any = None, *, mode: PadMode = "constant",
    pads: Any = None, value: float = 0.0,
) -> Tensor:  # fmt: skip
    amounts = list(pads) if pads_input is None else numbers(pads_input)
    over = list(range(x.dim())) if axes is None else axes_of(axes, x.dim())
    before, after = amounts[: len(over)], amounts[len(over) :]
    if mode == "constant":
        fill = value if constant is None else constant.item() if isinstance(constant, Tensor) else constant
        return _constant_pad(x, dict(zip(over, zip(before, after, strict=True), strict=True)), fill)
    for axis, low, high in zip(over, before, after, strict=True):
        x = _indexed_pad(x, axis, low, high, mode)
    return x


def _constant_pad(x: Tensor, amounts: dict[int, tuple[Any, Any]], fill: Any) -> Tensor:
    flat = [size for axis in reversed(range(x.dim())) for size in amounts.get(axis, (0, 0))]
    if x.dtype == torch.bool:
        return F.pad(x.to(torch.uint8), flat, value=int(bool(fill))).to(torch.bool)
    return F.pad(x, flat, value=fill)


def _indexed_pad(x: Tensor, axis: int, low: int, high: int, mode: str) -> Tensor:
    if isinstance(low, int) and isinstance(high, int) and low == high == 0:
        return x
    size = x.shape[axis]
    place = torch.arange(-low, size + high, device=x.device)
    if mode == "edge":
        place = place.clamp(0, size - 1)
    elif mode == "wrap":
        place = place.remainder(size)
    else:  # reflect: a wave of period 2 (size - 1)
        period = max(2 * (size - 1), 1)
        place = place.remainder(period)
        place = torch.where(place < size, place, period - place)
    return x.index_select(axis, place)


@op("DepthToSpace")
def _depth_to_space(x: Tensor, *, blocksize: int, mode: Literal["DCR", "CRD"] = "DCR") -> Tensor:
    if mode == "CRD":
        return F.pixel_shuffle(x, blocksize)
    n, c, h, w = x.shape
    parts = x.reshape(n, blocksize, blocksize, c // blocksize**2, h, w).permute(0, 3, 4, 1, 5, 2)
    return parts.reshape(n, c // blocksize**2, h * blocksize, w * blocksize)


@op("SpaceToDepth")
def _space_to_depth(x: Tensor, *, blocksize: int, mode: Literal["DCR", "CRD"] = "DCR") -> Tensor:
    n, c, h, w = x.shape
    parts = x.reshape(n, c, h // blocksize, blocksize, w // blocksize, blocksize)
    order = (0, 1, 3, 5, 2, 4) if mode == "CRD" else (0, 3, 5, 1, 2, 4)
    return parts.permute(order).reshape(n, c * blocksize**2, h // blocksize, w // blocksize)


@op("ReverseSequence")
def _reverse_sequence(x: Tensor, lengths: Tensor, *, batch_axis: int = 1, time_axis: int = 0) -> Tensor:
    return reverse_sequence(x, lengths, batch_axis, time_axis)


def reverse_sequence(x: Tensor, lengths: Tensor, batch_axis: int, time_axis: int) -> Tensor:
    """The first `lengths[b]` steps of each sequence in reverse order, the rest as it is."""
    steps = torch.arange(x.shape[time_axis], device=x.device)
    ends = lengths.to(torch.int64).reshape(-1, 1)
    places = torch.where(steps < ends, ends - 1 - steps, steps)  # [batch, time]
    if time_axis < batch_axis:
        places = places.t()
    shape = [x.shape[a] if a in (batch_axis, time_axis) else 1 for a in range(x.dim())]
    return torch.gather(x, time_axis, places.reshape(shape).expand(x.shape))
