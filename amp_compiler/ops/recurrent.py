"""LSTM, GRU and plain recurrent layers on a CPU as operators whose backward is made of operators too.

ATen runs such a layer as some ten operators per step: a compiler takes minutes for a few hundred steps, and in 16 bits
each of them rounds the hidden state. Here one direction of one layer is one operator in BF16, a native loop over time
(`cpu/recurrent.cpp`); what is left of its backward are products over all steps at once, which a graph can show. Where
that does not run, all of a network is one operator that runs torch's own, in FP32 if it has 16 bits. So what goes from
step to step is never rounded, but for the products, and the results are rounded once.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from amp_compiler.errors import LoweringError
from amp_compiler.ops import recurrent_network
from amp_compiler.ops.cpu import update as cpu_update
from amp_compiler.ops.cpu.build import library

KINDS = recurrent_network.KINDS
_INPUTS = 7  # tensors that a layer reads: data, two weights, two biases, and the first states
_WEIGHTS = 5  # which of them come before the first states
_BLOCK = 32  # units that the loops compute together; widths must be multiples of it


def can_run(input: Tensor, hx: Tensor | Sequence[Tensor], params: Sequence[Tensor], *rest: Any) -> bool:
    """True where the operators take a network: on a CPU, all of it in one floating-point type.

    An LSTM with a projection is taken in 16 bits, in which ATen would round both states at each step.
    """
    states = [hx] if isinstance(hx, Tensor) else list(hx)
    fits = input.device.type == "cpu" and {one.dtype for one in (*states, *params)} == {input.dtype}
    return fits and input.dtype in (recurrent_network.LOW if _is_projected(states) else recurrent_network.FLOATS)


def runs_natively(data: Tensor) -> bool:
    """Whether the loops take a layer: BF16 on a CPU that multiplies it.

    Args:
        data: [steps, batch, features].
    """
    return data.dtype == torch.bfloat16 and data.device.type == "cpu" and cpu_update.most_inner() > 0


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
        if runs_natively(data) and not _is_projected(states):
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
        f" bool train, bool bidirectional, bool batch_first) -> ({_results})",
        tags=(torch.Tag.nondeterministic_seeded,),  # by dropout between layers
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
    if not runs_natively(data):
        raise LoweringError(
            f"the native loops take no recurrent layer in {data.dtype} on this machine",
            hint="call amp_compiler.lstm, gru, rnn_tanh or rnn_relu, which run torch's own there",
        )
    hidden = h.shape[-1]
    memory = _kept(data, hidden, kind)
    data, *weights = (one.contiguous() for one in (data, w_ih, w_hh, b_ih, b_hh))
    states = [one.contiguous() for one in (h, c) if one is not None]
    whole = [_filled(data), *(_filled(one, hidden) for one in weights), *map(_filled, states)]
    data, h = whole[0], whole[_WEIGHTS]
    out, last = data.new_empty(*data.shape[:2], h.shape[-1]), torch.empty_like(h)
    cell = h.new_empty(h.shape if kind == "lstm" else 0)
    sizes = (*data.shape, h.shape[-1], int(reverse))
    _call("amp_recurrent_forward", kind, sizes, whole, (out, last, cell), memory)
    if h.shape[-1] != hidden:
        out, last, cell = (one[..., :hidden].contiguous() for one in (out, last, cell))
    return out, last, cell, *memory


@recurrent_layer.register_fake
def _(
    data: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, h: Tensor, c: Tensor | None, kind: str,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    steps, batch, hidden = *data.shape[:2], h.shape[-1]
    out, last = data.new_empty(steps, batch, hidden), data.new_empty(h.shape)
    cell = data.new_empty(0) if c is None else data.new_empty(c.shape)
    return out, last, cell, *_kept(data, hidden, kind)


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
    hidden = w_hh.shape[1]
    tensors = [one.contiguous() for one in (first[-1], *gradients)]
    whole = [_filled(w_hh.contiguous(), hidden), *map(_filled, tensors)]
    steps, batch, units = whole[2].shape
    states = [torch.empty_like(whole[1]) for _ in first]
    sums = [w_hh.new_empty(steps, batch, len(whole[0])) for _ in range(1 + (kind == "gru"))]
    sizes, results = (steps, batch, 0, units, int(reverse)), (states[0], states[-1], sums[0], sums[-1])
    _call("amp_recurrent_backward", kind, sizes, whole, results, memory)
    if units == hidden:
        return [*states, *sums]
    by_gate = (one.unflatten(-1, (-1, units))[..., :hidden].flatten(-2) for one in sums)
    return [*(one[..., :hidden].contiguous() for one in states), *by_gate]


@recurrent_sums_backward.register_fake
def _(
    w_hh: Tensor, first: list[Tensor], memory: list[Tensor], gradients: list[Tensor], kind: str, reverse: bool
) -> list[Tensor]:
    sums = [w_hh.new_empty(*gradients[0].shape[:2], w_hh.shape[0]) for _ in range(1 + (kind == "gru"))]
    return [*(one.new_empty(one.shape) for one in first), *sums]


def _kept(data: Tensor, hidden: int, kind: str) -> tuple[Tensor, Tensor]:
    """Memory for what the forward leaves for the backward: gates [steps, 4, units, batch] and FP32 states.

    Args:
        data: [steps, batch, features].
        hidden: number of units; memory is for whole blocks of them.
        kind: `lstm` or `gru` (four BF16 values per unit and step), or `rnn_tanh` or `rnn_relu` (none).
    """
    steps, batch, units = *data.shape[:2], hidden + -hidden % _BLOCK
    gates = data.new_empty(steps, 4 if kind in ("lstm", "gru") else 0, units, batch)
    return gates, data.new_empty(steps, units, batch, dtype=torch.float32)


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
    memory: Sequence[Tensor],
) -> None:  # fmt: skip
    shape = (ctypes.c_int64 * len(sizes))(*sizes)
    read, written = ((ctypes.c_void_p * len(some))(*[one.data_ptr() for one in some]) for some in (inputs, outputs))
    gates, states = (ctypes.c_void_p(one.data_ptr()) for one in memory)
    number = ctypes.c_int64(KINDS.index(kind))
    getattr(library(), name)(number, shape, read, written, gates, states, torch.get_num_threads())


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
