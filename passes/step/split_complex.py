"""`SplitComplex`: trained complex weights as pairs of real numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from amp_compiler.passes.base import RewritePass


@dataclass(frozen=True)
class SplitComplex(RewritePass):
    """Let the graph take every trained complex weight as real and imaginary parts, which the update can read and write.

    That is the same memory, and what torch's optimizers do with complex parameters. Gradients, their norm and the
    update are then those of real numbers.

    Before (`trained=("w",)`)::

        in w: c64[8]
        in x: c64[8]
        mul: c64[8] = aten.mul.Tensor(x, w)
        return mul

    After::

        in w: fp32[8, 2]
        in x: c64[8]
        view_as_complex: c64[8] = aten.view_as_complex.default(w)
        mul: c64[8] = aten.mul.Tensor(x, view_as_complex)
        return mul

    Left alone: real weights, and those that are not trained.

    Args:
        trained: placeholders of the parameters to train.
    """

    trained: tuple[str, ...]
    exact: ClassVar[bool] = True

    def rewrite(self, graph: fx.Graph) -> bool:
        """Rewrite in place."""
        placeholders = graph.find_nodes(op="placeholder")
        weights = [node for node in placeholders if node.name in self.trained and node.meta["val"].is_complex()]
        for node in weights:
            if node.users:
                with graph.inserting_after(placeholders[-1]):
                    whole = graph.call_function(torch.ops.aten.view_as_complex.default, (node,))
                whole.meta["val"] = node.meta["val"]
                node.replace_all_uses_with(whole, delete_user_cb=lambda user, whole=whole: user is not whole)
            node.meta["val"] = torch.view_as_real(node.meta["val"].detach())
        return bool(weights)
