"""One memory layout for what convolutions read, in graphs that hold forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from amp_compiler.fx_tools import node_tensor, results_of

_ATEN = torch.ops.aten
_CONVOLUTIONS = (_ATEN.convolution.default, _ATEN.conv2d.default)
_BACKWARD = _ATEN.convolution_backward.default
_MASK = _ATEN.threshold_backward.default


def keep_channels_last(graph: fx.Graph) -> None:
    """Let convolutions on a CPU and their backwards read the same copies of images and weights, channels last.

    oneDNN wants channels last. Inductor gives each convolution a copy of its own where the graph says otherwise: one for
    the forward, one for the backward, and a third in the graph's layout for a ReLU's mask.

    Args:
        graph: an ATen graph without effects on aliases, whose nodes carry their fake tensors as `meta["val"]`; changed
            in place. Results keep their layouts.
    """
    pairs = [(node, backward) for node in graph.nodes for backward in _backwards(node)]
    if not pairs:
        return
    copies: dict[tuple[fx.Node, fx.Node | None], fx.Node] = {}
    for convolution, backward in pairs:
        for reader, first in ((convolution, 0), (backward, 1)):
            for place in (first, first + 1):
                operand = reader.args[place]
                # With one channel, a layout that several nodes read counts as contiguous.
                alone = reader if operand.meta["val"].shape[1] == 1 else None
                if (operand, alone) not in copies:
                    with graph.inserting_before(convolution if alone is None else reader):
                        copies[operand, alone] = _clone(graph, operand, torch.channels_last)
                reader.update_arg(place, copies[operand, alone])
    for (operand, alone), copy in copies.items():
        for mask in [user for user in operand.users if user.target is _MASK and user.args[1] is operand]:
            if alone is None:
                mask.update_arg(1, copy)
    for node in graph.find_nodes(op="call_function", target=_ATEN.view.default):
        node.target = _ATEN.reshape.default  # which does the same to any layout
    _keep_results(graph)


def _backwards(node: fx.Node) -> list[fx.Node]:
    """The backwards of a convolution of images on a CPU."""
    if node.op != "call_function" or node.target not in _CONVOLUTIONS:
        return []
    images, weight = node.args[:2]
    tensors = [node_tensor(one) for one in (images, weight)]  # type: ignore[arg-type]
    if not all(one is not None and one.device.type == "cpu" and one.dim() == 4 for one in tensors):
        return []
    return [user for user in images.users if user.target is _BACKWARD and user.args[1:3] == (images, weight)]  # type: ignore[union-attr]


def _clone(graph: fx.Graph, node: fx.Node, memory_format: torch.memory_format) -> fx.Node:
    return graph.call_function(_ATEN.clone.default, (node,), {"memory_format": memory_format})


def _keep_results(graph: fx.Graph) -> None:
    output = graph.output_node()
    kept: dict[fx.Node, fx.Node] = {}

    def as_before(result: Any) -> Any:
        tensor = node_tensor(result)
        if tensor is None or tensor.dim() != 4 or not tensor.is_contiguous():
            return result
        if result not in kept:
            with graph.inserting_before(output):
                kept[result] = _clone(graph, result, torch.contiguous_format)
        return kept[result]

    output.args = (fx.node.map_arg(tuple(results_of(graph)), as_before),)
