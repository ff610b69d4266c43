"""One direction of a GRU or plain recurrent layer as torch calls, step by step: where no native loops take it.

What does not depend on other steps is computed for all steps at once, and every view that a step needs is made before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def forward(inputs: Sequence[Tensor], kind: str, reverse: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `recurrent_layer`; the gates that it leaves are [steps, batch, 4 * hidden], and it leaves no states.

    Args:
        inputs: its six tensors; all are of one type, in which everything is computed.
        kind: as there.
        reverse: as there.
    """
    data, w_ih, w_hh, b_ih, b_hh, h = inputs
    steps, batch, _ = data.shape
    hidden = h.shape[-1]
    given = torch.addmm(b_ih, data.flatten(0, 1), w_ih.t()).view(steps, batch, w_ih.shape[0])
    out = data.new_empty(steps, batch, hidden)
    gates = data.new_empty(steps, batch, 4 * hidden if kind == "gru" else 0)
    weight, state, made = w_hh.t(), h[0], out.unbind()
    if kind == "gru":
        data_gates, data_new = (part.unbind() for part in given.split([2 * hidden, hidden], -1))
        resets, updates, news, kept = (part.unbind() for part in gates.split(hidden, -1))
        both = gates[..., : 2 * hidden].unbind()
        for step in times(steps, reverse):
            sum_gates, sum_new = torch.addmm(b_hh, state, weight).split([2 * hidden, hidden], -1)
            torch.add(data_gates[step], sum_gates, out=both[step]).sigmoid_()
            kept[step].copy_(sum_new)
            torch.addcmul(data_new[step], resets[step], sum_new, out=news[step]).tanh_()
            state = torch.lerp(news[step], state, updates[step], out=made[step])
    else:
        run = torch.tanh if kind == "rnn_tanh" else torch.relu
        sums = given.add_(b_hh).unbind()
        for step in times(steps, reverse):
            state = made[step].copy_(run(torch.addmm(sums[step], state, weight)))
    return out, state.clone().view(h.shape), gates, data.new_empty(0)


def sums_backward(
    w_hh: Tensor, h: Tensor, out: Tensor, gates: Tensor, gradients: Sequence[Tensor], kind: str, reverse: bool
) -> list[Tensor]:
    """As `recurrent_sums_backward`.

    Args:
        w_hh: as there.
        h: first state, [1, batch, hidden].
        out: output of the forward.
        gates: what the forward left.
        gradients: of the output and of the last state.
        kind: as in the forward.
        reverse: as in the forward.
    """
    d_out, carried = gradients[0].unbind(), gradients[1][0]
    steps, hidden = out.shape[0], out.shape[-1]
    made = out.new_empty(*out.shape[:2], w_hh.shape[0])
    of_state = made.unbind()
    if kind != "gru":
        slopes = (1 - out * out if kind == "rnn_tanh" else (out > 0).to(out.dtype)).unbind()
        for step in times(steps, not reverse):
            carried = torch.mul(d_out[step] + carried, slopes[step], out=of_state[step]) @ w_hh
        return [carried.view(h.shape), made]
    r, z, n, kept = gates.split(hidden, -1)
    before = torch.cat([out[1:], h]) if reverse else torch.cat([h, out[:-1]])
    slopes = ((1 - z) * (1 - n * n), (before - n) * z * (1 - z), kept * r * (1 - r), r, z)
    to_new, to_update, to_reset, resets, updates = (one.unbind() for one in slopes)
    given = torch.empty_like(made)
    new = given[..., 2 * hidden :].unbind()
    reset, update, kept_new = (part.unbind() for part in made.split(hidden, -1))
    for step in times(steps, not reverse):
        whole = d_out[step] + carried
        torch.mul(whole, to_new[step], out=new[step])
        torch.mul(new[step], to_reset[step], out=reset[step])
        torch.mul(whole, to_update[step], out=update[step])
        torch.mul(new[step], resets[step], out=kept_new[step])
        carried = torch.addmm(whole.mul_(updates[step]), of_state[step], w_hh)
    given[..., : 2 * hidden] = made[..., : 2 * hidden]
    return [carried.reshape(h.shape).contiguous(), given, made]


def times(steps: int, reverse: bool) -> range:
    """The numbers of the steps in the order in which a direction takes them."""
    return range(steps - 1, -1, -1) if reverse else range(steps)
