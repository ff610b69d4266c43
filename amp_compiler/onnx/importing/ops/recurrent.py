"""RNN, GRU and LSTM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from amp_compiler.errors import CaptureError
from amp_compiler.onnx.importing.ops.registry import op
from amp_compiler.onnx.importing.ops.shape import reverse_sequence

_DEFAULTS = {"RNN": ("Tanh",), "GRU": ("Sigmoid", "Tanh"), "LSTM": ("Sigmoid", "Tanh", "Tanh")}
_GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
Activation = Callable[[Tensor], Tensor]


def _activation(name: str, alpha: float | None, beta: float | None) -> Activation:
    a, b = alpha, beta
    table: dict[str, Activation] = {
        "relu": torch.relu,
        "tanh": torch.tanh,
        "sigmoid": torch.sigmoid,
        "affine": lambda x: (1.0 if a is None else a) * x + (0.0 if b is None else b),
        "leakyrelu": lambda x: torch.nn.functional.leaky_relu(x, 0.01 if a is None else a),
        "thresholdedrelu": lambda x: torch.where(x > (1.0 if a is None else a), x, torch.zeros_like(x)),
        "scaledtanh": lambda x: (1.0 if a is None else a) * torch.tanh((1.0 if b is None else b) * x),
        "hardsigmoid": lambda x: torch.clamp((0.2 if a is None else a) * x + (0.5 if b is None else b), 0.0, 1.0),
        "elu": lambda x: torch.nn.functional.elu(x, 1.0 if a is None else a),
        "softsign": torch.nn.functional.softsign,
        "softplus": torch.nn.functional.softplus,
    }
    if name.lower() not in table:
        raise CaptureError(
            f"there is no recurrent op with the activation '{name}'",
            hint=f"export the model with one of {', '.join(table)}",
        )
    return table[name.lower()]


Direction = Literal["forward", "reverse", "bidirectional"]


@op("RNN", "GRU", "LSTM", many=True)
def _recurrent(
    x: Tensor, w: Tensor, r: Tensor, b: Tensor | None = None, lengths: Tensor | None = None, h: Tensor | None = None,
    c: Tensor | None = None, p: Tensor | None = None, *, kind: str, hidden_size: int = 0, activation_alpha: Any = (),
    activation_beta: Any = (), activations: Any = (), clip: float | None = None, direction: Direction = "forward",
    input_forget: int = 0, layout: int = 0, linear_before_reset: int = 0,
) -> tuple[Tensor, ...]:  # fmt: skip
    if layout:
        x = x.transpose(0, 1)
        h, c = (None if one is None else one.transpose(0, 1) for one in (h, c))
    directions, hidden = w.shape[0], r.shape[2]
    zeros = x.new_zeros(directions, x.shape[1], hidden)
    h, c = zeros if h is None else h, zeros if c is None else c
    chosen = tuple(activations) or _DEFAULTS[kind] * directions
    usual = tuple(name.lower() for name in chosen) == tuple(name.lower() for name in _DEFAULTS[kind]) * directions
    plain = clip is None and lengths is None and p is None and not input_forget and usual
    if plain and (kind != "GRU" or linear_before_reset) and direction != "reverse":
        result = _by_torch(x, w, r, b, h, c, kind)
    else:
        each = len(_DEFAULTS[kind])
        functions = [
            _activation(
                name, *(values[i] if i < len(values) else None for values in (activation_alpha, activation_beta))
            )
            for i, name in enumerate(chosen)
        ]
        cell = _Cell(kind, clip, bool(input_forget), bool(linear_before_reset), lengths)
        parts = [
            cell.run(
                x, w[d], r[d], None if b is None else b[d], h[d], c[d], None if p is None else p[d],
                functions[d * each : (d + 1) * each], direction == "reverse" or d == 1,
            )
            for d in range(directions)
        ]  # fmt: skip
        ys, hs, cs = zip(*parts, strict=True)
        result = torch.stack(ys, 1), torch.stack(hs), torch.stack(cs)
    y, last_h, last_c = result
    if layout:
        y, last_h, last_c = y.permute(2, 0, 1, 3), last_h.transpose(0, 1), last_c.transpose(0, 1)
    return (y, last_h, last_c) if kind == "LSTM" else (y, last_h)


def _torch_order(weight: Tensor, kind: str) -> Tensor:
    """Gates from ONNX's order (LSTM iofc, GRU zrh) to torch's (ifgo, rzn)."""
    parts = weight.chunk(_GATES[kind])
    order = {"RNN": (0,), "GRU": (1, 0, 2), "LSTM": (0, 2, 3, 1)}[kind]
    return torch.cat([parts[i] for i in order])


def _by_torch(
    x: Tensor, w: Tensor, r: Tensor, b: Tensor | None, h: Tensor, c: Tensor, kind: str
) -> tuple[Tensor, Tensor, Tensor]:
    weights: list[Tensor] = []
    for d in range(w.shape[0]):
        weights += [_torch_order(w[d], kind), _torch_order(r[d], kind)]
        if b is not None:
            weights += [_torch_order(half, kind) for half in b[d].chunk(2)]
    options = (b is not None, 1, 0.0, False, w.shape[0] == 2, False)
    if kind == "LSTM":
        y, last_h, last_c = torch.lstm(x, [h, c], weights, *options)
    else:
        y, last_h = (torch.gru if kind == "GRU" else torch.rnn_tanh)(x, h, weights, *options)
        last_c = c
    return y.unflatten(2, (w.shape[0], r.shape[2])).transpose(1, 2), last_h, last_c


class _Cell:
    """One direction of a layer, step by step."""

    def __init__(self, kind: str, clip: float | None, coupled: bool, linear: bool, lengths: Tensor | None) -> None:
        self.kind, self.clip, self.coupled, self.linear, self.lengths = kind, clip, coupled, linear, lengths

    def run(
        self, x: Tensor, w: Tensor, r: Tensor, b: Tensor | None, h: Tensor, c: Tensor, p: Tensor | None,
        functions: list[Activation], backwards: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Outputs of all steps [time, batch, hidden], the last hidden and the last cell state."""
        gates = _GATES[self.kind]
        wb, rb = (torch.zeros_like(w[:, 0]),) * 2 if b is None else b.chunk(2)
        x = self._turned(x) if backwards else x
        inputs = torch.matmul(x, w.t()) + wb
        outputs = []
        for step in range(x.shape[0]):
            before = h, c
            parts = inputs[step].chunk(gates, -1)
            h, c = getattr(self, f"_{self.kind.lower()}")(parts, h, c, r.chunk(gates), rb.chunk(gates), p, functions)
            if self.lengths is not None:
                running = (step < self.lengths).reshape(-1, 1)
                outputs.append(torch.where(running, h, torch.zeros_like(h)))
                h, c = torch.where(running, h, before[0]), torch.where(running, c, before[1])
            else:
                outputs.append(h)
        y = torch.stack(outputs)
        return self._turned(y) if backwards else y, h, c

    def _turned(self, x: Tensor) -> Tensor:
        return x.flip(0) if self.lengths is None else reverse_sequence(x, self.lengths, 1, 0)

    def _clipped(self, x: Tensor) -> Tensor:
        return x if self.clip is None else torch.clamp(x, -self.clip, self.clip)

    def _rnn(self, x: Any, h: Tensor, c: Tensor, r: Any, b: Any, p: Any, f: Any) -> tuple[Tensor, Tensor]:
        return f[0](self._clipped(x[0] + h @ r[0].t() + b[0])), c

    def _gru(self, x: Any, h: Tensor, c: Tensor, r: Any, b: Any, p: Any, f: Any) -> tuple[Tensor, Tensor]:
        update = f[0](self._clipped(x[0] + h @ r[0].t() + b[0]))
        reset = f[0](self._clipped(x[1] + h @ r[1].t() + b[1]))
        inner = reset * (h @ r[2].t() + b[2]) if self.linear else (reset * h) @ r[2].t() + b[2]
        return (1 - update) * f[1](self._clipped(x[2] + inner)) + update * h, c

    def _lstm(self, x: Any, h: Tensor, c: Tensor, r: Any, b: Any, p: Any, f: Any) -> tuple[Tensor, Tensor]:
        i, o, forget, cell = (x[k] + h @ r[k].t() + b[k] for k in range(4))
        peep = p.chunk(3) if p is not None else None
        i = f[0](self._clipped(i + peep[0] * c if peep else i))
        forget = 1 - i if self.coupled else f[0](self._clipped(forget + peep[2] * c if peep else forget))
        c = forget * c + i * f[1](self._clipped(cell))
        o = f[0](self._clipped(o + peep[1] * c if peep else o))
        return o * f[2](c), c
