"""Walks over a lowered ONNX graph, and the pins that they lead to."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from amp_compiler.ir.graph import STORED_KINDS, Node
from amp_compiler.onnx.lowering.lowered import Lowered
from amp_compiler.onnx.model.data import array_of, tensor_of
from amp_compiler.policy.op_table import op_table
from amp_compiler.policy.rules import OpInfo


class Walker:
    """Questions about the neighbourhood of nodes.

    Args:
        lowered: the lowered model.
        pins: by node, why it must run in FP32; filled by `pin`.
    """

    def __init__(self, lowered: Lowered, pins: dict[str, str]) -> None:
        self.lowered, self.graph, self.low, self.pins = lowered, lowered.graph, lowered.low, pins
        self._ops = op_table()

    def info(self, node: Node) -> OpInfo:
        """What the op table says of a node."""
        return self._ops.info(node.op)

    def pin(self, node: Node, reason: str) -> None:
        """Pin a node, unless the model's own text has pinned it; the first reason stands."""
        if node.pin is None:
            self.pins.setdefault(node.name, reason)

    def passes(self, node: Node) -> bool:
        """True for a node that gives elements on as they are."""
        cast = node.pin is not None and node.pin.precision == "cast" and node.op == "onnx.Cast"
        return (cast or self.info(node).moves != "") and self._float_result(node)

    def _float_result(self, node: Node) -> bool:
        return any(self.graph.values[name].dtype.is_float for name in node.outputs)

    def holds_data(self, name: str) -> bool:
        """True for a value with stored data."""
        return self.graph.values[name].kind in STORED_KINDS

    def users(self, node: Node) -> Iterator[Node]:
        """The nodes that read what a node makes."""
        for name in node.outputs:
            for user, _ in self.graph.users(name):
                yield user

    def scalar(self, node: Node, index: int) -> float | None:
        """The number that an operand holds, where it is stored and but one."""
        if index >= len(node.inputs):
            return None
        name = node.inputs[index].value
        value = self.graph.values[name]
        if value.numel != 1 or not self.holds_data(name):
            return None
        tensor = tensor_of(self.lowered.values[name])
        if tensor is None or tensor.size != 1 or not (value.dtype.is_float or value.dtype.value.startswith("int")):
            return None
        return float(np.asarray(array_of(tensor), np.float64).reshape(-1)[0])

    def behind(self, node: Node, index: int) -> Node | None:
        """What made an operand, moves of elements looked through."""
        maker = self.graph.producer(node.inputs[index].value)
        while maker is not None and self.passes(maker):
            maker = self.graph.producer(maker.inputs[0].value)
        return maker

    def origin(self, node: Node, index: int) -> str:
        """The value behind an operand, casts looked through."""
        name = node.inputs[index].value
        while True:
            maker = self.graph.producer(name)
            if maker is None or maker.op != "onnx.Cast":
                return name
            name = maker.inputs[0].value


def is_square(node: Node) -> bool:
    """True for a product of a value with itself."""
    return node.op == "onnx.Mul" and len(node.inputs) == 2 and node.inputs[0].value == node.inputs[1].value
