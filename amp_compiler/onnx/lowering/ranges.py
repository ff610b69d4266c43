"""Where a low type would lose numbers that FP32 holds: stored data that do not fit, ops that overflow, calibration.

Each finding becomes a pin, which no rule overrides, with its reason in the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.graph import Node, Pin, ValueKind
from amp_compiler.onnx.lowering.lowered import Lowered
from amp_compiler.onnx.lowering.masks import mask_path
from amp_compiler.onnx.lowering.overflow import Overflows
from amp_compiler.onnx.lowering.walk import Walker
from amp_compiler.onnx.model.data import Stored, examine, tensor_of
from amp_compiler.planner.typing import LOW

MARGIN = 2.0  # calibration saw only some inputs: numbers above 65504 / MARGIN count as out of range


@dataclass
class Ranges:
    """What the analysis found.

    Args:
        pins: by node, why it must run in FP32.
        masks: by stored value, the nodes that its elements pass through on their way to a softmax.
        terms: the largest number of terms that a sum with a mask has, the mask counted.
    """

    pins: dict[str, str] = field(default_factory=dict)
    masks: dict[str, tuple[str, ...]] = field(default_factory=dict)
    terms: float = 1.0

    def floors(self, labels: Mapping[str, str], low: DType) -> dict[str, float]:
        """By stored value, what its elements are raised to, for masks of which some node runs in the low type.

        It is the mask's share of the low type's range, so that its sum with scores and other masks stays finite: a row
        that is masked whole would else be minus infinity throughout, and its softmax not a number.
        """
        floor = -low.format.max / self.terms
        return {name: floor for name, path in self.masks.items() if any(labels.get(node) == LOW for node in path)}


def pin_ranges(lowered: Lowered, ranges: Mapping[str, float] | None = None, *, powers: bool = True) -> Ranges:
    """Pin to FP32 the nodes that would lose numbers in the low type. Changes `lowered.graph`.

    1. Stored data with finite elements beyond the low type, or elements that would become zero, keep what reads them in
       FP32, and the arithmetic behind that too, up to the next product, norm or softmax: it may be as huge or as
       tiny. Elements that become zero do not count in a factor of a product or a table of rows whose largest element is
       a normal number of the low type: there they are below the rounding of the others.
    2. Huge negative data that reach nothing but a softmax, through sums, products and selections, are an attention
       mask: they become the low type's minimum, or their share of it where something is added (`Ranges.floors`).
    3. In fp16: squares that are summed, up to the root or quotient that brings them back; exponentials, but those of
       differences to a maximum.
    4. In fp16: what makes and reads a value whose calibrated magnitude lies beyond 65504 / 2.

    Args:
        lowered: as `onnx.lower` gives it.
        ranges: calibrated largest magnitude by value name.
        powers: pin what the third says.
    """
    analysis = _Analysis(lowered)
    analysis.stored()
    if lowered.low is DType.FLOAT16:
        if powers:
            Overflows(lowered, analysis.pins).patterns()
        analysis.calibrated(ranges or {})
    nodes = lowered.graph.nodes
    for name, reason in analysis.found.pins.items():
        nodes[name] = replace(nodes[name], pin=Pin("fp32", reason))
    return analysis.found


class _Analysis(Walker):
    def __init__(self, lowered: Lowered) -> None:
        self.found = Ranges()
        super().__init__(lowered, self.found.pins)
        self.exempt: set[str] = set()
        self.half = self.low.format.max / MARGIN  # what is added to a greater number may take it out of range

    # ---- stored data

    def stored(self) -> None:
        """Data that do not fit."""
        for value in list(self.graph.values.values()):
            if value.kind is ValueKind.RESULT or value.dtype is not DType.FLOAT32:
                continue
            if not self.graph.users(value.name):
                continue
            tensor = tensor_of(self.lowered.values[value.name]) if self.holds_data(value.name) else None
            if tensor is None or tensor.size == 0:
                continue
            held = examine(tensor, self.low)
            if held.over or held.lost or held.largest > self.half:
                self._misfit(value.name, held)
            elif held.infinite:
                self._exempt(mask_path(self, value.name)[0])

    def _exempt(self, path: tuple[str, ...]) -> None:
        """Note what a mask makes: its magnitude in calibration is that of the mask."""
        self.exempt.update(name for node in path for name in self.graph.nodes[node].outputs)

    def _misfit(self, name: str, held: Stored) -> None:
        if held.largest > max(self.half, held.highest) and held.highest <= self.low.format.max and not held.lost:
            path, terms = mask_path(self, name)
            if path:
                self.found.masks[name] = path
                self.found.terms = max(self.found.terms, terms)
                self._exempt(path)
                return
        if not (held.over or held.lost):
            return
        moves, sinks = self._spread(name)
        if held.over:
            reason = f"'{name}' holds numbers up to {held.largest:g}, beyond {self.low.short}"
            self._pin_onward(moves, sinks, reason, name)
            return
        reason = f"{held.lost} of the numbers in '{name}' would become zero in {self.low.short}"
        tolerant = held.largest >= self.low.format.smallest_normal
        gathered = any(self.info(node).moves == "index" for node in moves)
        if tolerant and (gathered or all(self.info(node).factors for node in sinks)):
            return
        self._pin_onward(moves, sinks, reason, name)

    def _pin_onward(self, moves: list[Node], sinks: list[Node], reason: str, name: str) -> None:
        """Pin what reads a value, and the arithmetic behind it; a softmax too, of which a mask may hide a whole row."""
        for node in (*moves, *sinks):
            self.pin(node, reason)
        pending = list(sinks)
        while pending:
            made = pending.pop()
            for node, index in [user for value in made.outputs for user in self.graph.users(value)]:
                masked = node.inputs[index].slot in self.info(node).masks
                onward = self.passes(node) or self.info(node).carries
                if (onward or masked) and node.pin is None and node.name not in self.pins:
                    self.pin(node, f"works on what was made of '{name}', which {self.low.short} does not hold")
                    pending += [node] if onward else []

    def _spread(self, name: str) -> tuple[list[Node], list[Node]]:
        """The nodes that give the elements of a value on as they are, and those that work on them."""
        moves: dict[str, Node] = {}
        sinks: dict[str, Node] = {}
        pending = [name]
        while pending:
            for node, _ in self.graph.users(pending.pop()):
                if not self.passes(node):
                    sinks[node.name] = node
                elif node.name not in moves:
                    moves[node.name] = node
                    pending += [out for out in node.outputs if self.graph.values[out].dtype is DType.FLOAT32]
        return list(moves.values()), list(sinks.values())

    def calibrated(self, ranges: Mapping[str, float]) -> None:
        """Values that were seen to be large."""
        limit = self.low.format.max / MARGIN
        for name, largest in ranges.items():
            value = self.graph.values.get(name)
            if value is None or value.dtype is not DType.FLOAT32 or largest <= limit or name in self.exempt:
                continue
            reason = f"'{name}' reached {largest:.3g} in calibration; fp16 ends at {self.low.format.max:g}"
            maker = self.graph.producer(name)
            for node in ([maker] if maker is not None else []) + [user for user, _ in self.graph.users(name)]:
                self.pin(node, reason)
