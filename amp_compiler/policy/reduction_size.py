"""How many elements one output element of a node sums over; how an op counts them is its field `sums` in the table."""

from __future__ import annotations

import math
from collections.abc import Callable

from amp_compiler.ir.graph import Attr, Node, PrecisionGraph, Value
from amp_compiler.policy.rules import OpInfo


def reduction_size(graph: PrecisionGraph, node: Node, sums: str) -> int | None:
    """How many elements one output element of `node` sums over.

    Products of matrices give their inner dimension, convolutions the taps of one filter, normalisations and softmax the
    elements of one group, reductions the elements of the input over those of the output.

    Args:
        graph: the graph that the node is of.
        node: the node.
        sums: the field of its op, a key of `SIZES`, or empty.

    Returns:
        The number, or `None` where shapes are symbolic or unknown, or where the op sums nothing: then no rule with a
        `reduction_size` matches.
    """
    data = next((value for _, value in graph.operands(node) if value.dtype.is_float), None)
    count = SIZES.get(sums)
    return None if data is None or count is None else count(graph, node, data)


def flops(graph: PrecisionGraph, node: Node, info: OpInfo) -> int | None:
    """How many operations on numbers a node takes, a multiply-add counted as two; `None` where that is not known.

    Args:
        graph: the graph that the node is of.
        node: the node.
        info: what the op table says of its op.
    """
    results = graph.values[node.outputs[0]].numel if node.outputs else 0
    if info.family in ("matmul", "convolution"):
        terms = reduction_size(graph, node, info.sums)
        return None if terms is None else 2 * results * terms
    if info.family == "attention":  # scores, and means of the values by them
        keys = next((value.shape for operand, value in graph.operands(node) if operand.slot in ("key", "K")), None)
        return 4 * results * keys[-2] if keys and isinstance(keys[-2], int) else None
    return {"view": 0, "recurrent": None}.get(info.family, results)


def _sizes(value: Value) -> tuple[int, ...] | None:
    """The dimensions where all are numbers."""
    if value.shape is None:
        return None
    known = tuple(size for size in value.shape if isinstance(size, int))
    return known if len(known) == len(value.shape) else None


def _inner(graph: PrecisionGraph, node: Node, data: Value) -> int | None:
    """The inner dimension of a product of matrices: the last one of the left factor."""
    if not data.shape:
        return None
    size = data.shape[-2 if node.attrs.get("transA") and data.rank == 2 else -1]
    return size if isinstance(size, int) else None


def _inner_behind_summand(graph: PrecisionGraph, node: Node, data: Value) -> int | None:
    """The inner dimension of a product of matrices that is added to something, which is the first operand."""
    factors = [value for operand, value in graph.operands(node) if operand.slot not in ("self", "input", "C")]
    return _inner(graph, node, factors[0] if factors else data)


def _taps(graph: PrecisionGraph, node: Node, data: Value) -> int | None:
    """Channels of one group times the elements of the kernel: all of the weight but its dimension of filters."""
    if node.attrs.get("transposed") is True:
        return _taps_transposed(graph, node, data)
    sizes = _weight(graph, node)
    return math.prod(sizes[1:]) if sizes else None


def _taps_transposed(graph: PrecisionGraph, node: Node, data: Value) -> int | None:
    """The same of a transposed convolution, whose weight has the channels of the input first."""
    sizes = _weight(graph, node)
    groups = node.attrs.get("groups", node.attrs.get("group", 1))
    if not sizes or not isinstance(groups, int) or groups <= 0:
        return None
    return sizes[0] * math.prod(sizes[2:]) // groups


def _weight(graph: PrecisionGraph, node: Node) -> tuple[int, ...] | None:
    weight = next((value for operand, value in graph.operands(node) if operand.slot in ("weight", "W")), None)
    return None if weight is None else _sizes(weight)


def _ratio(graph: PrecisionGraph, node: Node, data: Value) -> int | None:
    """Elements read for each one written."""
    result = graph.values.get(node.outputs[0]) if node.outputs else None
    if result is None or _sizes(data) is None or _sizes(result) is None or result.numel == 0:
        return None
    return max(1, data.numel // result.numel)


def _running(graph: PrecisionGraph, node: Node, data: Value) -> int | None:
    """The dimension that a running sum goes along."""
    if _ratio(graph, node, data) is None:
        return None
    return _along(data, node.attrs.get("dim", node.attrs.get("axis")))


def _axis(graph: PrecisionGraph, node: Node, data: Value) -> int | None:
    """The dimension that is named, the last one without a name."""
    return _along(data, node.attrs.get("dim", node.attrs.get("axis", -1)))


def _along(data: Value, axis: Attr) -> int | None:
    if not isinstance(axis, int) or not data.shape or not -len(data.shape) <= axis < len(data.shape):
        return None
    size = data.shape[axis]
    return size if isinstance(size, int) else None


def _features(graph: PrecisionGraph, node: Node, data: Value) -> int | None:
    """Elements of the trailing dimensions that share one mean."""
    sizes = _sizes(data)
    if sizes is None or len(sizes) < 2:
        return None
    axis = node.attrs.get("axis")
    if isinstance(axis, int) and -len(sizes) <= axis < len(sizes):
        return math.prod(sizes[axis:])
    shape = node.attrs.get("normalized_shape")
    if not isinstance(shape, tuple):
        shape = tuple(size for key, size in node.attrs.items() if key.startswith("normalized_shape."))
    return math.prod(sizes[-len(shape) :]) if shape else sizes[-1]


def _batch(graph: PrecisionGraph, node: Node, data: Value) -> int | None:
    """Elements of one channel in the whole batch."""
    sizes = _sizes(data)
    return None if sizes is None or len(sizes) < 2 else math.prod(sizes) // max(1, sizes[1])


def _channel(graph: PrecisionGraph, node: Node, data: Value) -> int | None:
    """Elements of one channel of one sample."""
    sizes = _sizes(data)
    return None if sizes is None or len(sizes) < 2 else math.prod(sizes[2:])


def _channels(graph: PrecisionGraph, node: Node, data: Value) -> int | None:
    """Elements of one group of channels of one sample."""
    sizes = _sizes(data)
    groups = node.attrs.get("num_groups", node.attrs.get("group"))
    if sizes is None or len(sizes) < 2 or not isinstance(groups, int) or groups <= 0:
        return None
    return math.prod(sizes[1:]) // groups


SIZES: dict[str, Callable[[PrecisionGraph, Node, Value], int | None]] = {
    "inner": _inner,
    "inner_behind_summand": _inner_behind_summand,
    "taps": _taps,
    "taps_transposed": _taps_transposed,
    "ratio": _ratio,
    "running": _running,
    "axis": _axis,
    "features": _features,
    "batch": _batch,
    "channel": _channel,
    "channels": _channels,
}
