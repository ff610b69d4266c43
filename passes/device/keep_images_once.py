"""`KeepImagesOnce`: images lie in memory for the gradient of a convolution as they do for the convolution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from amp_compiler.fx.torch_private.inductor import puts_channels_last
from amp_compiler.passes.base import LatePass

_CALL = "call_function"
_CONVOLUTION = torch.ops.aten.convolution.default
_CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default


@dataclass(frozen=True)
class KeepImagesOnce(LatePass):
    """Say that the images which a convolution's gradient reads lie with their channels last.

    Where Inductor (torch 2.13) lets convolutions read their images so, it still makes what a gradient reads in the
    layout that was traced, and then copies it for both: each image would be kept twice.

    Before::

        relu: fp32[2, 8, 6, 6] = aten.relu.default(made)
        both: (fp32[2, 8, 6, 6], fp32[8, 8, 3, 3], none) = aten.convolution_backward.default(grad, relu, w, …)

    After::

        relu: fp32[2, 8, 6, 6]{288, 1, 48, 8} = aten.relu.default(made)
        both: (fp32[2, 8, 6, 6], fp32[8, 8, 3, 3], none) = aten.convolution_backward.default(grad, relu, w, …)

    Left alone: inputs and results of the graph, whose layout others rely on; sequences and volumes; and all where
    Inductor reads images as they were traced.
    """

    exact: ClassVar[bool] = True
    idempotent: ClassVar[bool] = True

    def awaited(self, graph: fx.Graph) -> bool:
        """Whether it has a convolution."""
        return any(node.target is _CONVOLUTION for node in graph.nodes)

    def rewrite(self, graph: fx.Graph) -> bool:
        """Change the examples of images; whether there were any."""
        gradients = [node for node in graph.nodes if node.target is _CONVOLUTION_BACKWARD]
        if not gradients or not puts_channels_last(graph):
            return False
        returned, modified = set(graph.output_node().all_input_nodes), False
        for image in dict.fromkeys(source for node in gradients for source in node.args[:2]):
            value = image.meta.get("val") if isinstance(image, fx.Node) else None
            if isinstance(value, torch.Tensor) and value.dim() == 4 and image.op == _CALL and image not in returned:
                image.meta["val"] = value.contiguous(memory_format=torch.channels_last)
                modified |= image.meta["val"] is not value  # which it is where it lies so already
        return modified
