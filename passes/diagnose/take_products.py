"""`TakeProducts`: a graph that reads products is given them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from amp_compiler.passes.base import InPlacePass, PassResult


@dataclass(frozen=True)
class TakeProducts(InPlacePass):
    """Take products as inputs, which stand behind the others in the order of the names, in the place of making them.

    Before (`held=("mm",)`)::

        in a: bf16[4, 8]
        in b: bf16[8, 4]
        mm: bf16[4, 4] = aten.mm.default(a, b)
        relu: bf16[4, 4] = aten.relu.default(mm)
        return relu

    After::

        in a: bf16[4, 8]
        in b: bf16[8, 4]
        in mm_held: bf16[4, 4]
        relu: bf16[4, 4] = aten.relu.default(mm_held)
        return relu

    Left alone: a graph that has no such node.

    Args:
        held: names of nodes, as `HoldProducts` returned them.
    """

    held: tuple[str, ...] = ()
    name: ClassVar[str] = "take_products"
    exact: ClassVar[bool] = False  # for what it is given

    def run(self, subject: fx.GraphModule) -> PassResult[fx.GraphModule]:
        """Rewrite in place."""
        graph = subject.graph
        nodes = {node.name: node for node in graph.nodes}
        last = graph.find_nodes(op="placeholder")[-1]
        found = [nodes[name] for name in self.held if name in nodes]
        for node in found:
            with graph.inserting_after(last):
                last = graph.placeholder(f"{node.name}_held")
            last.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(last)
        if found:
            graph.eliminate_dead_code()
            subject.recompile()
        return PassResult(subject, bool(found))
