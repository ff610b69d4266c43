"""`OpenCells`: GRU and LSTM cells on a CPU as the operators that they are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from amp_compiler.fx.graph import call_before, node_tensor, replace_call
from amp_compiler.passes.base import RewritePass

aten = torch.ops.aten


@dataclass(frozen=True)
class OpenCells(RewritePass):
    """Write a GRU or LSTM cell on a CPU out, as torch runs it there.

    A cell is called once per step, and hands its state on to the next call. As one low op it would round the state each
    time. Written out, its products are low, and what updates the state runs in the widest type of its inputs: a state
    that is FP32 stays FP32, as under torch.autocast. Rules see the operators, and the module that they stand in.

    Before::

        state: fp32[2, 4] = aten.gru_cell.default(x, h, w_ih, w_hh, b_ih, b_hh)

    After::

        linear: fp32[2, 12] = aten.linear.default(x, w_ih, b_ih)
        linear_1: fp32[2, 12] = aten.linear.default(h, w_hh, b_hh)
        …                                                     # three gates: slices, sums, sigmoid and tanh
        mul_1: fp32[2, 4] = aten.mul.Tensor(sub, sigmoid_1)
        add_3: fp32[2, 4] = aten.add.Tensor(mul_1, tanh)

    Left alone: other devices, whose cells are kernels; plain cells, whose state torch.autocast rounds too; a graph that
    is not planned.

    Args:
        low: the 16-bit type; `None` where nothing is planned.
    """

    low: torch.dtype | None = None
    exact: ClassVar[bool] = False
    skippable: ClassVar[bool] = True
    idempotent: ClassVar[bool] = True

    def rewrite(self, graph: fx.Graph) -> bool:
        """Rewrite in place."""
        cells = [node for node in graph.nodes if self.low is not None and _is_cell_on_cpu(node)]
        for node in cells:
            _open(node)
        return bool(cells)


def _is_cell_on_cpu(node: fx.Node) -> bool:
    tensor = node_tensor(node.args[0]) if node.target in _CELLS else None  # type: ignore[arg-type]
    return tensor is not None and tensor.device.type == "cpu"


def _open(cell: fx.Node) -> None:
    def call(op: Any, *args: Any) -> fx.Node:
        node = call_before(cell, op, args, "")
        node.meta = {**cell.meta, "val": node.meta["val"]}
        return node

    results = _CELLS[cell.target](call, *cell.args, **cell.kwargs)
    replace_call(cell, results if len(results) > 1 else results[0])


Call = Callable[..., fx.Node]


def _gates(call: Call, sums: fx.Node, count: int) -> list[fx.Node]:
    width = sums.meta["val"].shape[-1] // count
    return [call(aten.slice.Tensor, sums, -1, place * width, (place + 1) * width) for place in range(count)]


def _gru_cell(
    call: Call, input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None
) -> list[fx.Node]:  # fmt: skip
    of_data = _gates(call, call(aten.linear.default, input, w_ih, b_ih), 3)
    kept = _gates(call, call(aten.linear.default, hx, w_hh, b_hh), 3)
    reset = call(aten.sigmoid.default, call(aten.add.Tensor, kept[0], of_data[0]))
    update = call(aten.sigmoid.default, call(aten.add.Tensor, kept[1], of_data[1]))
    new = call(aten.tanh.default, call(aten.add.Tensor, of_data[2], call(aten.mul.Tensor, kept[2], reset)))
    return [call(aten.add.Tensor, call(aten.mul.Tensor, call(aten.sub.Tensor, hx, new), update), new)]


def _lstm_cell(
    call: Call, input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None
) -> list[fx.Node]:  # fmt: skip
    state, memory = hx
    products = call(aten.linear.default, state, w_hh, b_hh), call(aten.linear.default, input, w_ih, b_ih)
    enter, forget, new, out = _gates(call, call(aten.add.Tensor, *products), 4)
    enter, forget, out = (call(aten.sigmoid.default, one) for one in (enter, forget, out))
    added = call(aten.mul.Tensor, enter, call(aten.tanh.default, new))
    memory = call(aten.add.Tensor, call(aten.mul.Tensor, forget, memory), added)
    return [call(aten.mul.Tensor, out, call(aten.tanh.default, memory)), memory]


_CELLS: dict[Any, Callable[..., list[fx.Node]]] = {
    aten.gru_cell.default: _gru_cell,
    aten.lstm_cell.default: _lstm_cell,
}
