"""Fourier transforms and mel filters; the last axis holds real and imaginary parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amp_compiler.onnx.importing.ops.registry import op
from amp_compiler.onnx.importing.ops.values import number


def _complex(x: Tensor) -> Tensor:
    return x.squeeze(-1) if x.shape[-1] == 1 else torch.view_as_complex(x.contiguous())


@op("DFT", host=(1, 2))
def _dft(
    x: Tensor, length: Any = None, axis_input: Any = None, *, opset: int, axis: int | None = None, inverse: int = 0,
    onesided: int = 0,
) -> Tensor:  # fmt: skip
    default = 1 if opset < 20 else -2
    place = (default if axis is None else axis) if axis_input is None else number(axis_input)
    place %= x.dim()
    points = None if length is None else number(length)
    signal = _complex(x)
    if inverse:
        if onesided:
            return torch.fft.irfft(signal, points, place).unsqueeze(-1)  # type: ignore[no-any-return]
        return torch.view_as_real(torch.fft.ifft(signal, points, place))
    if not signal.is_complex():
        full = torch.fft.rfft(signal, points, place) if onesided else torch.fft.fft(signal, points, place)
        return torch.view_as_real(full)
    full = torch.fft.fft(signal, points, place)
    return torch.view_as_real(full.narrow(place, 0, full.shape[place] // 2 + 1) if onesided else full)


@op("STFT", host=(1, 3))
def _stft(x: Tensor, step: Any, window: Tensor | None = None, length: Any = None, *, onesided: int = 1) -> Tensor:
    whole = x.shape[1] if window is None else window.shape[0]
    size = whole if length is None else number(length)
    signal = _complex(x)
    frames = signal.unfold(1, size, number(step))
    frames = frames if window is None else frames * window
    if not signal.is_complex() and onesided:
        return torch.view_as_real(torch.fft.rfft(frames, dim=-1))
    full = torch.fft.fft(frames, dim=-1)
    return torch.view_as_real(full[..., : size // 2 + 1] if onesided else full)


@op("MelWeightMatrix", host=(0, 1, 2, 3, 4))
def _mel(bands: Any, length: Any, rate: Any, low: Any, high: Any, *, output_datatype: int = 1) -> Tensor:
    count, bins = int(number(bands)), int(number(length)) // 2 + 1
    scale = 2595.0
    ends = [scale * torch.log10(torch.tensor(1 + number(f) / 700.0, dtype=torch.float64)) for f in (low, high)]
    mels = float(ends[0]) + torch.arange(count + 2, dtype=torch.float64) * ((ends[1] - ends[0]) / (count + 2))
    hertz = 700.0 * (10.0 ** (mels / scale) - 1.0)
    edges = torch.floor((number(length) + 1) * hertz / number(rate)).to(torch.int64)
    points = torch.arange(bins, dtype=torch.float64).reshape(-1, 1)
    left, centre, right = edges[:-2].double(), edges[1:-1].double(), edges[2:].double()
    rising = torch.where(centre > left, (points - left) / (centre - left).clamp(min=1), 1.0)
    falling = (right - points) / (right - centre).clamp(min=1)
    up = (points >= left) & (points <= centre) & ((centre > left) | (points == centre))
    down = (points >= centre) & (points < right)
    result = torch.where(down, falling, torch.where(up, rising, 0.0))
    result = torch.where((points == centre) & (left == centre), 1.0, result)
    return result.to(torch.float32)
