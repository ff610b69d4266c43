"""Fourier transforms; the last axis holds real and imaginary parts."""

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
