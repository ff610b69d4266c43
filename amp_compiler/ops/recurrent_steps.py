"""One direction of a recurrent layer as torch calls, step by step: where no native loops take it.

What does not depend on other steps is computed for all steps at once, and every view that a step needs is made before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def forward(inputs: Sequence[Tensor], kind: str, reverse: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `recurrent_layer`; it leaves gates [steps, batch, 4 * hidden] and, of an LSTM, cells [steps, batch, hidden].

    Args:
        inputs: its tensors; all are of one type, in which everything is computed.
        kind: as there.
        reverse: as there.
    """
    data, w_ih, w_hh, b_ih, b_hh, h, *first_cell = inputs
    steps, batch, _ = data.shape
    hidden = h.shape[-1]
    sums = torch.addmm(b_ih, data.flatten(0, 1), w_ih.t()).view(steps, batch, w_ih.shape[0])
    out, cells, last_cell = data.new_empty(steps, batch, hidden), data.new_empty(0), data.new_empty(0)
    gates = data.new_empty(steps, batch, 4 * hidden if kind == "gru" else 0)
    weight, state, made = w_hh.t(), h[0], out.unbind()
    if kind == "gru":
        data_gates, data_new = (part.unbind() for part in sums.split([2 * hidden, hidden], -1))
        resets, updates, news, kept = (part.unbind() for part in gates.split(hidden, -1))
        both = gates[..., : 2 * hidden].unbind()
        for step in _times(steps, reverse):
            sum_gates, sum_new = torch.addmm(b_hh, state, weight).split([2 * hidden, hidden], -1)
            torch.add(data_gates[step], sum_gates, out=both[step]).sigmoid_()
            kept[step].copy_(sum_new)
            torch.addcmul(data_new[step], resets[step], sum_new, out=news[step]).tanh_()
            state = torch.lerp(news[step], state, updates[step], out=made[step])
    elif kind == "lstm":
        gates, cells, cell = sums.add_(b_hh), torch.empty_like(out), first_cell[0][0]
        each, memory = sums.unbind(), cells.unbind()
        for step in _times(steps, reverse):
            enter, forget, new, give = each[step].addmm_(state, weight).split(hidden, -1)
            for gate in (enter, forget, give):
                gate.sigmoid_()
            cell = torch.mul(forget, cell, out=memory[step]).addcmul_(enter, new.tanh_())
            state = torch.mul(give, cell.tanh(), out=made[step])
        last_cell = cell.clone().view(h.shape)
    else:
        run = torch.tanh if kind == "rnn_tanh" else torch.relu
        each = sums.add_(b_hh).unbind()
        for step in _times(steps, reverse):
            state = made[step].copy_(run(torch.addmm(each[step], state, weight)))
    return out, state.clone().view(h.shape), last_cell, gates, cells


def sums_backward(
    w_hh: Tensor, first: Sequence[Tensor], out: Tensor, memory: tuple[Tensor, Tensor], gradients: Sequence[Tensor],
    kind: str, reverse: bool,
) -> list[Tensor]:  # fmt: skip
    """As `recurrent_sums_backward`.

    Args:
        w_hh: as there.
        first: the first states, [1, batch, hidden] each.
        out: output of the forward.
        memory: gates and cells that the forward left.
        gradients: of the output and of the last states.
        kind: as in the forward.
        reverse: as in the forward.
    """
    carried, made = gradients[1][0], out.new_empty(*out.shape[:2], w_hh.shape[0])
    steps, hidden = out.shape[0], out.shape[-1]
    d_out, of_sums, back = gradients[0].unbind(), made.unbind(), _times(steps, not reverse)
    parts = [part.unbind() for part in made.split(hidden, -1)]
    if kind in ("rnn_tanh", "rnn_relu"):
        slopes = (1 - out * out if kind == "rnn_tanh" else (out > 0).to(out.dtype)).unbind()
        for step in back:
            carried = torch.mul(d_out[step] + carried, slopes[step], out=of_sums[step]) @ w_hh
        return [carried.view(first[0].shape), made]
    held = out if kind == "gru" else memory[1]
    before = torch.cat([held[1:], first[-1]]) if reverse else torch.cat([first[-1], held[:-1]])
    if kind == "lstm":
        enter, forget, new, give = memory[0].split(hidden, -1)
        bent = held.tanh()
        slopes = (
            new * enter * (1 - enter), before * forget * (1 - forget), enter * (1 - new * new),
            bent * give * (1 - give), give * (1 - bent * bent), forget,
        )  # fmt: skip
        *to_gates, to_give, to_cell, kept = (one.unbind() for one in slopes)
        cell = gradients[2][0]
        for step in back:
            carried = carried + d_out[step]
            cell = torch.addcmul(cell, carried, to_cell[step])
            for part, slope in zip(parts, to_gates, strict=False):
                torch.mul(cell, slope[step], out=part[step])
            torch.mul(carried, to_give[step], out=parts[3][step])
            carried, cell = of_sums[step] @ w_hh, cell * kept[step]
        return [carried.view(first[0].shape), cell.view(first[0].shape), made]
    r, z, n, kept_sum = memory[0].split(hidden, -1)
    slopes = ((1 - z) * (1 - n * n), (before - n) * z * (1 - z), kept_sum * r * (1 - r), r, z)
    to_new, to_update, to_reset, resets, updates = (one.unbind() for one in slopes)
    given = torch.empty_like(made)
    new = given[..., 2 * hidden :].unbind()
    reset, update, kept_new = parts
    for step in back:
        whole = d_out[step] + carried
        torch.mul(whole, to_new[step], out=new[step])
        torch.mul(new[step], to_reset[step], out=reset[step])
        torch.mul(whole, to_update[step], out=update[step])
        torch.mul(new[step], resets[step], out=kept_new[step])
        carried = torch.addmm(whole.mul_(updates[step]), of_sums[step], w_hh)
    given[..., : 2 * hidden] = made[..., : 2 * hidden]
    return [carried.reshape(first[0].shape).contiguous(), given, made]


def _times(steps: int, reverse: bool) -> range:
    """The numbers of the steps in the order in which a direction takes them."""
    return range(steps - 1, -1, -1) if reverse else range(steps)
