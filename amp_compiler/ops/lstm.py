"""An LSTM layer on a CPU as an operator whose backward is made of operators too.

In BF16 the layer is the native loop of `ops.cpu.lstm`, where it fits; in FP16 it is the steps of `ops.lstm_steps`; else
it is oneDNN's.
ATen's `mkldnn_rnn_layer` hands a workspace to its backward, but makes it only while autograd records, and its size is
not known to fake tensors. So it cannot stand in a graph that holds forward and backward. The operator here always makes
the workspace, and learns its size by running the layer once on zeros of the same shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from amp_compiler.ops import lstm_steps, recurrent_network
from amp_compiler.ops.cpu import lstm as cpu_lstm
from amp_compiler.ops.recurrent import stacked, through_aten

_LSTM_MODE = 2


def lstm(
    data: Tensor,
    hidden: list[Tensor],
    parameters: list[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`aten.lstm.input` on a CPU, built from `amp_compiler.lstm_layer`.

    Args:
        data: [steps, batch, features], or [batch, steps, features] with `batch_first`; fp32, bf16 or fp16.
        hidden: the first hidden and cell states, [layers * directions, batch, hidden] each.
        parameters: per layer and direction: input weight, hidden weight and, with biases, two biases.
        has_biases: whether there are biases.
        layers: number of layers.
        dropout: probability of dropping an element between layers.
        train: whether to drop.
        bidirectional: whether each layer also runs backwards.
        batch_first: layout of `data` and of the output.

    Returns:
        The output, and the last hidden and cell states, as `aten.lstm.input` gives them.
    """
    options = (has_biases, layers, dropout, train, bidirectional, batch_first)
    return stacked(_side, data, hidden, parameters, *options)  # type: ignore[return-value]


def _side(data: Tensor, weights: list[Tensor], first: list[Tensor], reverse: bool) -> tuple[Tensor, ...]:
    return torch.ops.amp_compiler.lstm_layer(data, *weights, *first, reverse)[:3]  # type: ignore[no-any-return]


_LIBRARY = torch.library.Library("amp_compiler", "FRAGMENT")
_LIBRARY.define(
    "lstm(Tensor input, Tensor[] hx, Tensor[] params, bool has_biases, int num_layers, float dropout, bool train,"
    " bool bidirectional, bool batch_first) -> (Tensor, Tensor, Tensor)"
)


def _lstm_or_atens(data: Tensor, hidden: list[Tensor], *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """`amp_compiler.lstm`: traced and differentiated as what it is made of."""
    if recurrent_network.takes("lstm", data, hidden, *rest):
        return recurrent_network.network("lstm", data, hidden, *rest)  # type: ignore[return-value]
    if can_run(data, hidden):
        return lstm(data, hidden, *rest)
    if not _rounds_its_states(data):
        return torch.ops.aten.lstm.input(data, hidden, *rest)  # type: ignore[no-any-return]
    parameters, *options = rest
    wide = [one.float() for one in hidden], [one.float() for one in parameters]
    out, state, cell = torch.ops.aten.lstm.input(data.float(), *wide, *options)
    return out.to(data.dtype), state.to(data.dtype), cell.to(data.dtype)


def _rounds_its_states(data: Tensor) -> bool:
    """Whether ATen, which has no kernel for an LSTM with a projection, would round both states at each step."""
    return data.device.type == "cpu" and data.dtype in (torch.bfloat16, torch.float16)


_LIBRARY.impl("lstm", _lstm_or_atens, "CompositeImplicitAutograd")


def can_run(data: Tensor, hidden: list[Tensor], *rest: Any) -> bool:
    """True where the operator takes an LSTM: on a CPU, in 16 bits or, with oneDNN, in FP32, without a projection.

    Not an empty batch, at which oneDNN raises or ends the process.
    """
    empty = any(isinstance(size, int) and size == 0 for size in data.shape)
    fits = data.dtype in (torch.bfloat16, torch.float16) or (
        data.dtype == torch.float32 and torch.backends.mkldnn.is_available()
    )
    return fits and not empty and data.device.type == "cpu" and hidden[0].size(2) == hidden[1].size(2)


@functools.cache
def _in_steps(dtype: torch.dtype) -> bool:
    """Whether a layer in this type is that of `lstm_steps`: in FP16, and in BF16 where oneDNN has none for this CPU."""
    if dtype != torch.bfloat16:
        return dtype == torch.float16
    try:
        _workspace_size(1, 1, 1, 1, dtype)
    except RuntimeError:  # in words that differ by version
        return True
    return False


def gains(data: Tensor, *rest: Any) -> bool:
    """True where the operator takes an LSTM, or else keeps its states in FP32.

    Args:
        data: the input of the LSTM.
        rest: its other arguments.
    """
    return can_run(data, *rest) or _rounds_its_states(data)


def _run(
    data: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, h: Tensor, c: Tensor, reverse: bool
) -> Any:
    with torch.enable_grad():  # the workspace is made only in grad mode; nothing here requires a gradient
        return torch.ops.aten.mkldnn_rnn_layer.default(
            data.detach(), w_ih.detach(), w_hh.detach(), b_ih.detach(), b_hh.detach(), h.detach(), c.detach(),
            reverse, [], _LSTM_MODE, h.shape[-1], 1, True, False, False, True,
        )  # fmt: skip


@torch.library.custom_op("amp_compiler::lstm_layer", mutates_args=())
def lstm_layer(
    data: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, h: Tensor, c: Tensor, reverse: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One direction of one LSTM layer.

    Args:
        data: [steps, batch, features], contiguous.
        w_ih: [4 * hidden, features].
        w_hh: [4 * hidden, hidden].
        b_ih: [4 * hidden].
        b_hh: [4 * hidden].
        h: first hidden state, [1, batch, hidden].
        c: first cell state, [1, batch, hidden].
        reverse: run from the last step to the first.

    Returns:
        Output [steps, batch, hidden], last hidden state, last cell state (`h`'s size), oneDNN's workspace (bytes).
    """
    inputs = [one.contiguous() for one in (data, w_ih, w_hh, b_ih, b_hh, h, c)]
    if _in_steps(data.dtype):
        return lstm_steps.forward(inputs, reverse)
    if cpu_lstm.can_run(data, h.shape[-1]):
        return cpu_lstm.forward(inputs, reverse)
    out, state, cell, workspace = _run(data, w_ih, w_hh, b_ih, b_hh, h, c, reverse)
    return out.contiguous(), state.reshape(h.shape).contiguous(), cell.reshape(c.shape).contiguous(), workspace


@lstm_layer.register_fake
def _(data: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, h: Tensor, c: Tensor, reverse: bool) -> Any:
    steps, batch, features = (int(size) for size in data.shape)
    if _in_steps(data.dtype):
        size = lstm_steps.workspace_size(steps, batch, int(h.shape[-1]))
    elif cpu_lstm.can_run(data, int(h.shape[-1])):
        size = cpu_lstm.workspace_size(steps, batch, int(h.shape[-1]))
    else:
        size = _workspace_size(steps, batch, features, int(h.shape[-1]), data.dtype)
    return (
        data.new_empty(steps, batch, h.shape[-1]),
        torch.empty_like(h),
        torch.empty_like(c),
        data.new_empty(size, dtype=torch.uint8),
    )


@functools.cache
def _workspace_size(steps: int, batch: int, features: int, hidden: int, dtype: torch.dtype) -> int:
    with unset_fake_temporarily():
        state = torch.zeros(1, batch, hidden, dtype=dtype)
        bias = torch.zeros(4 * hidden, dtype=dtype)
        weights = torch.zeros(4 * hidden, features, dtype=dtype), torch.zeros(4 * hidden, hidden, dtype=dtype)
        data = torch.zeros(steps, batch, features, dtype=dtype)
        return int(_run(data, *weights, bias, bias, state, state, False)[3].numel())


@torch.library.custom_op("amp_compiler::lstm_layer_backward", mutates_args=())
def lstm_layer_backward(
    saved: list[Tensor], results: list[Tensor], gradients: list[Tensor], reverse: bool
) -> list[Tensor]:
    """Gradients of `lstm_layer` by its seven tensors, each in the type of its tensor.

    Args:
        saved: the seven tensor arguments of `lstm_layer`.
        results: its four results.
        gradients: gradients of its first three results.
        reverse: as there.
    """
    data, w_ih, w_hh, b_ih, b_hh, h, c = saved
    made = torch.ops.aten.mkldnn_rnn_layer_backward.default(
        data, w_ih, w_hh, b_ih, b_hh, h, c, *results[:3], *[gradient.contiguous() for gradient in gradients],
        reverse, _LSTM_MODE, h.shape[-1], 1, True, True, False, [], False, results[3],
    )  # fmt: skip
    found = [
        grad.reshape(like.shape).to(like.dtype, memory_format=torch.contiguous_format)
        for grad, like in zip(made, saved, strict=True)
    ]
    # No result of an operator may share memory with another or with an argument: oneDNN gives both biases one gradient.
    taken = {tensor.untyped_storage().data_ptr() for tensor in (*saved, *results, *gradients)}
    for place, grad in enumerate(found):
        memory = grad.untyped_storage().data_ptr()
        if memory in taken:
            found[place] = grad.clone()
        taken.add(memory)
    return found


@lstm_layer_backward.register_fake
def _(saved: list[Tensor], results: list[Tensor], gradients: list[Tensor], reverse: bool) -> list[Tensor]:
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in saved]


@torch.library.custom_op("amp_compiler::lstm_gates_backward", mutates_args=())
def lstm_gates_backward(
    w_hh: Tensor, c: Tensor, gradients: list[Tensor], workspace: Tensor, reverse: bool
) -> list[Tensor]:
    """The backward through time of a layer that is not oneDNN's; see `ops.cpu.lstm.gates_backward`."""
    given = [gradient.contiguous() for gradient in gradients]
    if _in_steps(w_hh.dtype):
        return lstm_steps.gates_backward(w_hh, c, given, workspace, reverse)
    return cpu_lstm.gates_backward(w_hh.contiguous(), c.contiguous(), given, workspace, reverse)


@lstm_gates_backward.register_fake
def _(w_hh: Tensor, c: Tensor, gradients: list[Tensor], workspace: Tensor, reverse: bool) -> list[Tensor]:
    steps, batch, hidden = gradients[0].shape
    dtype = torch.float32 if _in_steps(w_hh.dtype) else c.dtype
    return [torch.empty(*shape, dtype=dtype) for shape in ((steps, batch, 4 * hidden), c.shape, c.shape)]


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.reverse = inputs[-1]
    ctx.save_for_backward(*inputs[:-1], *output)


def _backward(ctx: Any, *gradients: Tensor | None) -> Any:
    saved, results = ctx.saved_tensors[:7], ctx.saved_tensors[7:]
    given = [
        torch.zeros_like(result) if gradient is None else gradient
        for gradient, result in zip(gradients[:3], results[:3], strict=True)
    ]
    if torch.is_grad_enabled():  # this backward is to be differentiated itself
        return *through_aten(torch.ops.aten.lstm.input, saved, given, ctx.needs_input_grad[:7], ctx.reverse), None
    if _in_steps(saved[0].dtype) or cpu_lstm.can_run(saved[0], int(saved[5].shape[-1])):
        return *_backward_by_gates(saved, results, given, ctx.reverse), None
    return *torch.ops.amp_compiler.lstm_layer_backward(list(saved), list(results), given, ctx.reverse), None


def _backward_by_gates(
    saved: Sequence[Tensor], results: Sequence[Tensor], gradients: Sequence[Tensor], reverse: bool
) -> list[Tensor]:
    """What `lstm_layer_backward` gives, from the gradients of the gates: one matrix product over all steps each."""
    data, w_ih, w_hh, _, _, h, c = saved
    out, workspace = results[0], results[3]
    gates, d_h, d_c = torch.ops.amp_compiler.lstm_gates_backward(w_hh, c, list(gradients), workspace, reverse)
    before = torch.cat([out[1:], h]) if reverse else torch.cat([h, out[:-1]])
    flat = gates.flatten(0, 1)
    read, weight, before = (one.to(flat.dtype) for one in (data, w_ih, before))
    bias = flat.sum(0)
    d_data = (flat @ weight).view(data.shape)
    made = [d_data, flat.t() @ read.flatten(0, 1), flat.t() @ before.flatten(0, 1), bias, bias, d_h, d_c]
    return [one.to(data.dtype) for one in made]


lstm_layer.register_autograd(_backward, setup_context=_save)
