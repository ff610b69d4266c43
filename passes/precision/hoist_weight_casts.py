"""`HoistWeightCasts`: casts of weights leave the graph, for whoever keeps their results between calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from amp_compiler.fx.graph import CAST, add_placeholder, replace_call
from amp_compiler.fx.meta import Key
from amp_compiler.passes.base import RewritePass


@dataclass(frozen=True)
class HoistWeightCasts(RewritePass):
    """Turn each cast of a weight into a further placeholder, which takes the low-precision copy of the weight.

    Only for runs without autograd, where a cast of a weight gives the same result on every call.

    Before (`weights=("w",)`)::

        in w: fp32[8, 8]
        in x: bf16[4, 8]
        to_dtype: bf16[8, 8] = aten.to.dtype(w, torch.bfloat16)  # cast
        linear: bf16[4, 8] = aten.linear.default(x, to_dtype)

    After::

        in w: fp32[8, 8]
        in x: bf16[4, 8]
        in w_kept_1: bf16[8, 8]  # cast low=w:bf16
        linear: bf16[4, 8] = aten.linear.default(x, w_kept_1)

    Left alone: casts of inputs, and of a buffer that the graph changes in place.

    Args:
        weights: placeholders of the parameters and buffers.
    """

    weights: tuple[str, ...]
    exact: ClassVar[bool] = True
    skippable: ClassVar[bool] = True
    idempotent: ClassVar[bool] = True

    def rewrite(self, graph: fx.Graph) -> bool:
        """Rewrite in place."""
        placeholders = graph.find_nodes(op="placeholder")
        held = {node for node in placeholders if node.name in self.weights and not node.meta.get(Key.VOLATILE)}
        casts: list[Any] = [
            node for node in graph.nodes if node.op == "call_function" and node.target is CAST and node.args[0] in held
        ]
        for number, cast in enumerate(casts, start=1):
            source, dtype = cast.args[:2]
            meta = {**cast.meta, Key.LOW: (source.name, dtype)}
            placeholders.append(add_placeholder(placeholders[-1], f"{source.name}_kept_{number}", meta))
            replace_call(cast, placeholders[-1])
        return bool(casts)
