"""The way of a mask: numbers far below the scores, which are added to them or take their place before a softmax."""

from __future__ import annotations

from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.facts import Mask
from amp_compiler.ir.graph import Node, ValueKind
from amp_compiler.passes.onnx_plan.pinning import Walker

_ADDING = frozenset({"onnx.Add", "onnx.Sub", "onnx.Sum"})
_MASKING = _ADDING | {"onnx.Mul", "onnx.Min", "onnx.Max"}
_MOST = 8.0  # terms of a sum: a smaller share of FP16's range (65504 / 8) may be no more than scores are


def mask_path(walker: Walker, name: str) -> tuple[tuple[str, ...], float]:
    """The nodes from a mask to its softmax, and how many terms of a size its sum has there.

    None where its elements reach anything else, or it is added to too much. An input of the model may be compared too.
    """
    path: dict[str, float] = {}  # terms by node
    returned = set(walker.graph.outputs)
    pending = [(name, 1.0)]
    while pending:
        value, terms = pending.pop()
        if value in returned:
            return (), 1.0
        for node, index in walker.graph.users(value):
            if node.op == "onnx.Less" and value == name and walker.graph.values[name].kind is ValueKind.INPUT:
                continue
            ends = node.inputs[index].slot in walker.info(node).masks
            if not ends and not _keeps_mask(walker, node, index):
                return (), 1.0
            behind = _terms_behind(walker, node, index, terms)
            if behind > _MOST:
                return (), 1.0
            if path.get(node.name, 0.0) < behind:
                path[node.name] = behind
                pending += [] if ends else [(output, behind) for output in node.outputs]
    return tuple(path), max(path.values(), default=1.0)


def input_masks(walker: Walker) -> dict[str, Mask]:
    """The FP32 inputs that reach nothing but a softmax, and meet something computed on their way."""
    graph, masks = walker.graph, dict[str, Mask]()
    for name, value in graph.values.items():
        if value.kind is ValueKind.INPUT and value.dtype is DType.FLOAT32:
            path, terms = mask_path(walker, name)
            nodes = [graph.nodes[one] for one in path]
            makers = [walker.behind(node, index) for node in nodes for index in range(len(node.inputs))]
            if any(maker is not None and maker.name not in path for maker in makers):
                masks[name] = Mask(path, terms)
    return masks


def _keeps_mask(walker: Walker, node: Node, index: int) -> bool:
    """True where what a node makes of a mask is one."""
    if node.op == "onnx.Div":
        return index == 0 and walker.scalar(node, 1) is not None
    return walker.passes(node) or (node.op in _MASKING and not (node.op == "onnx.Sub" and index == 1))


def _terms_behind(walker: Walker, node: Node, index: int, terms: float) -> float:
    """The terms of what a node makes of a sum that a mask is in."""
    if node.op in _ADDING:
        return terms + len(node.inputs) - 1
    if walker.info(node).family == "attention":  # it adds the mask to its scores
        return terms + 1
    if node.op == "onnx.Mul":
        return terms * max(1.0, abs(walker.scalar(node, 1 - index) or 0.0))
    if node.op == "onnx.Div":
        return terms / min(1.0, abs(walker.scalar(node, 1) or 1.0))
    return terms
