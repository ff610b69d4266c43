"""One direction of a GRU or plain recurrent layer as torch calls, step by step: where no native loops take it."""

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
    given = torch.addmm(b_ih, data.flatten(0, 1), w_ih.t()).view(steps, batch, -1)
    out = data.new_empty(steps, batch, hidden)
    gates = data.new_empty(steps, batch, 4 * hidden if kind == "gru" else 0)
    weight, state = w_hh.t(), h[0]
    for step in _times(steps, reverse):
        sums = torch.addmm(b_hh, state, weight)
        if kind == "gru":
            state = _gru(given[step], sums, state, gates[step], out[step])
        else:
            sums += given[step]
            state = torch.tanh(sums, out=out[step]) if kind == "rnn_tanh" else torch.clamp_min(sums, 0, out=out[step])
    return out, state.clone().view(h.shape), gates, data.new_empty(0)


def _gru(given: Tensor, sums: Tensor, state: Tensor, gates: Tensor, out: Tensor) -> Tensor:
    """One step: fills `gates` with r, z, n and what the state gave to n, and `out` with the next state."""
    hidden = state.shape[-1]
    both, new, kept = gates[:, : 2 * hidden], gates[:, 2 * hidden : 3 * hidden], gates[:, 3 * hidden :]
    torch.add(given[:, : 2 * hidden], sums[:, : 2 * hidden], out=both).sigmoid_()
    kept.copy_(sums[:, 2 * hidden :])
    torch.addcmul(given[:, 2 * hidden :], both[:, :hidden], kept, out=new).tanh_()
    return torch.lerp(new, state, both[:, hidden:], out=out)


def sums_backward(
    w_hh: Tensor, h: Tensor, out: Tensor, gates: Tensor, gradients: Sequence[Tensor], kind: str, reverse: bool
) -> list[Tensor]:
    """As `recurrent_sums_backward`; what does not depend on later steps is computed for all steps at once.

    Args:
        w_hh: as there.
        h: first state, [1, batch, hidden].
        out: output of the forward.
        gates: what the forward left.
        gradients: of the output and of the last state.
        kind: as in the forward.
        reverse: as in the forward.
    """
    d_out, carried = gradients[0], gradients[1][0]
    steps, hidden = out.shape[0], out.shape[-1]
    made = out.new_empty(*out.shape[:2], w_hh.shape[0])
    if kind != "gru":
        slope = 1 - out * out if kind == "rnn_tanh" else (out > 0).to(out.dtype)
        for step in _times(steps, not reverse):
            carried = torch.mul(d_out[step] + carried, slope[step], out=made[step]) @ w_hh
        return [carried.view(h.shape), made]
    r, z, n, kept = gates.split(hidden, -1)
    before = torch.cat([out[1:], h]) if reverse else torch.cat([h, out[:-1]])
    to_new, to_update, to_reset = (1 - z) * (1 - n * n), (before - n) * z * (1 - z), kept * r * (1 - r)
    given = torch.empty_like(made)
    for step in _times(steps, not reverse):
        whole, data, state = d_out[step] + carried, given[step], made[step]
        new = torch.mul(whole, to_new[step], out=data[:, 2 * hidden :])
        torch.mul(new, to_reset[step], out=state[:, :hidden])
        torch.mul(whole, to_update[step], out=state[:, hidden : 2 * hidden])
        torch.mul(new, r[step], out=state[:, 2 * hidden :])
        carried = torch.addmm(whole * z[step], state, w_hh)
    given[..., : 2 * hidden] = made[..., : 2 * hidden]
    return [carried.reshape(h.shape).contiguous(), given, made]


def _times(steps: int, reverse: bool) -> range:
    return range(steps - 1, -1, -1) if reverse else range(steps)
