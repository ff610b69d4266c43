"""The update of a step in subgraphs: a graph that takes what forward and backward have made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_compiler.fx.captured import Captured, Input, Source
from amp_compiler.fx.garbage import without_full_collections
from amp_compiler.training.build import Begun
from amp_compiler.training.loss_module import LossModule


@dataclass(frozen=True)
class Made:
    """What forward and backward of a step give.

    Args:
        loss: detached.
        aux: what the loss function returned beside it, detached.
        gradients: by qualified name of the parameter; scaled, in its type and layout.
        buffers: the new values of the buffers that forward wrote, by qualified name; the buffers hold the old ones.
    """

    loss: Tensor
    aux: Any
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]

    def leaves(self) -> list[Tensor]:
        """What the graph of the update takes."""
        return [self.loss, *self.buffers.values(), *self.gradients.values()]


@without_full_collections()
def update_graph(model: LossModule, computed: Made) -> Begun:
    """A graph that takes what the update reads and returns the loss and the new values of buffers.

    Args:
        model: the loss as a module.
        computed: what forward and backward gave.
    """
    leaves = computed.leaves()
    graph, inputs, mode = fx.Graph(), [], FakeTensorMode()

    def placeholder(name: str, value: Tensor, source: Source, target: str = "", index: int = -1) -> fx.Node:
        node = graph.placeholder(name.replace(".", "_"))
        node.meta["val"] = mode.from_tensor(value.detach(), static_shapes=True)
        inputs.append(Input(node.name, source, target, index))
        return node

    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    weights = [placeholder(f"p_{name}", parameters[name], Source.PARAMETER, name) for name in computed.gradients]
    wide = [
        node.name for node, one in zip(weights, computed.gradients.values(), strict=True) if one.dtype is torch.float32
    ]
    written = [placeholder(f"b_{name}", buffers[name], Source.BUFFER, name) for name in computed.buffers]
    loss = placeholder("loss", computed.loss, Source.USER, index=0)
    values = [
        placeholder(f"new_{name}", value, Source.USER, index=number)
        for number, (name, value) in enumerate(computed.buffers.items(), 1)
    ]
    first = 1 + len(values)
    inputs += [Input(f"grad_{node.name}", Source.USER, index=place) for place, node in enumerate(weights, first)]
    graph.output((loss, None, *values))
    captured = Captured(fx.GraphModule({}, graph), tuple(inputs), {})
    return Begun(captured, leaves, 2, tuple(n.name for n in written), tuple(n.name for n in weights), tuple(wide))
