"""`ChannelsLast`: one memory layout for what convolutions read, in graphs that hold forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import fx

from amp_compiler.fx.graph import node_tensor, refresh, results_of
from amp_compiler.passes.base import InPlacePass, PassResult

_ATEN = torch.ops.aten
_CONVOLUTION = _ATEN.convolution.default
_BACKWARD = _ATEN.convolution_backward.default
_MASK = _ATEN.threshold_backward.default


@dataclass(frozen=True)
class ChannelsLast(InPlacePass):
    """Let convolutions on a CPU and their backwards read the same copies of images and weights, channels last.

    oneDNN wants channels last. Where the graph says otherwise, Inductor gives each reader a copy of its own: one for
    the forward, one for the backward, and a third in the layout of the graph for the mask of a ReLU. Results keep their
    layouts.

    Before (`x` and `w` contiguous)::

        convolution = aten.convolution.default(x, w, …)
        convolution_backward = aten.convolution_backward.default(g, x, w, …)

    After::

        clone = aten.clone.default(x, memory_format=torch.channels_last)
        clone_1 = aten.clone.default(w, memory_format=torch.channels_last)
        convolution = aten.convolution.default(clone, clone_1, …)
        convolution_backward = aten.convolution_backward.default(g, clone, clone_1, …)

    Left alone: a convolution without a backward in the graph, other devices, other than two dimensions.
    """

    name: ClassVar[str] = "channels_last"
    exact: ClassVar[bool] = False
    idempotent: ClassVar[bool] = True
    skippable: ClassVar[bool] = True

    def run(self, subject: fx.GraphModule) -> PassResult[fx.GraphModule]:
        """Rewrite in place."""
        modified = _share_copies(subject.graph)
        if modified:
            refresh(subject)
        return PassResult(subject, modified)


def _share_copies(graph: fx.Graph) -> bool:
    """Put the copies in; whether there are any."""
    first: dict[fx.Node, int] = {}  # of the readers' arguments: the images, which the weight follows
    for node in graph.nodes:
        backwards = _backwards(node)
        if backwards:
            first |= {node: 0, **dict.fromkeys(backwards, 1)}
    if not first:
        return False
    copies: dict[fx.Node, fx.Node] = {}
    for reader in [node for node in graph.nodes if node in first]:
        for place in (first[reader], first[reader] + 1):
            operand: Any = reader.args[place]
            if _is_copy(operand):
                continue
            if operand not in copies:
                with graph.inserting_before(reader):
                    copies[operand] = _clone(graph, operand, torch.channels_last)
            reader.update_arg(place, copies[operand])
    if not copies:
        return False
    places = {node: place for place, node in enumerate(graph.nodes)}
    for operand, copy in copies.items():
        for mask in [user for user in operand.users if user.target is _MASK and user.args[1] is operand]:
            if places[copy] < places[mask]:
                mask.update_arg(1, copy)
    for node in graph.find_nodes(op="call_function", target=_ATEN.view.default):
        node.target = _ATEN.reshape.default  # which does the same to any layout
    _keep_results(graph)
    return True


def _is_copy(node: fx.Node) -> bool:
    return node.target is _ATEN.clone.default and node.kwargs.get("memory_format") is torch.channels_last


def _backwards(node: fx.Node) -> list[fx.Node]:
    """The backwards of a convolution of images on a CPU."""
    if node.op != "call_function" or node.target is not _CONVOLUTION:
        return []
    images, weight = cast("list[fx.Node]", node.args[:2])
    tensors = [node_tensor(one) for one in (images, weight)]
    if not all(one is not None and one.device.type == "cpu" and one.dim() == 4 for one in tensors):
        return []
    return [user for user in images.users if user.target is _BACKWARD and user.args[1:3] == (images, weight)]


def _clone(graph: fx.Graph, node: fx.Node, memory_format: torch.memory_format) -> fx.Node:
    return graph.create_node("call_function", _ATEN.clone.default, (node,), {"memory_format": memory_format}, "clone")


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
