"""What a model does with its inputs that tells their numbers: tables that they pick rows of, and comparisons."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

_MOVES = frozenset({"Cast", "Identity", "Reshape", "Unsqueeze", "Squeeze", "Flatten", "Transpose", "Expand", "Clip"})
_COMPARISONS = frozenset({"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"})


class Tables:
    """What the main graph looks up with an input, and compares it with."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._stored = {tensor.name: tensor for tensor in graph.initializer}
        self._readers: dict[str, list[onnx.NodeProto]] = {}
        for node in graph.node:
            for name in node.input:
                self._readers.setdefault(name, []).append(node)
            value = next((attribute.t for attribute in node.attribute if attribute.name == "value"), None)
            if node.op_type == "Constant" and value is not None:
                self._stored[node.output[0]] = value

    def rows(self, value: str) -> Iterator[int]:
        """The rows of each table that a value picks rows of, less a stored offset that is added to it before."""
        for name, offset in self._moved(value, 0.0):
            for node in self._readers.get(name, ()):
                if node.op_type == "Gather" and node.input[1] == name and node.input[0] in self._stored:
                    axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
                    yield self._stored[node.input[0]].dims[axis] - int(offset)

    def bounds(self, value: str) -> Iterator[float]:
        """The stored numbers that a value is compared with, as they are before the offset is added."""
        for name, offset in self._moved(value, 0.0):
            for node in self._readers.get(name, ()):
                if node.op_type in _COMPARISONS:
                    number = self._number(node.input[1] if node.input[0] == name else node.input[0])
                    if number is not None:
                        yield number - offset

    def _moved(self, value: str, offset: float) -> Iterator[tuple[str, float]]:
        """The value, and what casts, moves and stored offsets make of it, each with its offset."""
        pending, seen = [(value, offset)], {value}
        while pending:
            name, offset = pending.pop()
            yield name, offset
            for node in self._readers.get(name, ()):
                step: float | None = None
                if node.op_type in _MOVES and node.input[0] == name:
                    step = 0.0
                elif node.op_type == "Add" or (node.op_type == "Sub" and node.input[0] == name):
                    step = self._number(node.input[1] if node.input[0] == name else node.input[0])
                if step is not None and node.output[0] not in seen:
                    seen.add(node.output[0])
                    pending.append((node.output[0], offset + (step if node.op_type != "Sub" else -step)))

    def _number(self, name: str) -> float | None:
        """The number that is stored under a name; `None` where there is none, or more than one."""
        tensor = self._stored.get(name)
        if tensor is None or tensor.data_location != TensorProto.DEFAULT or np.prod(tensor.dims, dtype=int) != 1:
            return None
        return float(numpy_helper.to_array(tensor).reshape(-1)[0])
