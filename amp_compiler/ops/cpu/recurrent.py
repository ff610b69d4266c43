"""One direction of a BF16 LSTM, GRU or plain recurrent layer as native loops over time (`recurrent.cpp`).

What is left of the backward are matrix products over all steps at once, which a graph can show; see `ops.recurrent`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from amp_compiler.ops.cpu import update as cpu_update
from amp_compiler.ops.cpu.build import library

_BLOCK = 32  # units that are computed together; widths must be multiples of it
_KINDS = ("lstm", "gru", "rnn_tanh", "rnn_relu")  # as recurrent.cpp numbers them


def can_run(data: Tensor) -> bool:
    """Whether the loops take a layer: BF16 on a CPU that multiplies it.

    Args:
        data: [steps, batch, features].
    """
    return data.dtype == torch.bfloat16 and data.device.type == "cpu" and cpu_update.most_inner() > 0


def kept(data: Tensor, hidden: int, kind: str) -> tuple[Tensor, Tensor]:
    """Memory for what the forward leaves for the backward: gates [steps, 4, units, batch] and FP32 states.

    Args:
        data: [steps, batch, features].
        hidden: number of units; memory is for whole blocks of them.
        kind: `lstm` or `gru` (four BF16 values per unit and step), or `rnn_tanh` or `rnn_relu` (none).
    """
    steps, batch, units = *data.shape[:2], hidden + -hidden % _BLOCK
    gates = data.new_empty(steps, 4 if kind in ("lstm", "gru") else 0, units, batch)
    return gates, data.new_empty(steps, units, batch, dtype=torch.float32)


def forward(inputs: Sequence[Tensor], kind: str, reverse: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `recurrent_layer`.

    Args:
        inputs: its tensors, contiguous.
        kind: as there.
        reverse: as there.
    """
    hidden, memory = inputs[5].shape[-1], kept(inputs[0], inputs[5].shape[-1], kind)
    data, *weights = inputs[:5]
    whole = [_filled(data), *(_filled(one, hidden) for one in weights), *(_filled(one) for one in inputs[5:])]
    data, h = whole[0], whole[5]
    out, last = data.new_empty(*data.shape[:2], h.shape[-1]), torch.empty_like(h)
    cell = h.new_empty(h.shape if kind == "lstm" else 0)
    sizes = (*data.shape, h.shape[-1], int(reverse))
    _call("amp_recurrent_forward", kind, sizes, whole, (out, last, cell), memory)
    if h.shape[-1] != hidden:
        out, last, cell = (one[..., :hidden].contiguous() for one in (out, last, cell))
    return out, last, cell, *memory


def sums_backward(
    w_hh: Tensor, first: Sequence[Tensor], gradients: Sequence[Tensor], memory: tuple[Tensor, Tensor], kind: str,
    reverse: bool,
) -> list[Tensor]:  # fmt: skip
    """Gradients of the first states, and of the sums that go into the gates; see `recurrent_sums_backward`.

    Args:
        w_hh: [gates * hidden, hidden], contiguous.
        first: the first states, [1, batch, hidden] each, contiguous.
        gradients: of the three results [steps, batch, hidden], contiguous.
        memory: gates and states that the forward left.
        kind: as in the forward.
        reverse: as in the forward.
    """
    hidden, whole = w_hh.shape[1], [_filled(w_hh, w_hh.shape[1]), *map(_filled, (first[-1], *gradients))]
    steps, batch, units = whole[2].shape
    states = [torch.empty_like(whole[1]) for _ in first]
    sums = [w_hh.new_empty(steps, batch, len(whole[0])) for _ in range(1 + (kind == "gru"))]
    sizes = (steps, batch, 0, units, int(reverse))
    _call("amp_recurrent_backward", kind, sizes, whole, (states[0], states[-1], sums[0], sums[-1]), memory)
    if units == hidden:
        return [*states, *sums]
    by_gate = (one.unflatten(-1, (-1, units))[..., :hidden].flatten(-2) for one in sums)
    return [*(one[..., :hidden].contiguous() for one in states), *by_gate]


def _filled(tensor: Tensor, hidden: int = 0) -> Tensor:
    """Filled up to whole blocks with zeros, which stay zeros: what lies last and, of weights, the units of each gate.

    Args:
        tensor: contiguous.
        hidden: number of units of weights, [gates * hidden, …].
    """
    if not (tensor.shape[-1] % _BLOCK or hidden % _BLOCK):
        return tensor
    parts = tensor.unflatten(0, (-1, hidden)) if hidden else tensor
    pads = [0, -parts.shape[-1] % _BLOCK, *([0, -hidden % _BLOCK] if hidden and parts.dim() == 3 else [])]
    filled = torch.nn.functional.pad(parts, pads)
    return filled.flatten(0, 1) if hidden else filled


def _call(
    name: str, kind: str, sizes: tuple[int, ...], inputs: Sequence[Tensor], outputs: Sequence[Tensor],
    memory: tuple[Tensor, Tensor],
) -> None:  # fmt: skip
    shape = (ctypes.c_int64 * len(sizes))(*sizes)
    read, written = ((ctypes.c_void_p * len(some))(*[one.data_ptr() for one in some]) for some in (inputs, outputs))
    gates, states = (ctypes.c_void_p(one.data_ptr()) for one in memory)
    number = ctypes.c_int64(_KINDS.index(kind))
    getattr(library(), name)(number, shape, read, written, gates, states, torch.get_num_threads())
