"""Where a converted ONNX model stops being finite: the ranges of its values beside the original's."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import onnx


@dataclass(frozen=True, slots=True)
class BadNode:
    """A node with a result that is not finite although the original's is.

    Args:
        node: its name in the converted model; empty for an unnamed one.
        op: its operator.
        value: the result.
        original: largest magnitude of the value in the original; NaN where the original has no such value.
    """

    node: str
    op: str
    value: str
    original: float


class Trace:
    """Looks for values that are not finite in the converted model although the original's are.

    A value that the original lacks stands for the one that it is a cast of, or that is a cast of it. Where there is
    none either, it counts if no result that its node reads is the cause.

    Args:
        model: the converted model.
        known: the original's values.
    """

    def __init__(self, model: onnx.ModelProto, known: Iterable[str]) -> None:
        self._model = model
        self._reads = {name: tuple(node.input) for node in model.graph.node for name in node.output}
        self._same = _counterparts(model, set(known))
        self._ranges: dict[str, float] = {}
        self._broken: set[str] = set()

    def add(self, before: dict[str, float], after: dict[str, float]) -> None:
        """Compare one batch's ranges."""
        for name, largest in before.items():
            self._ranges[name] = max(self._ranges.get(name, 0.0), largest)
        infinite = {name for name, largest in after.items() if math.isinf(largest)}
        for name in infinite:
            twin = self._same.get(name)
            if twin is None and not infinite.isdisjoint(self._reads.get(name, ())):
                continue
            if twin is None or math.isfinite(before.get(twin, 0.0)):
                self._broken.add(name)

    def result(self) -> tuple[BadNode | None, int]:
        """The first such node, and how many such values there are."""
        for node in self._model.graph.node:
            for name in node.output:
                if name in self._broken:
                    largest = self._ranges.get(self._same.get(name, ""), math.nan)
                    return BadNode(node.name, node.op_type, name, largest), len(self._broken)
        return None, len(self._broken)


def _counterparts(model: onnx.ModelProto, known: set[str]) -> dict[str, str]:
    """The original's value that each value of the converted model stands for."""
    same = {name: name for name in known}
    casts = [(node.input[0], node.output[0]) for node in model.graph.node if node.op_type == "Cast" and not node.domain]
    for source, target in casts:
        if source in same:
            same.setdefault(target, same[source])
    for source, target in reversed(casts):
        if target in same:
            same.setdefault(source, same[target])
    return same
