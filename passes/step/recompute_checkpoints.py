"""`RecomputeCheckpoints`: what the model checkpoints is computed again in the backward, not kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from amp_compiler.fx.checkpoints import recomputed_in
from amp_compiler.fx.meta import Key
from amp_compiler.fx.recompute import computed_again
from amp_compiler.passes.base import RewritePass


@dataclass(frozen=True)
class RecomputeCheckpoints(RewritePass):
    """Compute what stands in a region of `torch.utils.checkpoint` again where the backward reads it.

    The mark `checkpoint` has the number of the region. What is put between the nodes of a region belongs to it, and so
    do casts that it alone reads.

    Before::

        mm: bf16[8, 8] = aten.mm.default(x, w)  # phase=forward checkpoint=1
        gelu: bf16[8, 8] = aten.gelu.default(mm)  # phase=forward checkpoint=1
        sum_1: bf16[] = aten.sum.default(gelu)  # phase=forward
        …
        gelu_backward: bf16[8, 8] = aten.gelu_backward.default(grad, mm)  # phase=backward

    After::

        mm: bf16[8, 8] = aten.mm.default(x, w)  # phase=forward checkpoint=1
        gelu: bf16[8, 8] = aten.gelu.default(mm)  # phase=forward checkpoint=1
        sum_1: bf16[] = aten.sum.default(gelu)  # phase=forward
        …
        mm_1: bf16[8, 8] = aten.mm.default(x, w)  # phase=backward checkpoint=1
        gelu_backward: bf16[8, 8] = aten.gelu_backward.default(grad, mm_1)  # phase=backward

    Left alone: what is read outside of its region, which is kept; random numbers, which would be others; messages
    between ranks; and what is changed in place.
    """

    exact: ClassVar[bool] = True
    skippable: ClassVar[bool] = True

    def rewrite(self, graph: fx.Graph) -> bool:
        """Add copies to the backward, in place."""
        forward = [node for node in graph.nodes if node.meta.get(Key.PHASE) == "forward"]
        regions, later = recomputed_in(forward), set(graph.nodes).difference(forward)
        inner = [
            node
            for node, region in regions.items()
            if all(regions.get(user) == region or (user in later and user.op != "output") for user in node.users)
        ]
        return computed_again(graph, forward, inner)
