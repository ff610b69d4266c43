"""`DropIdleDropout`: dropout that drops nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from amp_compiler.fx.graph import schema_argument
from amp_compiler.passes.base import InPlacePass, PassResult


@dataclass(frozen=True)
class DropIdleDropout(InPlacePass):
    """Remove dropout that drops nothing, as torch's ONNX exporter does: so the plan is one of the file's nodes.

    Before::

        linear: fp32[4, 8] = aten.linear.default(x, w)
        dropout: fp32[4, 8] = aten.dropout.default(linear, 0.1, False)
        relu: fp32[4, 8] = aten.relu.default(dropout)

    After::

        linear: fp32[4, 8] = aten.linear.default(x, w)
        relu: fp32[4, 8] = aten.relu.default(linear)

    Left alone: dropout in train mode.
    """

    name: ClassVar[str] = "drop_idle_dropout"
    exact: ClassVar[bool] = True
    skippable: ClassVar[bool] = True
    idempotent: ClassVar[bool] = True

    def run(self, subject: fx.GraphModule) -> PassResult[fx.GraphModule]:
        """Rewrite in place."""
        idle = _idle(subject.graph)
        for node in idle:
            node.replace_all_uses_with(schema_argument(node, "input"))
            subject.graph.erase_node(node)
        if idle:
            subject.recompile()
        return PassResult(subject, bool(idle))

    def ensures(self, subject: fx.GraphModule, remembered: Any) -> str | None:
        """None must be left."""
        idle = _idle(subject.graph)
        return f"'{idle[0].name}' drops nothing" if idle else None


def _idle(graph: fx.Graph) -> list[fx.Node]:
    dropouts = graph.find_nodes(op="call_function", target=torch.ops.aten.dropout.default)
    return [node for node in dropouts if schema_argument(node, "train") is False]
