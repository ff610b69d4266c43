"""Recurrent networks on a GPU: all layers, directions and steps are one operator forward, and one backward.

Torch's compiler opens them into some ten operators per step and layer: minutes of compiling, and a launch each. Here
they are cuDNN's, as in eager torch. In 16 bits cuDNN sums in FP32 and rounds what goes from step to step, as under
torch.autocast; where it does not know the type, the network runs in FP32. Dropout between layers is torch's own, so
that its seed and its state count in a replayed graph too; there each layer is an operator.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from amp_compiler.errors import LoweringError
from amp_compiler.ops.cuda import cudnn_rnn
from amp_compiler.ops.cuda.cudnn_rnn import Form, Inputs

logger = logging.getLogger("amp_compiler")

_LOW = (torch.bfloat16, torch.float16)
_FLOATS = (*_LOW, torch.float32, torch.float64)
_T = TypeVar("_T")


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
    return _working_type(kind, input, states, params, *rest) is not None


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
    low, dtype = data.dtype, _working_type(kind, data, states, parameters, *rest)
    if dtype is None:
        raise LoweringError(f"cuDNN does not take the {kind}", hint="ask `takes` first")
    out = (data.transpose(0, 1) if batch_first else data).to(dtype)
    states, parameters = [one.to(dtype) for one in states], [one.to(dtype) for one in parameters]
    count = 1 if train and dropout and layers > 1 else layers  # layers of one call
    directions, last = 2 if bidirectional else 1, []
    weights = _with_biases(parameters, layers * directions, has_biases, lambda one: one.new_zeros(len(one)))
    each = len(weights) // (layers * directions)
    for first in range(0, layers, count):
        places = slice(first * directions, (first + count) * directions)
        if first:
            out = torch.dropout(out, dropout, True)
        some = weights[places.start * each : places.stop * each]
        out, *ends = _part(kind, out, [one[places] for one in states], some, count, bidirectional)
        last.append(ends)
    ends = [torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*last, strict=True)]
    return (out.transpose(0, 1) if batch_first else out).to(low), *[one.to(low) for one in ends]


def empty_results(
    input: Tensor, hx: Tensor | Sequence[Tensor], params: Sequence[Tensor], has_biases: bool, num_layers: int,
    dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Tensors as `aten.lstm.input` and its like, whose arguments it has, return them on a GPU, with nothing in them."""
    states = [hx] if isinstance(hx, Tensor) else list(hx)
    batch, steps = (input.shape[0], input.shape[1]) if batch_first else (input.shape[1], input.shape[0])
    out = input.new_empty(steps, batch, states[0].shape[-1] * (2 if bidirectional else 1))
    return out.transpose(0, 1) if batch_first else out, *[one.new_empty(one.shape) for one in states]


def _with_biases(weights: Sequence[_T], parts: int, has_biases: bool, missing: Callable[[_T], _T]) -> list[_T]:
    """The weights of all layers and directions, or their shapes; a bias that is missing is made of what is before."""
    each, found = len(weights) // parts, list[_T]()
    for first in range(0, len(weights), each):
        one = weights[first : first + each]
        found += one if has_biases else [*one[:2], missing(one[0]), missing(one[0]), *one[2:]]
    return found


def _asked(form: Form, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> int | str:
    """What cuDNN says of a network, by the shapes of what it reads."""
    data, *states = (tuple(map(int, one)) for one in shapes)
    given = (data, *states) if form.kind == "lstm" else (data, states[0], None, *states[1:])
    return cudnn_rnn.CUDNN.reserve_size(form, given, dtype, device)


def _part(
    kind: str, data: Tensor, states: Sequence[Tensor], weights: list[Tensor], layers: int, bidirectional: bool
) -> list[Tensor]:
    """Layers that run in one call: their output and last states."""
    h, c = states[0].contiguous(), states[1].contiguous() if kind == "lstm" else None
    read = [one for one in (data, h, c, *weights) if one is not None]
    keeps = torch.is_grad_enabled() and any(one.requires_grad for one in read)
    out, last, cell, _ = torch.ops.amp_compiler.recurrent_network(
        data.contiguous(), h, c, weights, kind, states[-1].shape[-1], layers, bidirectional, keeps
    )
    return [out, last] if c is None else [out, last, cell]


def _form(h: Tensor, kind: str, hidden: int, layers: int, bidirectional: bool) -> Form:
    out = int(h.shape[-1])
    return Form(kind, hidden, out if out != hidden else 0, layers, bidirectional)


def _working_type(
    kind: str, data: Tensor, states: Sequence[Tensor], parameters: Sequence[Tensor], has_biases: bool, layers: int,
    dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> torch.dtype | None:  # fmt: skip
    """What cuDNN runs a network in: its own type, FP32 for one of 16 bits that it does not know, or not at all."""
    form = _form(states[0], kind, int(states[-1].shape[-1]), layers, bidirectional)
    first, second, features = data.shape
    shapes: list[tuple[int, ...]] = [(second, first, features) if batch_first else data.shape]
    shapes += [tuple(one.shape) for one in states]
    weights: list[tuple[int, ...]] = [tuple(one.shape) for one in parameters]
    shapes += _with_biases(weights, layers * (2 if bidirectional else 1), has_biases, lambda one: one[:1])
    reasons: list[str] = []
    for dtype in (data.dtype, *([torch.float32] if data.dtype in _LOW else [])):
        found = _asked(form, shapes, dtype, data.device)
        if isinstance(found, int):
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
    data: Tensor, h: Tensor, c: Tensor | None, weights: list[Tensor], kind: str, hidden: int, layers: int,
    bidirectional: bool, keeps: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """All layers of a recurrent network.

    Args:
        data: as in `cudnn_rnn.Inputs`.
        h: as there.
        c: as there.
        weights: as there.
        kind: `lstm`, `gru`, `rnn_tanh` or `rnn_relu`.
        hidden: number of units.
        layers: number of layers.
        bidirectional: whether each layer also runs backwards.
        keeps: whether there will be a backward.

    Returns:
        Output [steps, batch, directions * units of the output], last hidden state, last cell state (empty where there
        is none), and what the backward reads (bytes, none without `keeps`).
    """
    form = _form(h, kind, hidden, layers, bidirectional)
    return cudnn_rnn.CUDNN.forward(form, Inputs(data, h, c, weights), keeps)


@recurrent_network.register_fake
def _(
    data: Tensor, h: Tensor, c: Tensor | None, weights: list[Tensor], kind: str, hidden: int, layers: int,
    bidirectional: bool, keeps: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    size: int | str = 0
    if keeps:
        form = _form(h, kind, hidden, layers, bidirectional)
        read = [one.shape for one in (data, h, c, *weights) if one is not None]
        size = _asked(form, read, data.dtype, data.device)
    if isinstance(size, str):
        raise LoweringError(f"cuDNN refuses the {kind}: {size}", hint="capture the model again on this machine")
    return (
        data.new_empty(*data.shape[:2], h.shape[-1] * (2 if bidirectional else 1)),
        h.new_empty(h.shape),
        h.new_empty(0) if c is None else c.new_empty(c.shape),
        data.new_empty(size, dtype=torch.uint8),
    )


@torch.library.custom_op("amp_compiler::recurrent_network_backward", mutates_args=("reserve",))
def recurrent_network_backward(
    data: Tensor, h: Tensor, c: Tensor | None, weights: list[Tensor], out: Tensor, gradients: list[Tensor],
    reserve: Tensor, kind: str, hidden: int, layers: int, bidirectional: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of `recurrent_network`.

    Args:
        data: as there.
        h: as there.
        c: as there.
        weights: as there.
        out: its output.
        gradients: of output, last hidden state and last cell state.
        reserve: what it kept; used up.
        kind: as there.
        hidden: as there.
        layers: as there.
        bidirectional: as there.

    Returns:
        Gradients of data, hidden state, cell state (empty where there is none), and of all weights one behind another.
    """
    form, given = _form(h, kind, hidden, layers, bidirectional), Inputs(data, h, c, weights)
    found = cudnn_rnn.CUDNN.backward(form, given, out, [gradient.contiguous() for gradient in gradients], reserve)
    return *found[:3], torch.cat([gradient.reshape(-1) for gradient in found[3]])


@recurrent_network_backward.register_fake
def _(
    data: Tensor, h: Tensor, c: Tensor | None, weights: list[Tensor], out: Tensor, gradients: list[Tensor],
    reserve: Tensor, kind: str, hidden: int, layers: int, bidirectional: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    cell = h.new_empty(0) if c is None else c.new_empty(c.shape)
    count = sum(one.numel() for one in weights)
    return data.new_empty(data.shape), h.new_empty(h.shape), cell, data.new_empty(count)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    data, h, c, weights, *ctx.form, _ = inputs
    out, _, _, reserve = output
    ctx.save_for_backward(data, h, c, out, reserve, *weights)


def _backward(ctx: Any, *gradients: Tensor | None) -> Any:
    if torch.is_grad_enabled():
        raise LoweringError(
            "a recurrent network of cuDNN cannot be differentiated twice",
            hint="run the model within torch.backends.cudnn.flags(enabled=False), as eager torch asks for too",
        )
    data, h, c, out, reserve, *weights = ctx.saved_tensors
    likes = (out, h, h.new_empty(0) if c is None else c)
    given = [
        torch.zeros_like(like) if gradient is None else gradient.contiguous()
        for gradient, like in zip(gradients, likes, strict=False)
    ]
    # cuDNN writes into what it kept; a compiler that sees that nobody reads it again makes no copy.
    d_data, d_h, d_c, joined = torch.ops.amp_compiler.recurrent_network_backward(
        data, h, c, weights, out, given, reserve.clone(), *ctx.form
    )
    parts = joined.split([one.numel() for one in weights])
    d_weights = [part.view(one.shape) for part, one in zip(parts, weights, strict=True)]
    return d_data, d_h, None if c is None else d_c, d_weights, None, None, None, None, None


recurrent_network.register_autograd(_backward, setup_context=_save)
