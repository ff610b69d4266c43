"""What passes on FX graphs in normal form share: what they require, and by what a change is seen."""

from __future__ import annotations

from torch import fx

from amp_compiler.passes.base import Pass


class FxPass(Pass[fx.GraphModule]):
    """Base of the passes that read the fake tensors of a graph and rewrite it in place."""

    def requires(self, subject: fx.GraphModule) -> str | None:
        """Every node that makes a tensor must carry its fake tensor."""
        for node in subject.graph.nodes:
            if node.op == "call_function" and "val" not in node.meta:
                return f"node '{node.name}' carries no example value"
        return None

    def fingerprint(self, subject: fx.GraphModule) -> object:
        """The ops with their operands; types follow from them."""
        return tuple((node.name, str(node.target), str(node.args)) for node in subject.graph.nodes)
