"""Convolutions."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from amp_compiler.errors import CaptureError
from amp_compiler.onnx.importing.ops.registry import op
from amp_compiler.onnx.importing.ops.values import AutoPad, broadcastable, numbers

_CONV: Any = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED: Any = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def spatial_pads(
    auto_pad: str, pads: Any, sizes: list[Any], kernel: list[int], strides: list[int], dilations: list[int]
) -> list[tuple[Any, Any]]:
    """Padding before and after each spatial axis, with `auto_pad` worked out."""
    rank = len(kernel)
    if auto_pad in ("NOTSET", ""):
        amounts = list(pads) if pads is not None else [0] * (2 * rank)
        return list(zip(amounts[:rank], amounts[rank:], strict=True))
    if auto_pad == "VALID":
        return [(0, 0)] * rank
    result = []
    for size, k, s, d in zip(sizes, kernel, strides, dilations, strict=True):
        total = max((-(-size // s) - 1) * s + (k - 1) * d + 1 - size, 0)
        small = total // 2
        result.append((small, total - small) if auto_pad == "SAME_UPPER" else (total - small, small))
    return result


def pad_spatial(x: Tensor, pads: list[tuple[Any, Any]], value: float = 0.0) -> Tensor:
    """Pad the last axes of a tensor; the pairs stand in the order of the axes."""
    flat = [size for pair in reversed(pads) for size in pair]
    return F.pad(x, flat, value=value) if any(isinstance(p, torch.SymInt) or p for p in flat) else x


def _rank(x: Tensor, table: Any) -> int:
    rank = x.dim() - 2
    if rank not in table:
        raise CaptureError(f"torch has no convolution over {rank} axes", hint="write it over 1, 2 or 3 axes")
    return rank


@op("Conv")
def _conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, auto_pad: AutoPad = "NOTSET", dilations: Any = None,
    group: int = 1, kernel_shape: Any = None, pads: Any = None, strides: Any = None,
) -> Tensor:  # fmt: skip
    rank = _rank(x, _CONV)
    stride, dilation = list(strides or [1] * rank), list(dilations or [1] * rank)
    amounts = spatial_pads(auto_pad, pads, list(x.shape[2:]), list(weight.shape[2:]), stride, dilation)
    padding = [0] * rank
    if all(isinstance(a, int) and isinstance(b, int) and a == b >= 0 for a, b in amounts):
        padding = [a for a, _ in amounts]
    else:
        x = pad_spatial(x, amounts)
    return _CONV[rank](x, weight, bias, stride, padding, dilation, group)  # type: ignore[no-any-return]


@op("ConvTranspose")
def _conv_transpose(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, auto_pad: AutoPad = "NOTSET", dilations: Any = None,
    group: int = 1, kernel_shape: Any = None, output_padding: Any = None, output_shape: Any = None, pads: Any = None,
    strides: Any = None,
) -> Tensor:  # fmt: skip
    rank = _rank(x, _TRANSPOSED)
    stride, dilation = list(strides or [1] * rank), list(dilations or [1] * rank)
    extra = list(output_padding or [0] * rank)
    extent = [(k - 1) * d + 1 for k, d in zip(weight.shape[2:], dilation, strict=True)]
    full = [(n - 1) * s + e for n, s, e in zip(x.shape[2:], stride, extent, strict=True)]
    wanted = None if output_shape is None else list(output_shape)[-rank:]
    if wanted is None and auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        wanted = [n * s for n, s in zip(x.shape[2:], stride, strict=True)]
    if wanted is None:
        amounts = spatial_pads(auto_pad, pads, [], extent, stride, dilation)
    else:
        amounts = []
        for size, f, o in zip(wanted, full, extra, strict=True):
            total = max(f + o - size, 0)
            amounts.append(
                (total // 2, total - total // 2) if auto_pad != "SAME_LOWER" else (total - total // 2, total // 2)
            )
            if f + o < size:
                extra[len(amounts) - 1] += size - f - o
    within = all(o < max(s, d) for o, s, d in zip(extra, stride, dilation, strict=True))
    if within and all(a == b for a, b in amounts):
        return _TRANSPOSED[rank](x, weight, bias, stride, [a for a, _ in amounts], extra, group, dilation)  # type: ignore[no-any-return]
    result = _TRANSPOSED[rank](x, weight, None, stride, 0, 0, group, dilation)
    result = pad_spatial(result, [(-a, o - b) for (a, b), o in zip(amounts, extra, strict=True)])
    return result if bias is None else result + broadcastable(bias, result.dim())


@op("Col2Im", host=(1, 2))
def _col2im(
    x: Tensor, image: Any, block: Any, *, dilations: Any = None, pads: Any = None, strides: Any = None
) -> Tensor:
    sizes, kernel = numbers(image), numbers(block)
    rank = len(sizes)
    stride, dilation = list(strides or [1] * rank), list(dilations or [1] * rank)
    amounts = spatial_pads("NOTSET", pads, sizes, kernel, stride, dilation)
    padded = [n + a + b for n, (a, b) in zip(sizes, amounts, strict=True)]
    counts = [(n - (k - 1) * d - 1) // s + 1 for n, k, d, s in zip(padded, kernel, dilation, stride, strict=True)]
    place = torch.zeros(1, 1, dtype=torch.int64, device=x.device)  # [kernel, block] → flat position in the image
    for n, k, d, s, c in zip(padded, kernel, dilation, stride, counts, strict=True):
        one = (torch.arange(k) * d).reshape(-1, 1) + (torch.arange(c) * s).reshape(1, -1)
        place = (place[:, None, :, None] * n + one.to(x.device)[None, :, None, :]).flatten(0, 1).flatten(1, 2)
    channels = x.shape[1] // math.prod(kernel)
    values = x.reshape(x.shape[0], channels, -1)
    result = values.new_zeros(x.shape[0], channels, math.prod(padded))
    result = result.index_add(2, place.reshape(-1), values).reshape(x.shape[0], channels, *padded)
    return pad_spatial(result, [(-a, -b) for a, b in amounts])


@op("DeformConv")
def _deform_conv(
    x: Tensor, weight: Tensor, offset: Tensor, bias: Tensor | None = None, mask: Tensor | None = None, *,
    dilations: Any = None, group: int = 1, kernel_shape: Any = None, offset_group: int = 1, pads: Any = None,
    strides: Any = None,
) -> Tensor:  # fmt: skip
    if x.dim() != 4:
        raise CaptureError(f"there is no DeformConv over {x.dim() - 2} axes", hint="write it over 2 axes")
    stride, dilation = list(strides or [1, 1]), list(dilations or [1, 1])
    (top, _), (left, _) = spatial_pads("NOTSET", pads, [], [1, 1], stride, dilation)
    n, c, h, w = x.shape
    out_c, _, kh, kw = weight.shape
    oh, ow = offset.shape[-2:]
    moved = offset.reshape(n, offset_group, kh * kw, 2, oh, ow)
    rows = (torch.arange(kh, device=x.device) * dilation[0]).repeat_interleave(kw).reshape(-1, 1, 1)
    columns = (torch.arange(kw, device=x.device) * dilation[1]).repeat(kh).reshape(-1, 1, 1)
    y = rows + (torch.arange(oh, device=x.device) * stride[0] - top).reshape(1, -1, 1) + moved[:, :, :, 0]
    z = columns + (torch.arange(ow, device=x.device) * stride[1] - left).reshape(1, 1, -1) + moved[:, :, :, 1]
    grid = torch.stack([(2 * z + 1) / w - 1, (2 * y + 1) / h - 1], -1)  # as grid_sample counts without align_corners
    grid = grid.reshape(n * offset_group, kh * kw * oh, ow, 2)
    parts = x.reshape(n * offset_group, c // offset_group, h, w)
    taken = F.grid_sample(parts, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    taken = taken.reshape(n, offset_group, c // offset_group, kh * kw, oh, ow)
    if mask is not None:
        taken = taken * mask.reshape(n, offset_group, 1, kh * kw, oh, ow)
    taken = taken.reshape(n, group, c // group * kh * kw, oh * ow)
    result = torch.matmul(weight.reshape(1, group, out_c // group, -1), taken).reshape(n, out_c, oh, ow)
    return result if bias is None else result + broadcastable(bias, 4)
