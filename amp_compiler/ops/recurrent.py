"""LSTM, GRU and plain recurrent layers on a CPU as operators whose backward is made of operators too.

ATen runs such a layer as some ten operators per step: a compiler takes minutes for a few hundred steps, and in 16 bits
each of them rounds the hidden state. Here one direction of one layer is one operator in BF16, the native loop of
`ops.cpu.recurrent`. Where that does not run, all of a network is one operator that runs torch's own, in FP32 if it has
16 bits. So what goes from step to step is never rounded, but for the products, and the results are rounded once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from amp_compiler.errors import LoweringError
from amp_compiler.ops import recurrent_network
from amp_compiler.ops.cpu import recurrent as cpu_recurrent

KINDS = recurrent_network.KINDS
_INPUTS = 7  # tensors that a layer reads: data, two weights, two biases, and the first states
_WEIGHTS = 5  # which of them come before the first states


def can_run(input: Tensor, hx: Tensor | Sequence[Tensor], params: Sequence[Tensor], *rest: Any) -> bool:
    """True where the operators take a network: on a CPU, all of it in one floating-point type.

    An LSTM with a projection is taken in 16 bits, in which ATen would round both states at each step.
    """
    states = [hx] if isinstance(hx, Tensor) else list(hx)
    fits = input.device.type == "cpu" and {one.dtype for one in (*states, *params)} == {input.dtype}
    return fits and input.dtype in (recurrent_network.LOW if _is_projected(states) else recurrent_network.FLOATS)


def _is_projected(states: Sequence[Tensor]) -> bool:
    return states[0].size(2) != states[-1].size(2)


def recurrent(
    kind: str, data: Tensor, hx: Tensor | Sequence[Tensor], parameters: list[Tensor], *options: Any
) -> tuple[Tensor, ...]:
    """`aten.lstm.input`, `aten.gru.input` and their like, traced and differentiated as what they are made of.

    Args:
        kind: one of `KINDS`.
        data: [steps, batch, features], or [batch, steps, features] where the last of the options says so.
        hx: the first hidden state, [layers * directions, batch, hidden]; of an LSTM, a list of it and the cell state.
        parameters: per layer and direction: input weight, hidden weight and, with biases, two biases.
        options: the arguments behind them: has_biases, num_layers, dropout, train, bidirectional, batch_first.

    Returns:
        The output and the last states.
    """
    states = [hx] if isinstance(hx, Tensor) else list(hx)
    if not recurrent_network.takes(data, hx, parameters):
        if not can_run(data, hx, parameters):
            return getattr(torch.ops.aten, kind).input(data, hx, parameters, *options)  # type: ignore[no-any-return]
        if cpu_recurrent.can_run(data) and not _is_projected(states):
            return recurrent_network.network(kind, data, states, parameters, *options, layer=_native_layer)
    return recurrent_network.network(kind, data, states, parameters, *options)


def _native_layer(
    data: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], kind: str, has_biases: bool, layers: int,
    bidirectional: bool,
) -> list[Tensor]:  # fmt: skip
    """As `recurrent_network.recurrent_network`, of one layer: put together from single directions."""
    sides, each = [], 4 if has_biases else 2
    for direction in range(2 if bidirectional else 1):
        own = weights[direction * each : (direction + 1) * each]
        own = own if has_biases else [*own, *[torch.zeros_like(own[0][:, 0])] * 2]
        first = [one[direction : direction + 1].contiguous() for one in states] if bidirectional else states
        h, c = (*first, None)[:2]
        side = torch.ops.amp_compiler.recurrent_layer(data, *own, h, c, kind, direction == 1)
        sides.append(side[: 1 + len(states)])
    out, *ends = zip(*sides, strict=True)
    return [torch.cat(out, -1) if bidirectional else out[0], *map(torch.cat, ends)]


_LIBRARY = torch.library.Library("amp_compiler", "FRAGMENT")
for _kind in KINDS:
    _states, _results = ("Tensor[]", "Tensor, Tensor, Tensor") if _kind == "lstm" else ("Tensor", "Tensor, Tensor")
    _LIBRARY.define(
        f"{_kind}(Tensor input, {_states} hx, Tensor[] params, bool has_biases, int num_layers, float dropout,"
        f" bool train, bool bidirectional, bool batch_first) -> ({_results})"
    )
    _LIBRARY.impl(_kind, functools.partial(recurrent, _kind), "CompositeImplicitAutograd")


@torch.library.custom_op("amp_compiler::recurrent_layer", mutates_args=())
def recurrent_layer(
    data: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, h: Tensor, c: Tensor | None, kind: str,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """One direction of one BF16 layer: products, and what is carried, in FP32.

    Args:
        data: [steps, batch, features], contiguous.
        w_ih: [gates * hidden, features]; an LSTM has four gates, a GRU three, a plain layer one.
        w_hh: [gates * hidden, hidden].
        b_ih: [gates * hidden].
        b_hh: [gates * hidden].
        h: first hidden state, [1, batch, hidden].
        c: first cell state, as `h`, of an LSTM.
        kind: one of `KINDS`.
        reverse: run from the last step to the first.

    Returns:
        Output [steps, batch, hidden], last hidden state, last cell state (empty where there is none), and what the
        backward reads: gates and states.

    Raises:
        LoweringError: the native loops do not take it.
    """
    if not cpu_recurrent.can_run(data):
        raise LoweringError(
            f"the native loops take no recurrent layer in {data.dtype} on this machine",
            hint="call amp_compiler.lstm, gru, rnn_tanh or rnn_relu, which run torch's own there",
        )
    inputs = [one.contiguous() for one in (data, w_ih, w_hh, b_ih, b_hh, h, c) if one is not None]
    return cpu_recurrent.forward(inputs, kind, reverse)


@recurrent_layer.register_fake
def _(
    data: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, h: Tensor, c: Tensor | None, kind: str,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    steps, batch, hidden = *data.shape[:2], h.shape[-1]
    out, last = data.new_empty(steps, batch, hidden), data.new_empty(h.shape)
    cell = data.new_empty(0) if c is None else data.new_empty(c.shape)
    return out, last, cell, *cpu_recurrent.kept(data, hidden, kind)


@torch.library.custom_op("amp_compiler::recurrent_sums_backward", mutates_args=())
def recurrent_sums_backward(
    w_hh: Tensor, first: list[Tensor], memory: list[Tensor], gradients: list[Tensor], kind: str, reverse: bool
) -> list[Tensor]:
    """The backward of `recurrent_layer` through time.

    Args:
        w_hh: as there.
        first: its first states.
        memory: gates and states that it gave.
        gradients: of its first three results.
        kind: as there.
        reverse: as there.

    Returns:
        Gradients of the first states, and of the sums in the gates, [steps, batch, gates * hidden]: what is added to
        them of the data and, of a GRU, what is added to them of the state; else that is the same.
    """
    w_hh, *tensors = (one.contiguous() for one in (w_hh, *first, *gradients))
    states, seeds = tensors[: len(first)], tensors[len(first) :]
    return cpu_recurrent.sums_backward(w_hh, states, seeds, (memory[0], memory[1]), kind, reverse)


@recurrent_sums_backward.register_fake
def _(
    w_hh: Tensor, first: list[Tensor], memory: list[Tensor], gradients: list[Tensor], kind: str, reverse: bool
) -> list[Tensor]:
    sums = [w_hh.new_empty(*gradients[0].shape[:2], w_hh.shape[0]) for _ in range(1 + (kind == "gru"))]
    return [*(one.new_empty(one.shape) for one in first), *sums]


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.kind, ctx.reverse = inputs[_INPUTS:]
    ctx.save_for_backward(*inputs[:_INPUTS], *output)


def _backward(ctx: Any, *gradients: Tensor | None) -> Any:
    inputs, results = list(ctx.saved_tensors[:_INPUTS]), ctx.saved_tensors[_INPUTS:]
    seeds = [
        torch.zeros_like(result) if gradient is None else gradient
        for gradient, result in zip(gradients[:3], results[:3], strict=True)
    ]
    wanted = list(ctx.needs_input_grad[:_INPUTS])
    if inputs[-1] is None:
        del inputs[-1], wanted[-1]
    kind, reverse, missing = ctx.kind, ctx.reverse, [None] * (_INPUTS - len(inputs) + 2)
    if torch.is_grad_enabled():  # this backward is to be differentiated itself
        return *_differentiable(kind, inputs, seeds, reverse), *missing
    first, out = inputs[_WEIGHTS:], results[0]
    gradients_of_sums = torch.ops.amp_compiler.recurrent_sums_backward(
        inputs[2], first, list(results[3:]), seeds, kind, reverse
    )
    states, sums = gradients_of_sums[: len(first)], [one.flatten(0, 1) for one in gradients_of_sums[len(first) :]]
    of_data, of_state = sums[0], sums[-1]
    before = torch.cat([out[1:], first[0]]) if reverse else torch.cat([first[0], out[:-1]])
    d_b_ih = of_data.sum(0)
    d_b_hh = of_state.sum(0) if len(sums) > 1 else d_b_ih  # Inductor (torch 2.13) cannot fuse the same sum twice
    d_data = (of_data @ inputs[1]).view(inputs[0].shape) if wanted[0] else None
    d_w_ih, d_w_hh = of_data.t() @ inputs[0].flatten(0, 1), of_state.t() @ before.flatten(0, 1)
    return d_data, d_w_ih, d_w_hh, d_b_ih, d_b_hh, *states, *missing


def _differentiable(
    kind: str, inputs: Sequence[Tensor], gradients: Sequence[Tensor], reverse: bool
) -> list[Tensor | None]:
    """Gradients of one layer by autograd through torch's, in FP32, which can be differentiated again."""
    data, states = inputs[0].flip(0) if reverse else inputs[0], inputs[_WEIGHTS:]
    seeds = [gradients[0].flip(0) if reverse else gradients[0], *gradients[1 : 1 + len(states)]]
    d_data, *rest = recurrent_network.differentiable(data, states, inputs[1:_WEIGHTS], seeds, (kind, True, 1, False))
    d_data = d_data.flip(0) if reverse and d_data is not None else d_data
    return [d_data, *rest[len(states) :], *rest[: len(states)]]


recurrent_layer.register_autograd(_backward, setup_context=_save)
