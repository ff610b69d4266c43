"""Recurrent networks by cuDNN, by torch's calls of it: whether it takes one, what it keeps for the backward, its calls.

How much it keeps from a forward to a backward cuDNN alone knows. It is asked when a graph is made, by running the
network on zeros, and the answer is remembered.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp_compiler.errors import first_line

_aten = torch.ops.aten
Shapes = tuple[tuple[int, ...] | None, ...]  # of data, both states and weights, in the order of `Inputs`
MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}  # as cuDNN numbers them


@dataclass(frozen=True)
class Form:
    """What a recurrent network is, but for what its tensors say.

    Args:
        kind: a key of `MODES`.
        hidden: number of units.
        projected: elements of the output of an LSTM with a projection; 0 where there is none.
        layers: number of layers.
        bidirectional: whether each layer also runs backwards.
    """

    kind: str
    hidden: int
    projected: int
    layers: int
    bidirectional: bool

    @property
    def each(self) -> int:
        """Number of weights of one direction of a layer: of the data, of the state, two biases, the projection."""
        return 5 if self.projected else 4


class Inputs(NamedTuple):
    """What a network reads.

    Args:
        data: [steps, batch, features], contiguous.
        h: first hidden state, [layers * directions, batch, units of the output], contiguous.
        c: first cell state, [layers * directions, batch, hidden], contiguous; of an LSTM only.
        weights: `Form.each` per layer and direction.
    """

    data: Tensor
    h: Tensor
    c: Tensor | None
    weights: Sequence[Tensor]


class Cudnn:
    """cuDNN, by torch's calls of it.

    Attributes:
        device: type of the devices that it computes on.
    """

    device = "cuda"

    def available(self) -> bool:
        """Whether it is there and may be used: the user may have switched it off."""
        return torch.backends.cudnn.is_available() and bool(torch.backends.cudnn.enabled)

    def reserve_size(self, form: Form, shapes: Shapes, dtype: torch.dtype, device: torch.device) -> int | str:
        """Bytes that a forward leaves for the backward, or why the network is not taken."""
        return _asked(form, shapes, dtype, device)

    def forward(self, form: Form, given: Inputs, keeps: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As `ops.recurrent_network.recurrent_network`."""
        with _no_autocast():
            weights, flat = _flattened(form, given)
            out, last, cell, reserve, _ = _aten._cudnn_rnn.default(
                given.data, weights, form.each, flat, given.h, given.c, MODES[form.kind], form.hidden, form.projected,
                form.layers, False, 0.0, keeps, form.bidirectional, [], None,
            )  # fmt: skip
        return out, last, cell, reserve

    def backward(
        self, form: Form, given: Inputs, out: Tensor, gradients: Sequence[Tensor], reserve: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Sequence[Tensor]]:
        """As `ops.recurrent_network.recurrent_network_backward`, with the gradient of each weight by itself."""
        data, h, c, _ = given
        d_out, d_h, d_c = gradients
        with _no_autocast():
            weights, flat = _flattened(form, given)
            found = _aten._cudnn_rnn_backward.default(
                data, weights, form.each, flat, h, c, out, d_out, d_h, None if c is None else d_c, MODES[form.kind],
                form.hidden, form.projected, form.layers, False, 0.0, True, form.bidirectional, [], None, reserve,
                [True, True, c is not None, True],
            )  # fmt: skip
        return found[0], found[1], h.new_empty(0) if c is None else found[2], found[3]


CUDNN = Cudnn()  # tests put another one in its place


def _no_autocast() -> AbstractContextManager[Any]:
    """A model may be called inside of autocast, which would cast what cuDNN is given to FP16; the types are settled."""
    return torch.autocast("cuda", enabled=False) if torch.is_autocast_enabled("cuda") else nullcontext()


def _flattened(form: Form, given: Inputs) -> tuple[list[Tensor], Tensor]:
    """Copies of the weights in one buffer, as cuDNN reads them, and the buffer."""
    weights = [one.detach().contiguous() for one in given.weights]  # these come to lie in the buffer; the weights stay
    flat = _aten._cudnn_rnn_flatten_weight.default(
        weights, form.each, given.data.shape[-1], MODES[form.kind], form.hidden, form.projected, form.layers, False,
        form.bidirectional,
    )  # fmt: skip
    return weights, flat


@functools.cache
def _asked(form: Form, shapes: Shapes, dtype: torch.dtype, device: torch.device) -> int | str:
    def run() -> int:
        with torch.cuda.device(device), torch.no_grad():
            made: Any = [None if one is None else torch.zeros(one, dtype=dtype, device=device) for one in shapes]
            data, h, c, *weights = made
            return int(Cudnn().forward(form, Inputs(data, h, c, weights), True)[3].numel())

    try:
        with ThreadPoolExecutor(1) as pool:  # the modes in which a graph is traced belong to a thread
            return pool.submit(run).result()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as cause:  # of a type, a device or a size that this cuDNN does not know
        return first_line(cause)
