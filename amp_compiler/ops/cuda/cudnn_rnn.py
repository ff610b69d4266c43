"""Recurrent networks by cuDNN: whether it takes one, how its weights lie, what it keeps for the backward, its calls.

cuDNN alone knows where in its one buffer each weight lies, and how much it keeps from a forward to a backward. Both are
asked for when a graph is made, by running it on zeros, and remembered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from amp_compiler.errors import LoweringError, first_line

_aten = torch.ops.aten
MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}  # as cuDNN numbers them
GATES = {"rnn_relu": 1, "rnn_tanh": 1, "lstm": 4, "gru": 3}
Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None]  # data, weights, first hidden state, first cell state
_R = TypeVar("_R")


@dataclass(frozen=True)
class Form:
    """What a recurrent network is, but for its weights.

    Args:
        kind: a key of `MODES`.
        features: elements of one step of the data.
        hidden: number of units.
        projected: elements of the output of an LSTM with a projection; 0 where there is none.
        layers: number of layers.
        bidirectional: whether each layer also runs backwards.
        dtype: of data, states and weights; sums are FP32 at least.
        device: where it runs.
    """

    kind: str
    features: int
    hidden: int
    projected: int
    layers: int
    bidirectional: bool
    dtype: torch.dtype
    device: torch.device

    @property
    def directions(self) -> int:
        """2 where each layer also runs backwards, else 1."""
        return 2 if self.bidirectional else 1

    @property
    def out(self) -> int:
        """Elements of the output of one direction, and of its hidden state."""
        return self.projected or self.hidden

    @property
    def each(self) -> int:
        """Number of weights of one direction of a layer, biases among them."""
        return 5 if self.projected else 4

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Of all weights: per layer and direction of the data, of the state, two biases, the projection if any."""
        sums, found = GATES[self.kind] * self.hidden, []
        for layer in range(self.layers):
            read = self.features if layer == 0 else self.directions * self.out
            one = [(sums, read), (sums, self.out), (sums,), (sums,), (self.projected, self.hidden)][: self.each]
            found += one * self.directions
        return found


@dataclass(frozen=True)
class Layout:
    """How all weights of a network lie in one buffer.

    Args:
        numel: its elements.
        offsets: where each of `Form.shapes` begins.
    """

    numel: int
    offsets: tuple[int, ...]

    def views(self, form: Form, flat: Tensor) -> list[Tensor]:
        """The weights in a buffer."""
        shapes = zip(self.offsets, form.shapes, strict=True)
        return [flat[start : start + torch.Size(shape).numel()].view(shape) for start, shape in shapes]


class Library(Protocol):
    """What the operators need; `Cudnn` but for tests.

    Attributes:
        device: type of the devices that it computes on.
    """

    device: str

    def available(self) -> bool:
        """Whether it is there and may be used."""

    def layout(self, form: Form) -> Layout | str:
        """How the weights of a network lie, or why it is not taken."""

    def reserve_size(self, form: Form, steps: int, batch: int) -> int:
        """Bytes that a forward leaves for the backward."""

    def forward(
        self, form: Form, data: Tensor, flat: Tensor, h: Tensor, c: Tensor | None, keeps: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As `ops.recurrent_network.recurrent_network`."""

    def backward(
        self, form: Form, inputs: Inputs, out: Tensor, gradients: Sequence[Tensor], reserve: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As `ops.recurrent_network.recurrent_network_backward`."""


class Cudnn:
    """As `Library`, by torch's calls of cuDNN."""

    device = "cuda"

    def available(self) -> bool:
        """As in `Library`; the user may have switched cuDNN off."""
        return torch.backends.cudnn.is_available() and bool(torch.backends.cudnn.enabled)

    def layout(self, form: Form) -> Layout | str:
        """As in `Library`."""
        return _asked_layout(form)

    def reserve_size(self, form: Form, steps: int, batch: int) -> int:
        """As in `Library`."""
        return _asked_reserve(form, steps, batch)

    def forward(
        self, form: Form, data: Tensor, flat: Tensor, h: Tensor, c: Tensor | None, keeps: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As in `Library`."""
        return _forward(form, data, _known(form).views(form, flat), flat, h, c, keeps)

    def backward(
        self, form: Form, inputs: Inputs, out: Tensor, gradients: Sequence[Tensor], reserve: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As in `Library`."""
        data, flat, h, c = inputs
        d_out, d_h, d_c = gradients
        layout = _known(form)
        made = _aten._cudnn_rnn_backward.default(
            data, layout.views(form, flat), form.each, flat, h, c, out, d_out, d_h, d_c if c is not None else None,
            MODES[form.kind], form.hidden, form.projected, form.layers, False, 0.0, True, form.bidirectional, [],
            None, reserve, [True, True, c is not None, True],
        )  # fmt: skip
        of_cell = made[2] if c is not None else flat.new_empty(0)
        return made[0], made[1], of_cell, _joined(layout, made[3], flat)


CUDNN: Library = Cudnn()


def _forward(
    form: Form, data: Tensor, weights: Sequence[Tensor], flat: Tensor, h: Tensor, c: Tensor | None, keeps: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out, last, cell, reserve, _ = _aten._cudnn_rnn.default(
        data, weights, form.each, flat, h, c, MODES[form.kind], form.hidden, form.projected, form.layers, False, 0.0,
        keeps, form.bidirectional, [], None,
    )  # fmt: skip
    return out, last, cell, reserve


def _joined(layout: Layout, gradients: Sequence[Tensor], flat: Tensor) -> Tensor:
    """The gradients of all weights as one buffer laid out like the weights, which is where torch makes them."""
    memory = gradients[0].untyped_storage()
    places = tuple(gradient.storage_offset() for gradient in gradients)
    alike = all(one.untyped_storage().data_ptr() == memory.data_ptr() for one in gradients)
    if alike and places == layout.offsets and memory.nbytes() == flat.numel() * flat.element_size():
        return flat.new_empty(0).set_(memory, 0, flat.shape, flat.stride())
    made = torch.zeros_like(flat)
    for place, gradient in zip(layout.offsets, gradients, strict=True):
        made[place : place + gradient.numel()].copy_(gradient.reshape(-1))
    return made


@functools.cache
def _asked_layout(form: Form) -> Layout | str:
    try:
        return _apart(_found_layout, form)
    except RuntimeError as cause:  # of a type, a device or a size that this cuDNN does not know
        return first_line(cause)


@functools.cache
def _asked_reserve(form: Form, steps: int, batch: int) -> int:
    return _apart(_found_reserve, form, steps, batch)


def _known(form: Form) -> Layout:
    """The layout of a network that was found to be taken."""
    layout = _asked_layout(form)
    if isinstance(layout, str):
        raise LoweringError(f"cuDNN refuses the {form.kind}: {layout}", mend="capture the model again on this machine")
    return layout


def _apart(run: Callable[..., _R], *arguments: Any) -> _R:
    """Run in a thread of its own: the modes in which a graph is traced belong to a thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run, *arguments).result()


def _found_layout(form: Form) -> Layout:
    with torch.cuda.device(form.device), torch.no_grad():
        weights = [torch.zeros(shape, dtype=form.dtype, device=form.device) for shape in form.shapes]
        flat = _aten._cudnn_rnn_flatten_weight.default(
            weights, form.each, form.features, MODES[form.kind], form.hidden, form.projected, form.layers, False,
            form.bidirectional,
        )  # fmt: skip
        layout = Layout(flat.numel(), tuple(int(weight.storage_offset()) for weight in weights))
    _found_reserve(form, 1, 1, layout)  # what it does not compute it says here
    return layout


def _found_reserve(form: Form, steps: int, batch: int, known: Layout | None = None) -> int:
    layout = _known(form) if known is None else known
    with torch.cuda.device(form.device), torch.no_grad():
        options = {"dtype": form.dtype, "device": form.device}
        flat, data = torch.zeros(layout.numel, **options), torch.zeros(steps, batch, form.features, **options)  # type: ignore[call-overload]
        states = form.layers * form.directions, batch
        h = torch.zeros(*states, form.out, **options)  # type: ignore[call-overload]
        c = torch.zeros(*states, form.hidden, **options) if form.kind == "lstm" else None  # type: ignore[call-overload]
        return int(_forward(form, data, layout.views(form, flat), flat, h, c, True)[3].numel())
