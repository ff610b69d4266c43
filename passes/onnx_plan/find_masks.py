"""`find_masks`: which stored numbers hide scores from a softmax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.facts import Mask, StoredNumbers
from amp_compiler.ir.graph import PrecisionGraph
from amp_compiler.passes.base import FunctionalPass, PassResult
from amp_compiler.passes.onnx_plan.mask_path import input_masks, mask_path
from amp_compiler.passes.onnx_plan.pinning import MARGIN, Walker
from amp_compiler.planner.draft import Draft
from amp_compiler.planner.typing import LOW

_ROUNDED = 1.01  # a stored bound is rounded to the low type


@dataclass(frozen=True)
class FindMasks(FunctionalPass[Draft]):
    """Note which huge negative stored numbers are masks of attention, and the nodes on their way to the softmax.

    They reach nothing but a softmax, through sums, products and selections. So they need not be kept: they become the
    low type's minimum, or their share of it where something is added.

    Before:

        const m: fp32[8] least=-3.4e+38
        a = onnx.Add(A=x, B=m) -> fp32[2, 8]
        s = onnx.Softmax(input=a) -> fp32[2, 8]

    After:

        const m: fp32[8] least=-3.4e+38 mask=("a", "s") terms=2.0

    Left alone: numbers that something else reads too, or that are added to more than seven others.
    """

    exact: ClassVar[bool] = True
    idempotent: ClassVar[bool] = True

    def run(self, subject: Draft) -> PassResult[Draft]:
        """Fill `masks` of the graph."""
        walker, masks = Walker(subject.graph, subject.context.low), dict[str, Mask]()
        for name, numbers in walker.stored():
            if _may_hide(numbers, walker.low):
                path, terms = mask_path(walker, name)
                if path:
                    masks[name] = Mask(path, terms)
        if masks == subject.graph.masks:
            return PassResult(subject, False)
        return PassResult(replace(subject, graph=subject.graph.changed({}, masks)), True)


def _may_hide(numbers: StoredNumbers, low: DType) -> bool:
    """True for numbers that are huge on the negative side alone."""
    largest, most = low.format.max, numbers.most
    return numbers.largest > max(largest / MARGIN, most) and most <= largest and not numbers.lost


def mask_floors(graph: PrecisionGraph, labels: Mapping[str, str], low: DType) -> dict[str, float]:
    """By stored value, what its elements are raised to, for masks of which some node runs in the low type.

    It is the mask's share of the low type's range, so that its sum with scores and other masks stays finite: a row
    that is masked whole would else be minus infinity throughout, and its softmax not a number. Inputs of the model that
    are added to scores are among them: nothing says how low these go.

    Args:
        graph: behind `find_masks`.
        labels: by name of the node, what it runs in.
        low: the 16-bit type.
    """
    masks = {**graph.masks, **input_masks(Walker(graph, low))}
    floor = -low.format.max / max((mask.terms for mask in masks.values()), default=1.0)
    return {name: floor for name, mask in masks.items() if any(labels.get(node) == LOW for node in mask.path)}


def unbounded_inputs(graph: PrecisionGraph, labels: Mapping[str, str], low: DType) -> dict[str, float]:
    """Those of `mask_floors` that are inputs, that no `Max` with a stored number bounds and nothing makes smaller.

    Args:
        graph: as for `mask_floors`.
        labels: as for `mask_floors`.
        low: as for `mask_floors`.
    """
    walker, floors = Walker(graph, low), mask_floors(graph, labels, low)

    def bounds(name: str, mask: Mask) -> bool:
        nodes = [graph.nodes[one] for one in mask.path if graph.nodes[one].op == "onnx.Max"]
        least = [number for node in nodes for index in (0, 1) if (number := walker.scalar(node, index)) is not None]
        return any(number >= floors[name] * _ROUNDED for number in least)

    def shrinks(mask: Mask) -> bool:
        nodes = [graph.nodes[one] for one in mask.path]
        factors = [[walker.scalar(node, index) or 0.0 for index in (0, 1)] for node in nodes if node.op == "onnx.Mul"]
        divisors = [walker.scalar(node, 1) or 0.0 for node in nodes if node.op == "onnx.Div"]
        return any(max(map(abs, pair)) < 1 for pair in factors) or any(abs(number) > 1 for number in divisors)

    masks = {name: mask for name, mask in input_masks(walker).items() if name in floors}
    return {name: floors[name] for name, mask in masks.items() if not bounds(name, mask) and not shrinks(mask)}
