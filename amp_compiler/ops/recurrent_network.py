"""Recurrent networks on a GPU: all layers, directions and steps are one operator forward, and one backward.

Torch's compiler opens them into some ten operators per step and layer: minutes of compiling, and a launch each. Here
they are cuDNN's, as in eager torch. In 16 bits cuDNN sums in FP32 and rounds what goes from step to step, as under
torch.autocast; where it does not know the type, the network runs in FP32. Dropout between layers is torch's own, so
that its seed and its state count in a replayed graph too; there each layer is an operator.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from amp_compiler.errors import LoweringError
from amp_compiler.ops.cuda import cudnn_rnn
from amp_compiler.ops.cuda.cudnn_rnn import Form, Layout

logger = logging.getLogger("amp_compiler")

_LOW = (torch.bfloat16, torch.float16)
_FLOATS = (*_LOW, torch.float32, torch.float64)


def takes(kind: str, input: Tensor, hx: Tensor | Sequence[Tensor], params: Sequence[Tensor], *rest: Any) -> bool:
    """Whether cuDNN runs a network, in its own type or in FP32.

    Args:
        kind: `lstm`, `gru`, `rnn_tanh` or `rnn_relu`.
        input: as for `aten.lstm.input` and its like; sizes that are not known are not taken.
        hx: as there.
        params: as there.
        rest: as there.
    """
    states = [hx] if isinstance(hx, Tensor) else list(hx)
    tensors = [input, *states, *params]
    library = cudnn_rnn.CUDNN
    if any(one.device.type != library.device for one in tensors) or not library.available():
        return False
    known = all(isinstance(size, int) and size > 0 for one in tensors for size in one.shape)
    if not known or input.dtype not in _FLOATS or any(one.dtype != input.dtype for one in tensors):
        return False
    return _working_type(kind, input, states, *_options(*rest)) is not None


def network(
    kind: str, data: Tensor, states: Sequence[Tensor], parameters: Sequence[Tensor], *rest: Any
) -> tuple[Tensor, ...]:
    """`aten.lstm.input`, `aten.gru.input` and their like by cuDNN, traced and differentiated as its operators.

    Args:
        kind: `lstm`, `gru`, `rnn_tanh` or `rnn_relu`.
        data: [steps, batch, features], or [batch, steps, features] with `batch_first`.
        states: the first hidden state and, of an LSTM, the first cell state, [layers * directions, batch, units] each.
        parameters: per layer and direction: input weight, hidden weight, with biases two biases, and the projection of
            an LSTM that has one.
        rest: has_biases, num_layers, dropout, train, bidirectional, batch_first.

    Returns:
        The output and the last states.
    """
    has_biases, layers, dropout, train, bidirectional, batch_first = rest
    low, dtype = data.dtype, _working_type(kind, data, states, layers, bidirectional)
    if dtype is None:
        raise LoweringError(f"cuDNN does not take the {kind}", mend="ask `takes` first")
    out = (data.transpose(0, 1) if batch_first else data).to(dtype)
    states, parameters = [one.to(dtype) for one in states], [one.to(dtype) for one in parameters]
    count = 1 if train and dropout and layers > 1 else layers  # layers of one call
    directions, last = 2 if bidirectional else 1, []
    for first in range(0, layers, count):
        places = slice(first * directions, (first + count) * directions)
        each = len(parameters) // (layers * directions)
        weights = parameters[places.start * each : places.stop * each]
        if first:
            out = torch.dropout(out, dropout, True)
        out, *ends = _part(kind, out, [one[places] for one in states], weights, count, has_biases, bidirectional)
        last.append(ends)
    ends = [torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*last, strict=True)]
    return (out.transpose(0, 1) if batch_first else out).to(low), *[one.to(low) for one in ends]


def empty_results(
    kind: str, input: Tensor, hx: Tensor | Sequence[Tensor], params: Sequence[Tensor], has_biases: bool,
    num_layers: int, dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Tensors as `aten.lstm.input` and its like return them on a GPU, with nothing in them.

    Args:
        kind: `lstm`, `gru`, `rnn_tanh` or `rnn_relu`.
        input: as there.
        hx: as there.
        params: as there.
        has_biases: as there.
        num_layers: as there.
        dropout: as there.
        train: as there.
        bidirectional: as there.
        batch_first: as there.
    """
    states = [hx] if isinstance(hx, Tensor) else list(hx)
    batch, steps = (input.shape[0], input.shape[1]) if batch_first else (input.shape[1], input.shape[0])
    out = input.new_empty(steps, batch, states[0].shape[-1] * (2 if bidirectional else 1))
    return out.transpose(0, 1) if batch_first else out, *[one.new_empty(one.shape) for one in states]


def _part(
    kind: str, data: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], layers: int, has_biases: bool,
    bidirectional: bool,
) -> list[Tensor]:  # fmt: skip
    """Layers that run in one call: their output and last states."""
    form = _form(kind, data, states, layers, bidirectional, data.dtype)
    layout = cudnn_rnn.CUDNN.layout(form)
    if isinstance(layout, str):
        raise LoweringError(f"cuDNN does not take the {kind}: {layout}", mend="ask `takes` first")
    flat = _flattened(form, layout, weights, has_biases)
    h, c = states[0].contiguous(), states[1].contiguous() if kind == "lstm" else None
    read = [one for one in (data, flat, h, c) if one is not None]
    keeps = torch.is_grad_enabled() and any(one.requires_grad for one in read)
    out, last, cell, _ = torch.ops.amp_compiler.recurrent_network(
        data.contiguous(), flat, h, c, kind, form.hidden, layers, bidirectional, keeps
    )
    return [out, last] if c is None else [out, last, cell]


def _flattened(form: Form, layout: Layout, weights: Sequence[Tensor], has_biases: bool) -> Tensor:
    """All weights in one buffer as cuDNN wants them; a bias that is missing is zeros."""
    used = [place for place in range(len(layout.offsets)) if has_biases or place % form.each not in (2, 3)]
    pieces, end = [], 0
    for start, weight in sorted(zip((layout.offsets[place] for place in used), weights, strict=True), key=_first):
        if start > end:
            pieces.append(weight.new_zeros(start - end))
        pieces.append(weight.reshape(-1))
        end = start + weight.numel()
    if layout.numel > end:
        pieces.append(weights[0].new_zeros(layout.numel - end))
    return torch.cat(pieces)


def _first(pair: tuple[int, Tensor]) -> int:
    return pair[0]


def _options(has_biases: bool, layers: int, dropout: float, train: bool, bidirectional: bool, *_: Any) -> Any:
    return layers, bidirectional


def _form(
    kind: str, data: Tensor, states: Sequence[Tensor], layers: int, bidirectional: bool, dtype: torch.dtype
) -> Form:
    out, hidden = int(states[0].shape[-1]), int(states[-1].shape[-1])
    projected = out if out != hidden else 0
    return Form(kind, int(data.shape[-1]), hidden, projected, layers, bidirectional, dtype, data.device)


def _working_type(
    kind: str, data: Tensor, states: Sequence[Tensor], layers: int, bidirectional: bool
) -> torch.dtype | None:
    """What cuDNN runs a network in: its own type, FP32 for one of 16 bits that it does not know, or not at all."""
    reasons: list[str] = []
    for dtype in (data.dtype, *([torch.float32] if data.dtype in _LOW else [])):
        found = cudnn_rnn.CUDNN.layout(_form(kind, data, states, layers, bidirectional, dtype))
        if isinstance(found, Layout):
            _tell(kind, data.dtype, tuple(reasons), "it runs in FP32")
            return dtype
        reasons.append(found)
    _tell(kind, data.dtype, tuple(reasons), "it is unrolled, which takes long to compile")
    return None


@functools.cache  # once in a process
def _tell(kind: str, dtype: torch.dtype, reasons: tuple[str, ...], instead: str) -> None:
    if reasons:
        name = str(dtype).removeprefix("torch.")
        logger.warning("cuDNN does not take a recurrent network (%s, %s): %s; %s", kind, name, reasons[0], instead)


@torch.library.custom_op("amp_compiler::recurrent_network", mutates_args=())
def recurrent_network(
    data: Tensor, flat: Tensor, h: Tensor, c: Tensor | None, kind: str, hidden: int, layers: int, bidirectional: bool,
    keeps: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """All layers of a recurrent network.

    Args:
        data: [steps, batch, features], contiguous.
        flat: all weights, as `cudnn_rnn.Layout` says.
        h: first hidden state, [layers * directions, batch, units of the output], contiguous.
        c: first cell state, [layers * directions, batch, hidden], contiguous; of an LSTM only.
        kind: `lstm`, `gru`, `rnn_tanh` or `rnn_relu`.
        hidden: number of units.
        layers: number of layers.
        bidirectional: whether each layer also runs backwards.
        keeps: whether there will be a backward.

    Returns:
        Output [steps, batch, directions * units of the output], last hidden state, last cell state (empty where there
        is none), and what the backward reads (bytes, none without `keeps`).
    """
    form = _call_form(data, h, kind, hidden, layers, bidirectional)
    return cudnn_rnn.CUDNN.forward(form, data, flat, h, c, keeps)


@recurrent_network.register_fake
def _(
    data: Tensor, flat: Tensor, h: Tensor, c: Tensor | None, kind: str, hidden: int, layers: int, bidirectional: bool,
    keeps: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    form = _call_form(data, h, kind, hidden, layers, bidirectional)
    steps, batch = (int(size) for size in data.shape[:2])
    size = cudnn_rnn.CUDNN.reserve_size(form, steps, batch) if keeps else 0
    return (
        data.new_empty(steps, batch, form.directions * form.out),
        h.new_empty(h.shape),
        h.new_empty(0) if c is None else c.new_empty(c.shape),
        data.new_empty(size, dtype=torch.uint8),
    )


@torch.library.custom_op("amp_compiler::recurrent_network_backward", mutates_args=("reserve",))
def recurrent_network_backward(
    data: Tensor, flat: Tensor, h: Tensor, c: Tensor | None, out: Tensor, gradients: list[Tensor], reserve: Tensor,
    kind: str, hidden: int, layers: int, bidirectional: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of `recurrent_network`.

    Args:
        data: as there.
        flat: as there.
        h: as there.
        c: as there.
        out: its output.
        gradients: of output, last hidden state and last cell state.
        reserve: what it kept; used up.
        kind: as there.
        hidden: as there.
        layers: as there.
        bidirectional: as there.

    Returns:
        Gradients of data, hidden state, cell state (empty where there is none), and of all weights in one buffer.
    """
    form = _call_form(data, h, kind, hidden, layers, bidirectional)
    given = [gradient.contiguous() for gradient in gradients]
    return cudnn_rnn.CUDNN.backward(form, (data, flat, h, c), out, given, reserve)


@recurrent_network_backward.register_fake
def _(
    data: Tensor, flat: Tensor, h: Tensor, c: Tensor | None, out: Tensor, gradients: list[Tensor], reserve: Tensor,
    kind: str, hidden: int, layers: int, bidirectional: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    cell = h.new_empty(0) if c is None else c.new_empty(c.shape)
    return data.new_empty(data.shape), h.new_empty(h.shape), cell, flat.new_empty(flat.shape)


def _call_form(data: Tensor, h: Tensor, kind: str, hidden: int, layers: int, bidirectional: bool) -> Form:
    out = int(h.shape[-1])
    projected = out if out != hidden else 0
    return Form(kind, int(data.shape[-1]), hidden, projected, layers, bidirectional, data.dtype, data.device)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    data, flat, h, c, *ctx.form, _ = inputs
    out, _, _, reserve = output
    ctx.save_for_backward(data, flat, h, c, out, reserve)


def _backward(ctx: Any, *gradients: Tensor | None) -> Any:
    if torch.is_grad_enabled():
        raise LoweringError(
            "a recurrent network of cuDNN cannot be differentiated twice",
            mend="run the model within torch.backends.cudnn.flags(enabled=False), as eager torch asks for too",
        )
    data, flat, h, c, out, reserve = ctx.saved_tensors
    likes = (out, h, h.new_empty(0) if c is None else c)
    given = [
        torch.zeros_like(like) if gradient is None else gradient.contiguous()
        for gradient, like in zip(gradients, likes, strict=False)
    ]
    # cuDNN writes into what it kept; a compiler that sees that nobody reads it again makes no copy.
    d_data, d_h, d_c, d_flat = torch.ops.amp_compiler.recurrent_network_backward(
        data, flat, h, c, out, given, reserve.clone(), *ctx.form
    )
    return d_data, d_flat, d_h, None if c is None else d_c, None, None, None, None, None


recurrent_network.register_autograd(_backward, setup_context=_save)
