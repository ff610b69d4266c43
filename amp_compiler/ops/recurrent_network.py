"""Recurrent networks as torch's own: all layers, directions and steps are one operator forward, and one backward.

Torch's compiler opens them into some ten operators per step and layer: minutes of compiling, and on a GPU a launch
each. Here they run as in eager torch: on a GPU by cuDNN where it takes them, which in 16 bits sums in FP32 and rounds
what goes from step to step, as under torch.autocast; on a CPU, where 16 bits are FP32 inside. The backward runs the
network once more, so that what torch keeps, of a size that cuDNN alone knows, stands in no graph. Dropout between
layers is torch's own, so that its seed and its state count in a replayed graph too; there each layer is an operator.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from amp_compiler.errors import LoweringError

KINDS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
DEVICE = "cuda"  # the type of devices whose networks are taken; tests put another one in its place
LOW = (torch.bfloat16, torch.float16)
FLOATS = (*LOW, torch.float32, torch.float64)


def takes(input: Tensor, hx: Tensor | Sequence[Tensor], params: Sequence[Tensor], *rest: Any) -> bool:
    """Whether a network runs here: all of it on a GPU, in one floating-point type, of known sizes.

    Args:
        input: as for `aten.lstm.input` and its like.
        hx: as there.
        params: as there.
        rest: as there.
    """
    tensors = [input, *([hx] if isinstance(hx, Tensor) else hx), *params]
    known = all(isinstance(size, int) and size > 0 for one in tensors for size in one.shape)
    alike = all(one.device.type == DEVICE and one.dtype == input.dtype for one in tensors)
    return known and alike and input.dtype in FLOATS


def network(
    kind: str, data: Tensor, states: Sequence[Tensor], parameters: Sequence[Tensor], has_biases: bool, layers: int,
    dropout: float, train: bool, bidirectional: bool, batch_first: bool,
    *, layer: Callable[..., list[Tensor]] | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`aten.lstm.input`, `aten.gru.input` and their like, traced and differentiated as the operators of this file.

    Args:
        kind: one of `KINDS`.
        data: [steps, batch, features], or [batch, steps, features] with `batch_first`.
        states: the first hidden state and, of an LSTM, the first cell state, [layers * directions, batch, units] each.
        parameters: per layer and direction: input weight, hidden weight, with biases two biases, and the projection of
            an LSTM that has one.
        has_biases: whether there are biases.
        layers: their number.
        dropout: its probability between layers.
        train: whether there is dropout.
        bidirectional: whether each layer also runs backwards.
        batch_first: whether the batch is the first dimension of `data` and of the output.
        layer: what runs single layers in the place of `recurrent_network`, which runs all of them at once.

    Returns:
        The output and the last states.
    """
    count = 1 if layer or (train and dropout and layers > 1) else layers  # layers of one operator
    run = layer or torch.ops.amp_compiler.recurrent_network
    directions = 2 if bidirectional else 1
    each, last = len(parameters) // (layers * directions), list[tuple[Tensor, ...]]()
    out = data.transpose(0, 1) if batch_first else data
    for first in range(0, layers, count):
        places = slice(first * directions, (first + count) * directions)
        out = torch.dropout(out, dropout, True) if first and train and dropout else out
        out, *ends = run(
            out.contiguous(), [one[places].contiguous() for one in states],
            list(parameters[places.start * each : places.stop * each]), kind, has_biases, count, bidirectional,
        )  # fmt: skip
        last.append(tuple(ends))
    ends = [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in zip(*last, strict=True)]
    return out.transpose(0, 1) if batch_first else out, *ends


def empty_results(
    input: Tensor, hx: Tensor | Sequence[Tensor], params: Sequence[Tensor], has_biases: bool, num_layers: int,
    dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Tensors as `aten.lstm.input` and its like, whose arguments it has, return them on a GPU, with nothing in them."""
    states = [hx] if isinstance(hx, Tensor) else list(hx)
    batch, steps = (input.shape[0], input.shape[1]) if batch_first else (input.shape[1], input.shape[0])
    out = input.new_empty(steps, batch, states[0].shape[-1] * (2 if bidirectional else 1))
    return out.transpose(0, 1) if batch_first else out, *[one.new_empty(one.shape) for one in states]


@torch.library.custom_op("amp_compiler::recurrent_network", mutates_args=())
def recurrent_network(
    data: Tensor, states: list[Tensor], weights: list[Tensor], kind: str, has_biases: bool, layers: int,
    bidirectional: bool,
) -> list[Tensor]:  # fmt: skip
    """All layers of a recurrent network.

    Args:
        data: [steps, batch, features], contiguous.
        states: as in `network`, contiguous.
        weights: as the parameters there.
        kind: as there.
        has_biases: as there.
        layers: as there.
        bidirectional: as there.

    Returns:
        Output and last states, contiguous.
    """
    with torch.no_grad(), _as_settled(data):
        return [one.contiguous() for one in _by_torch(data, states, weights, kind, has_biases, layers, bidirectional)]


@recurrent_network.register_fake
def _(data: Tensor, states: list[Tensor], *rest: Any) -> list[Tensor]:
    weights, _, has_biases, layers, bidirectional = rest
    return list(empty_results(data, states, weights, has_biases, layers, 0.0, True, bidirectional, False))


def _network_backward(
    data: Tensor, states: list[Tensor], weights: list[Tensor], gradients: list[Tensor], *form: Any
) -> list[Tensor]:
    """Gradients of `recurrent_network`, whose arguments it has, by data, states and weights."""

    def run() -> list[Tensor]:
        with torch.inference_mode(False), torch.enable_grad(), _as_settled(data):
            tensors = (one.clone() if one.is_inference() else one.detach() for one in (data, *states, *weights))
            leaves = [one.requires_grad_() for one in tensors]
            results = _by_torch(leaves[0], leaves[1 : 1 + len(states)], leaves[1 + len(states) :], *form)
            slopes = torch.autograd.grad(results, leaves, gradients) if results[0].requires_grad else ()
            return [one.clone(memory_format=torch.contiguous_format) for one in slopes]

    with ThreadPoolExecutor(1) as pool:  # below a mode that watches operators this thread records nothing
        return run() or pool.submit(run).result()


# Not a `custom_op`, within which no autograd can run.
_LIBRARY = torch.library.Library("amp_compiler", "FRAGMENT")
_LIBRARY.define(
    "recurrent_network_backward(Tensor data, Tensor[] states, Tensor[] weights, Tensor[] gradients, str kind,"
    " bool has_biases, int layers, bool bidirectional) -> Tensor[]"
)
_LIBRARY.impl("recurrent_network_backward", _network_backward, "CompositeExplicitAutograd")
torch.library.register_fake(
    "amp_compiler::recurrent_network_backward",
    lambda data, states, weights, *rest: [one.new_empty(one.shape) for one in (data, *states, *weights)],
)


def _by_torch(data: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], kind: str, *form: Any) -> list[Tensor]:
    has_biases, layers, bidirectional = form
    low = data.dtype
    if data.is_cpu and low in LOW:
        data, states, weights = data.float(), [one.float() for one in states], [one.float() for one in weights]
    run, hx = getattr(torch.ops.aten, kind).input, list(states) if kind == "lstm" else states[0]
    results = run(data, hx, list(weights), has_biases, layers, 0.0, True, bidirectional, False)
    return [one.to(low) for one in results]


@contextmanager
def _as_settled(data: Tensor) -> Iterator[None]:
    """Types are settled, so an autocast region around a call counts no more; nor does how weights lie in memory."""
    with torch.autocast(data.device.type, enabled=False), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
        yield


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    data, states, weights, *ctx.form = inputs
    ctx.states, ctx.likes = len(states), [(one.shape, one.dtype) for one in output]
    ctx.save_for_backward(data, *states, *weights)


def _backward(ctx: Any, gradients: Sequence[Tensor | None]) -> Any:
    data, *tensors = ctx.saved_tensors
    seeds = [
        data.new_zeros(shape, dtype=dtype) if one is None else one.contiguous()
        for one, (shape, dtype) in zip(gradients, ctx.likes, strict=True)
    ]
    states, weights = tensors[: ctx.states], tensors[ctx.states :]
    if torch.is_grad_enabled():  # this backward is to be differentiated itself
        results = differentiable(data, states, weights, seeds, ctx.form)
    else:
        results = torch.ops.amp_compiler.recurrent_network_backward(data, states, weights, seeds, *ctx.form)
    return results[0], results[1 : 1 + ctx.states], results[1 + ctx.states :], None, None, None, None


def differentiable(
    data: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], gradients: Sequence[Tensor], form: Sequence[Any]
) -> list[Tensor | None]:
    """As `recurrent_network_backward`, by torch's autograd; of what needs no gradient there is none.

    Raises:
        LoweringError: cuDNN has no such thing.
    """
    if not data.is_cpu:
        raise LoweringError(
            "a recurrent network of cuDNN cannot be differentiated twice",
            hint="run the model within torch.backends.cudnn.flags(enabled=False), as eager torch asks for too",
        )
    read = [one.view_as(one) for one in (data, *states, *weights)]  # one may stand there twice
    results = _by_torch(read[0], read[1 : 1 + len(states)], read[1 + len(states) :], *form)
    leaves = [one for one in read if one.requires_grad]
    slopes = iter(torch.autograd.grad(results, leaves, gradients, create_graph=True))
    return [next(slopes) if one.requires_grad else None for one in read]


recurrent_network.register_autograd(_backward, setup_context=_save)
