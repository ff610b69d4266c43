"""`RestoreUpcasts`: the casts that `place_weights` replaced by placeholders come back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from amp_compiler.fx.graph import upcast_behind_inputs
from amp_compiler.fx.meta import Key
from amp_compiler.passes.base import InPlacePass, PassResult


@dataclass(frozen=True)
class RestoreUpcasts(InPlacePass):
    """Replace the placeholders marked `wide` of a joint graph by the casts that they stand for.

    They stood for casts until the graph was differentiated, so that a gradient made in FP32 is not rounded to 16 bits.

    Before::

        in w: bf16[8]
        in w_wide: fp32[8]  # wide=w
        mul: fp32[8] = aten.mul.Tensor(w_wide, w_wide)  # phase=forward

    After::

        in w: bf16[8]
        to_dtype: fp32[8] = aten.to.dtype(w, torch.float32)  # phase=forward
        mul: fp32[8] = aten.mul.Tensor(to_dtype, to_dtype)  # phase=forward

    Left alone: every other placeholder.
    """

    name: ClassVar[str] = "restore_upcasts"
    exact: ClassVar[bool] = True
    idempotent: ClassVar[bool] = True

    def run(self, subject: fx.GraphModule) -> PassResult[fx.GraphModule]:
        """Rewrite in place."""
        graph = subject.graph
        placeholders = {node.name: node for node in graph.find_nodes(op="placeholder")}
        marked = [node for node in placeholders.values() if Key.WIDE in node.meta]
        for node in marked:
            cast = upcast_behind_inputs(graph, placeholders[node.meta[Key.WIDE]])
            cast.meta[Key.PHASE] = "forward"
            node.replace_all_uses_with(cast)
            graph.erase_node(node)
        if marked:
            subject.recompile()
        return PassResult(subject, bool(marked))
