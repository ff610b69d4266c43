"""Max-poolings of a graph that holds forward and backward, with places in one byte; see `runtime.pooling`."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from amp_compiler.fx.graph import node_tensor, schema_argument
from amp_compiler.ops import pooling
from amp_compiler.ops.cpu import pooling as cpu_pooling

_ATEN = torch.ops.aten
_POOL = _ATEN.max_pool2d_with_indices.default
_POOL_BACKWARD = _ATEN.max_pool2d_with_indices_backward.default
_MASK = _ATEN.threshold_backward.default


def use_offsets(graph: fx.Graph) -> None:
    """Let every max-pooling on a CPU note offsets, where nothing but its own backward reads the indices.

    A ReLU's mask in front of it moves behind it: the gradient is not zero only where the pixel is the one that was
    taken, which is the pooling's result. So neither needs the images any more.

    Args:
        graph: an ATen graph of forward and backward whose nodes carry their fake tensors as `meta["val"]`; changed in
            place.
    """
    for node in graph.find_nodes(op="call_function", target=_POOL):
        largest, indices = (_item(node, place) for place in (0, 1))
        if largest is None or indices is None or not _fits(node):
            continue
        (backward, *more) = indices.users
        if backward.target is _POOL_BACKWARD and not more:
            _move_mask(graph, backward, largest)
            _replace(graph, node, largest, backward)
            for dead in (backward, largest, indices, node):
                graph.erase_node(dead)


def _replace(graph: fx.Graph, node: fx.Node, largest: fx.Node, backward: fx.Node) -> None:
    x = node.all_input_nodes[0]
    settings, ceil_mode = _settings(node), bool(schema_argument(node, "ceil_mode"))
    with graph.inserting_before(node):
        made = graph.call_function(torch.ops.amp_compiler.max_pool.default, (x, *settings, ceil_mode))
        taken, offsets = (graph.call_function(operator.getitem, (made, place)) for place in (0, 1))
    with graph.inserting_before(backward):
        arguments = (backward.args[0], offsets, list(x.meta["val"].shape), *settings)
        gathered = graph.call_function(torch.ops.amp_compiler.max_pool_backward.default, arguments)
    taken.meta, gathered.meta = dict(largest.meta), dict(backward.meta)
    largest.replace_all_uses_with(taken)
    backward.replace_all_uses_with(gathered)


def _fits(node: fx.Node) -> bool:
    """Whether the operators take a pooling: images of known sizes on a CPU, and a window that is not too large."""
    images = node_tensor(node.all_input_nodes[0])
    if images is None or not all(isinstance(size, int) for size in images.shape) or not cpu_pooling.can_run(images):
        return False
    down, across = _settings(node)[0]
    return down * across <= pooling.MOST


def _settings(node: fx.Node) -> list[list[int]]:
    """Kernel, stride, padding and dilation."""
    kernel, stride, padding, dilation = (
        _pair(schema_argument(node, name)) for name in ("kernel_size", "stride", "padding", "dilation")
    )
    return [kernel, stride or kernel, padding, dilation]


def _item(node: fx.Node, place: int) -> fx.Node | None:
    """The only node that takes a result of a pooling."""
    found = [user for user in node.users if user.target is operator.getitem and user.args[1] == place]
    return found[0] if len(found) == 1 and len(node.users) == 2 and found[0].users else None


def _pair(value: Any) -> list[int]:
    """Two numbers from one or two; none from none."""
    return (list(value) * 2)[:2] if isinstance(value, (list, tuple)) else [value, value]


def _move_mask(graph: fx.Graph, backward: fx.Node, largest: fx.Node) -> None:
    """Let the mask of a ReLU work on the gradient of the pooling's result instead of that of its images."""
    for mask in [user for user in backward.users if user.target is _MASK]:
        if mask.args[0] is not backward or mask.args[1] is not backward.args[1] or len(backward.users) > 1:
            continue
        with graph.inserting_before(backward):
            masked = graph.call_function(_MASK, (backward.args[0], largest, mask.args[2]))
        masked.meta = dict(largest.meta)
        backward.args = (masked, *backward.args[1:])
        mask.replace_all_uses_with(backward)
        graph.erase_node(mask)
