"""`TakeGradients`: gradients that were made elsewhere become inputs of the graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from amp_compiler.fx.graph import add_placeholder, results_of
from amp_compiler.passes.base import RewritePass
from amp_compiler.passes.step.fold_loss_scale import SCALE


@dataclass(frozen=True)
class TakeGradients(RewritePass):
    """Let the graph take the gradients of weights and the loss scale, as placeholders behind the others.

    It stands where a graph with a backward has `differentiate` and `fold_loss_scale`: for a model that runs in
    subgraphs, each with a backward of its own.

    Before (`owners={"w": "w"}`)::

        in w: fp32[8, 8]
        in loss: fp32[]
        return loss

    After::

        in w: fp32[8, 8]
        in loss: fp32[]
        in grad_w: fp32[8, 8]
        in loss_scale: fp32[]
        return loss, grad_w

    Left alone: a graph for which no gradients are announced.

    Args:
        owners: the weights that the update starts from (masters, where there are any), with the parameter that each
            belongs to, whose type and shape the gradient has.
        in_fp32: those of the parameters whose gradient is FP32, whatever they are.
    """

    owners: Mapping[str, str]
    in_fp32: tuple[str, ...] = ()
    exact: ClassVar[bool] = True

    def requires(self, subject: fx.GraphModule) -> str | None:
        """Every weight and every parameter is a placeholder."""
        known = {node.name for node in subject.graph.find_nodes(op="placeholder")}
        missing = [name for pair in self.owners.items() for name in pair if name not in known]
        return f"'{missing[0]}' is no placeholder of the graph" if missing else super().requires(subject)

    def rewrite(self, graph: fx.Graph) -> bool:
        """Rewrite in place."""
        if not self.owners:
            return False
        placeholders = {node.name: node for node in graph.find_nodes(op="placeholder")}
        last, gradients = list(placeholders.values())[-1], []
        for parameter in self.owners.values():
            value = placeholders[parameter].meta["val"]
            dtype = torch.float32 if parameter in self.in_fp32 else value.dtype
            last = add_placeholder(last, f"grad_{parameter}", {"val": torch.empty_like(value, dtype=dtype)})
            gradients.append(last)
        add_placeholder(last, SCALE, {"val": value.new_empty((), dtype=torch.float32)})
        graph.output_node().args = ((*results_of(graph), *gradients),)
        return True
