"""`NameModules`: modules are called as in the model, whatever was captured around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from amp_compiler.fx.graph import module_of
from amp_compiler.passes.base import RewritePass


@dataclass(frozen=True)
class NameModules(RewritePass):
    """Name the modules as in the model, without the loss around it, so that rules match what they match elsewhere.

    A node of the loss function is left with an empty stack, by which lowering knows it (`ir.graph.LOSS_FUNCTION`).

    Before (`root="model"`)::

        linear: fp32[4, 8] = aten.linear.default(x, w)  # at=model.fc1:Linear
        mean: fp32[] = aten.mean.default(linear)  # at=:LossModule

    After::

        linear: fp32[4, 8] = aten.linear.default(x, w)  # at=fc1:Linear
        mean: fp32[] = aten.mean.default(linear)

    Left alone: every graph that was captured from the model itself (`root=""`).

    Args:
        root: name of the model in what was captured.
    """

    root: str = ""
    exact: ClassVar[bool] = True

    def rewrite(self, graph: fx.Graph) -> bool:
        """Rewrite the metadata in place."""
        modified = False
        for node in graph.nodes:
            stack = node.meta.get("nn_module_stack")
            if not self.root or not stack:
                continue
            before = module_of(node)
            node.meta["nn_module_stack"] = {
                key: (path.removeprefix(self.root).removeprefix("."), kind)
                for key, (path, kind) in stack.items()
                if path.partition(".")[0] == self.root
            }
            modified |= node.op == "call_function" and module_of(node) != before
        return modified
