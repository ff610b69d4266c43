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

BLOCK = 32  # units that are computed together; widths must be multiples of it
_KINDS = ("lstm", "gru", "rnn_tanh", "rnn_relu")  # as recurrent.cpp numbers them


def can_run(data: Tensor) -> bool:
    """Whether the loops take a layer: BF16 on a CPU that multiplies it.

    Args:
        data: [steps, batch, features].
    """
    return data.dtype == torch.bfloat16 and data.device.type == "cpu" and cpu_update.most_inner() > 0


def kept(data: Tensor, hidden: int, kind: str) -> tuple[Tensor, Tensor]:
    """Memory for what the forward leaves for the backward: gates [steps, 4, hidden, batch] and FP32 states.

    Args:
        data: [steps, batch, features].
        hidden: number of units.
        kind: `lstm` or `gru` (four BF16 values per unit and step), or `rnn_tanh` or `rnn_relu` (none).
    """
    steps, batch, _ = data.shape
    gates = data.new_empty(steps, 4 if kind in ("lstm", "gru") else 0, hidden, batch)
    return gates, data.new_empty(steps, hidden, batch, dtype=torch.float32)


def forward(inputs: Sequence[Tensor], kind: str, reverse: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `recurrent_layer`.

    Args:
        inputs: its tensors, contiguous; features and units are multiples of 32.
        kind: as there.
        reverse: as there.
    """
    data, h = inputs[0], inputs[5]
    out, last = data.new_empty(*data.shape[:2], h.shape[-1]), torch.empty_like(h)
    cell, memory = h.new_empty(h.shape if kind == "lstm" else 0), kept(data, h.shape[-1], kind)
    sizes = (*data.shape, h.shape[-1], int(reverse))
    _call("amp_recurrent_forward", kind, sizes, inputs, (out, last, cell), memory)
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
    steps, batch, hidden = gradients[0].shape
    states = [torch.empty_like(one) for one in first]
    sums = [w_hh.new_empty(steps, batch, w_hh.shape[0]) for _ in range(1 + (kind == "gru"))]
    sizes = (steps, batch, 0, hidden, int(reverse))
    outputs = (states[0], states[-1], sums[0], sums[-1])
    _call("amp_recurrent_backward", kind, sizes, (w_hh, first[-1], *gradients), outputs, memory)
    return [*states, *sums]


def _call(
    name: str, kind: str, sizes: tuple[int, ...], inputs: Sequence[Tensor], outputs: Sequence[Tensor],
    memory: tuple[Tensor, Tensor],
) -> None:  # fmt: skip
    shape = (ctypes.c_int64 * len(sizes))(*sizes)
    read, written = ((ctypes.c_void_p * len(some))(*[one.data_ptr() for one in some]) for some in (inputs, outputs))
    gates, states = (ctypes.c_void_p(one.data_ptr()) for one in memory)
    number = ctypes.c_int64(_KINDS.index(kind))
    getattr(library(), name)(number, shape, read, written, gates, states, torch.get_num_threads())
