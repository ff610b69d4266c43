"""GRU and plain recurrent layers on a CPU as operators whose backward is made of operators too.

ATen runs such a layer as some ten operators per step: a compiler takes minutes for a few hundred steps, and in 16 bits
each of them rounds the hidden state. Here one direction of one layer is one operator. In BF16 it is the native loop of
`ops.cpu.recurrent`; where that does not run, 16-bit layers are computed in FP32 and keep 16 bits for the backward. So
the state is never rounded on its way from step to step, but for the products, and the results are rounded once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from amp_compiler.ops import recurrent_network, recurrent_steps
from amp_compiler.ops.cpu import recurrent as cpu_recurrent

KINDS = ("gru", "rnn_tanh", "rnn_relu")
_LOW = (torch.bfloat16, torch.float16)
_FLOATS = (torch.float32, torch.float64, *_LOW)
_INPUTS = 6  # tensors that a layer reads
_WEIGHTS = 5  # which of them come before the first states

Side = Callable[[Tensor, list[Tensor], list[Tensor], bool], tuple[Tensor, ...]]


def stacked(
    run: Side,
    data: Tensor,
    hidden: Sequence[Tensor],
    parameters: list[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """A recurrent network as `aten.gru.input` and `aten.lstm.input` put it together from single directions of layers.

    Args:
        run: one direction of one layer: from the data [steps, batch, features], the two weights and two biases, the
            first states, [1, batch, hidden] each, and whether it runs from the last step to the first, the output
            [steps, batch, hidden] and the last states.
        data: [steps, batch, features], or [batch, steps, features] with `batch_first`.
        hidden: the first states, [layers * directions, batch, hidden] each.
        parameters: per layer and direction: input weight, hidden weight and, with biases, two biases.
        has_biases: whether there are biases.
        layers: number of layers.
        dropout: probability of dropping an element between layers.
        train: whether to drop.
        bidirectional: whether each layer also runs backwards.
        batch_first: layout of `data` and of the output.

    Returns:
        The output and the last states.
    """
    directions = 2 if bidirectional else 1
    each = 4 if has_biases else 2
    out = data.transpose(0, 1) if batch_first else data
    last: list[list[Tensor]] = [[] for _ in hidden]
    for layer in range(layers):
        sides = []
        for direction in range(directions):
            index = layer * directions + direction
            weights = parameters[index * each : (index + 1) * each]
            if not has_biases:
                weights = [*weights, *[torch.zeros_like(weights[0][:, 0])] * 2]
            first = [states[index : index + 1].contiguous() for states in hidden]
            side, *states = run(out.contiguous(), weights, first, direction == 1)
            sides.append(side)
            for kept, state, like in zip(last, states, first, strict=True):
                kept.append(state.reshape(like.shape))
        out = torch.cat(sides, -1) if bidirectional else sides[0]
        if train and dropout and layer < layers - 1:
            out = torch.dropout(out, dropout, True)
    return out.transpose(0, 1) if batch_first else out, *[torch.cat(states) for states in last]


def can_run(input: Tensor, hx: Tensor, params: Sequence[Tensor], *rest: Any) -> bool:
    """True where the operators take a layer: on a CPU, all of it in one floating-point type."""
    return (
        input.device.type == "cpu" and input.dtype in _FLOATS and {one.dtype for one in (hx, *params)} == {input.dtype}
    )


def recurrent(
    kind: str, data: Tensor, hidden: Tensor, parameters: list[Tensor], *options: Any
) -> tuple[Tensor, Tensor]:
    """`aten.gru.input`, `aten.rnn_tanh.input` or `aten.rnn_relu.input`, traced and differentiated as its layers.

    Args:
        kind: one of `KINDS`.
        data: as for `stacked`.
        hidden: the first hidden state.
        parameters: as for `stacked`.
        options: the arguments behind them.

    Returns:
        The output and the last hidden state.
    """
    if recurrent_network.takes(kind, data, hidden, parameters, *options):
        return recurrent_network.network(kind, data, [hidden], parameters, *options)  # type: ignore[return-value]
    if not can_run(data, hidden, parameters):
        return getattr(torch.ops.aten, kind).input(data, hidden, parameters, *options)  # type: ignore[no-any-return]
    return stacked(functools.partial(_side, kind), data, [hidden], parameters, *options)  # type: ignore[return-value]


def _side(kind: str, data: Tensor, weights: list[Tensor], first: list[Tensor], reverse: bool) -> tuple[Tensor, ...]:
    """One direction of one layer; for the native loops filled up with zeros, which stay zeros, to whole blocks."""
    units = weights[1].shape[1]
    features = -weights[0].shape[1] % cpu_recurrent.BLOCK
    more = -units % cpu_recurrent.BLOCK
    h = first[0]
    if cpu_recurrent.can_run(data) and (features or more):
        data, h = _padded(data, features), _padded(h, more)
        gates = weights[0].shape[0] // units
        parts = [one.unflatten(0, (gates, units)) for one in weights]
        parts = [
            _padded(parts[0], features, more),
            _padded(parts[1], more, more),
            *[_padded(b, more) for b in parts[2:]],
        ]
        weights = [one.flatten(0, 1) for one in parts]
    out, last, *_ = torch.ops.amp_compiler.recurrent_layer(data, *weights, h, kind, reverse)
    return (out[..., :units], last[..., :units]) if more else (out, last)


def _padded(tensor: Tensor, last: int, before: int = 0) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, last, 0, before))


_LIBRARY = torch.library.Library("amp_compiler", "FRAGMENT")
for _kind in KINDS:
    _LIBRARY.define(
        f"{_kind}(Tensor input, Tensor hx, Tensor[] params, bool has_biases, int num_layers, float dropout, bool train,"
        " bool bidirectional, bool batch_first) -> (Tensor, Tensor)"
    )
    _LIBRARY.impl(_kind, functools.partial(recurrent, _kind), "CompositeImplicitAutograd")


@torch.library.custom_op("amp_compiler::recurrent_layer", mutates_args=())
def recurrent_layer(
    data: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, h: Tensor, kind: str, reverse: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One direction of one layer: its products and its state in FP32 where the tensors are 16-bit, else in their type.

    Args:
        data: [steps, batch, features], contiguous; where `ops.cpu.recurrent` runs it features and units are multiples
            of 32.
        w_ih: [gates * hidden, features]; a GRU has three gates, a plain layer one.
        w_hh: [gates * hidden, hidden].
        b_ih: [gates * hidden].
        b_hh: [gates * hidden].
        h: first hidden state, [1, batch, hidden].
        kind: one of `KINDS`.
        reverse: run from the last step to the first.

    Returns:
        Output [steps, batch, hidden], last hidden state, and what the backward reads: gates and states.
    """
    inputs = [one.contiguous() for one in (data, w_ih, w_hh, b_ih, b_hh, h)]
    if cpu_recurrent.can_run(data):
        return cpu_recurrent.forward(inputs, kind, reverse)
    low, wide = data.dtype, _wide(data)
    out, last, gates, states = recurrent_steps.forward([one.to(wide) for one in inputs], kind, reverse)
    return out.to(low), last.to(low), gates.to(low), states.to(low)


def _wide(data: Tensor) -> torch.dtype:
    """The type in which the steps compute what is not for the native loops."""
    return torch.float32 if data.dtype in _LOW else data.dtype


@recurrent_layer.register_fake
def _(
    data: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, h: Tensor, kind: str, reverse: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    steps, batch, hidden = *data.shape[:2], h.shape[-1]
    if cpu_recurrent.can_run(data):
        gates, states = cpu_recurrent.kept(data, hidden, kind)
    else:
        gates, states = data.new_empty(steps, batch, 4 * hidden if kind == "gru" else 0), data.new_empty(0)
    return data.new_empty(steps, batch, hidden), data.new_empty(h.shape), gates, states


@torch.library.custom_op("amp_compiler::recurrent_sums_backward", mutates_args=())
def recurrent_sums_backward(
    w_hh: Tensor, h: Tensor, results: list[Tensor], gradients: list[Tensor], kind: str, reverse: bool
) -> list[Tensor]:
    """The backward of `recurrent_layer` through time.

    Args:
        w_hh: as there.
        h: as there.
        results: its four results.
        gradients: of the first two of them.
        kind: as there.
        reverse: as there.

    Returns:
        Gradients of the first state, and of the sums in the gates, [steps, batch, gates * hidden]: what is added to
        them of the data and, of a GRU, what is added to them of the state; else that is the same. They are FP32 where
        16-bit tensors are not for the native loops.
    """
    given = [gradient.contiguous() for gradient in gradients]
    out, _, gates, states = results
    if cpu_recurrent.can_run(out):
        return cpu_recurrent.sums_backward(w_hh.contiguous(), h.contiguous(), given, (gates, states), kind, reverse)
    wide = _wide(out)
    w_hh, h, out, gates, *given = (one.to(wide) for one in (w_hh, h, out, gates, *given))
    return recurrent_steps.sums_backward(w_hh, h, out, gates, given, kind, reverse)


@recurrent_sums_backward.register_fake
def _(
    w_hh: Tensor, h: Tensor, results: list[Tensor], gradients: list[Tensor], kind: str, reverse: bool
) -> list[Tensor]:
    dtype = h.dtype if cpu_recurrent.can_run(results[0]) else _wide(h)
    sums = [h.new_empty(*results[0].shape[:2], w_hh.shape[0], dtype=dtype) for _ in range(1 + (kind == "gru"))]
    return [h.new_empty(h.shape, dtype=dtype), *sums]


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.kind, ctx.reverse = inputs[_INPUTS:]
    ctx.save_for_backward(*inputs[:_INPUTS], *output)


def _backward(ctx: Any, *gradients: Tensor | None) -> Any:
    inputs, results = ctx.saved_tensors[:_INPUTS], ctx.saved_tensors[_INPUTS:]
    given = [
        torch.zeros_like(result) if gradient is None else gradient
        for gradient, result in zip(gradients[:2], results[:2], strict=True)
    ]
    wanted = ctx.needs_input_grad[:_INPUTS]
    if torch.is_grad_enabled():  # this backward is to be differentiated itself
        run = getattr(torch.ops.aten, ctx.kind).input
        return *through_aten(run, inputs, given, wanted, ctx.reverse), None, None
    low, h, out = inputs[0].dtype, inputs[-1], results[0]
    d_h, *sums = torch.ops.amp_compiler.recurrent_sums_backward(
        inputs[2], h, list(results), given, ctx.kind, ctx.reverse
    )
    of_data, of_state = sums[0].flatten(0, 1), sums[-1].flatten(0, 1)
    before = torch.cat([out[1:], h]) if ctx.reverse else torch.cat([h, out[:-1]])
    data, w_ih, before = (one.to(d_h.dtype) for one in (inputs[0], inputs[1], before))
    d_b_ih = of_data.sum(0)
    d_b_hh = of_state.sum(0) if len(sums) > 1 else d_b_ih  # Inductor (torch 2.13) cannot fuse the same sum twice
    d_data = (of_data @ w_ih).view(data.shape) if wanted[0] else None
    d_w_ih, d_w_hh = of_data.t() @ data.flatten(0, 1), of_state.t() @ before.flatten(0, 1)
    made = (d_data, d_w_ih, d_w_hh, d_b_ih, d_b_hh, d_h)
    return *(None if one is None else one.to(low) for one in made), None, None


def through_aten(
    run: Any, inputs: Sequence[Tensor], gradients: Sequence[Tensor], wanted: Sequence[bool], reverse: bool
) -> list[Tensor | None]:
    """Gradients of one direction of one layer by autograd through ATen's layer, which can be differentiated again.

    Args:
        run: `aten.gru.input` or its like; it computes in FP32, in FP64 where the layer does.
        inputs: data [steps, batch, features], two weights, two biases and the first states, [1, batch, hidden] each.
        gradients: of the output and of the last states.
        wanted: which inputs are to have gradients.
        reverse: whether the direction runs from the last step to the first.
    """
    wide = torch.float64 if inputs[0].dtype == torch.float64 else torch.float32
    tensors = [one.view_as(one) for one in inputs]  # one may stand there twice
    data, *weights = (one.to(wide) for one in tensors[:_WEIGHTS])
    states = [one.to(wide) for one in tensors[_WEIGHTS:]]
    hidden = states if len(states) > 1 else states[0]
    out, *last = run(data.flip(0) if reverse else data, hidden, weights, True, 1, 0.0, True, False, False)
    results = [one.to(inputs[0].dtype) for one in (out.flip(0) if reverse else out, *last)]
    found = iter(
        torch.autograd.grad(
            results, [one for one, asked in zip(tensors, wanted, strict=True) if asked], gradients, create_graph=True
        )
    )
    return [next(found) if asked else None for asked in wanted]


recurrent_layer.register_autograd(_backward, setup_context=_save)
