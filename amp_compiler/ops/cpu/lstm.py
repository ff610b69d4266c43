"""One direction of a BF16 LSTM layer as native loops over time (`lstm.cpp`), and what of its backward is loops.

What is left of the backward are matrix products over all steps at once, which a graph can show; see `ops.lstm`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from amp_compiler.ops.cpu import update as cpu_update
from amp_compiler.ops.cpu.build import library

_BLOCK = 32  # units that are computed together; widths must be multiples of it
_GATES = 4


def can_run(data: Tensor, hidden: int) -> bool:
    """Whether the loops take a layer: BF16 on a CPU that multiplies it, with widths that are multiples of 32.

    Args:
        data: [steps, batch, features].
        hidden: number of units.
    """
    steps, batch, features = (int(size) for size in data.shape)
    fits = steps > 0 and batch > 0 and features > 0 and features % _BLOCK == 0 and hidden % _BLOCK == 0
    return fits and data.dtype == torch.bfloat16 and data.device.type == "cpu" and cpu_update.most_inner() > 0


def workspace_size(steps: int, batch: int, hidden: int) -> int:
    """Bytes that the forward leaves for the backward: four BF16 gates and an FP32 cell state per unit."""
    return steps * batch * hidden * (_GATES * 2 + 4)


def forward(inputs: Sequence[Tensor], reverse: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `lstm_layer`.

    Args:
        inputs: its seven tensors, contiguous.
        reverse: as there.
    """
    data, h = inputs[0], inputs[5]
    steps, batch, hidden = *data.shape[:2], h.shape[-1]
    out = data.new_empty(steps, batch, hidden)
    results = [out, torch.empty_like(h), torch.empty_like(h)]
    workspace = torch.empty(workspace_size(steps, batch, hidden), dtype=torch.uint8)
    _call("amp_lstm_forward", (*data.shape, hidden, int(reverse)), inputs, results, workspace)
    return results[0], results[1], results[2], workspace


def gates_backward(
    w_hh: Tensor, c: Tensor, gradients: Sequence[Tensor], workspace: Tensor, reverse: bool
) -> list[Tensor]:
    """Gradients of the sums that go into the gates, of the first hidden state and of the first cell state.

    Args:
        w_hh: [4 * hidden, hidden], contiguous.
        c: first cell state, [1, batch, hidden], contiguous.
        gradients: of the output [steps, batch, hidden], the last hidden state and the last cell state, contiguous.
        workspace: of the forward.
        reverse: as in the forward.
    """
    steps, batch, hidden = gradients[0].shape
    results = [c.new_empty(steps, batch, _GATES * hidden), torch.empty_like(c), torch.empty_like(c)]
    sizes = (steps, batch, 0, hidden, int(reverse))
    _call("amp_lstm_backward", sizes, [w_hh, c, *gradients], results, workspace)
    return results


def _call(
    name: str, sizes: tuple[int, ...], inputs: Sequence[Tensor], outputs: Sequence[Tensor], workspace: Tensor
) -> None:
    steps, batch, _, hidden, _ = sizes
    shape = (ctypes.c_int64 * len(sizes))(*sizes)
    given, made = ((ctypes.c_void_p * len(some))(*[one.data_ptr() for one in some]) for some in (inputs, outputs))
    cells = workspace.data_ptr() + steps * batch * hidden * _GATES * 2
    threads = torch.get_num_threads()
    getattr(library(), name)(shape, given, made, ctypes.c_void_p(workspace.data_ptr()), ctypes.c_void_p(cells), threads)
