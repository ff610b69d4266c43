"""One direction of an LSTM layer in 16 bits as torch calls, step by step: where no native loops take it.

Products and states are FP32; what the backward reads is kept as the native loops keep it: 16-bit gates, FP32 cells.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from amp_compiler.ops.recurrent_steps import times

_GATES = 4


def workspace_size(steps: int, batch: int, hidden: int) -> int:
    """Bytes that the forward leaves for the backward: four 16-bit gates and an FP32 cell state per unit."""
    return steps * batch * hidden * (_GATES * 2 + 4)


def forward(inputs: Sequence[Tensor], reverse: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `lstm_layer`.

    Args:
        inputs: its seven tensors, contiguous and of one 16-bit type.
        reverse: as there.
    """
    low = inputs[0].dtype
    data, w_ih, w_hh, b_ih, b_hh, h, c = (one.float() for one in inputs)
    steps, batch, _ = data.shape
    hidden = h.shape[-1]
    sums = torch.addmm(b_ih + b_hh, data.flatten(0, 1), w_ih.t()).view(steps, batch, _GATES * hidden)
    workspace = torch.empty(workspace_size(steps, batch, hidden), dtype=torch.uint8)
    gates, cells = _kept(workspace, low, steps, batch, hidden)
    out = torch.empty_like(cells)
    weight, state, cell = w_hh.t(), h[0], c[0]
    each, made, memory = sums.unbind(), out.unbind(), cells.unbind()
    for step in times(steps, reverse):
        enter, forget, new, give = each[step].addmm_(state, weight).split(hidden, -1)
        for gate in (enter, forget, give):
            gate.sigmoid_()
        cell = torch.mul(forget, cell, out=memory[step]).addcmul_(enter, new.tanh_())
        state = torch.mul(give, cell.tanh(), out=made[step])
    gates.copy_(sums)
    return out.to(low), state.to(low).view(h.shape), cell.to(low).view(c.shape), workspace


def gates_backward(
    w_hh: Tensor, c: Tensor, gradients: Sequence[Tensor], workspace: Tensor, reverse: bool
) -> list[Tensor]:
    """Gradients of the sums that go into the gates, FP32, of the first hidden state and of the first cell state.

    Args:
        w_hh: [4 * hidden, hidden].
        c: first cell state, [1, batch, hidden].
        gradients: of the output [steps, batch, hidden], of the last hidden state and of the last cell state.
        workspace: what the forward left.
        reverse: as in the forward.
    """
    d_out, d_state, d_cell = (one.float() for one in gradients)
    steps, batch, hidden = d_out.shape
    gates, cells = _kept(workspace, w_hh.dtype, steps, batch, hidden)
    enter, forget, new, give = gates.float().split(hidden, -1)
    before = torch.cat([cells[1:], c.float()]) if reverse else torch.cat([c.float(), cells[:-1]])
    bent = cells.tanh()
    slopes = (
        new * enter * (1 - enter), before * forget * (1 - forget), enter * (1 - new * new), bent * give * (1 - give),
        give * (1 - bent * bent), forget,
    )  # fmt: skip
    to_enter, to_forget, to_new, to_give, to_cell, kept = (one.unbind() for one in slopes)
    made = torch.empty_like(gates, dtype=torch.float32)
    of_enter, of_forget, of_new, of_give = (part.unbind() for part in made.split(hidden, -1))
    given, whole, weight = d_out.unbind(), made.unbind(), w_hh.float()
    state, cell = d_state[0], d_cell[0]
    for step in times(steps, not reverse):
        state = state + given[step]
        cell = torch.addcmul(cell, state, to_cell[step])
        torch.mul(cell, to_enter[step], out=of_enter[step])
        torch.mul(cell, to_forget[step], out=of_forget[step])
        torch.mul(cell, to_new[step], out=of_new[step])
        torch.mul(state, to_give[step], out=of_give[step])
        state, cell = whole[step] @ weight, cell * kept[step]
    return [made, state.view(c.shape), cell.view(c.shape)]


def _kept(workspace: Tensor, low: torch.dtype, steps: int, batch: int, hidden: int) -> tuple[Tensor, Tensor]:
    """Gates [steps, batch, 4 * hidden] and cells [steps, batch, hidden] in the memory that goes to the backward."""
    size = steps * batch * hidden
    cells, gates = workspace.split([4 * size, 2 * _GATES * size])
    return gates.view(low).view(steps, batch, _GATES * hidden), cells.view(torch.float32).view(steps, batch, hidden)
