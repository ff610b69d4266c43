"""`MergeResults`: one name for each result of a node."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from amp_compiler.passes.base import RewritePass


@dataclass(frozen=True)
class MergeResults(RewritePass):
    """Leave one `getitem` per result of a node, so that a result has one name, and one cast.

    Before::

        split: (fp32[2], fp32[2]) = aten.split.Tensor(x, 2)
        getitem: fp32[2] = getitem(split, 0)
        getitem_1: fp32[2] = getitem(split, 0)
        add: fp32[2] = aten.add.Tensor(getitem, getitem_1)

    After::

        split: (fp32[2], fp32[2]) = aten.split.Tensor(x, 2)
        getitem: fp32[2] = getitem(split, 0)
        add: fp32[2] = aten.add.Tensor(getitem, getitem)

    Left alone: results that are taken once.
    """

    exact: ClassVar[bool] = True
    idempotent: ClassVar[bool] = True

    def rewrite(self, graph: fx.Graph) -> bool:
        """Rewrite in place."""
        modified = False
        seen: dict[tuple[fx.Node, Any], fx.Node] = {}
        for node in list(graph.nodes):
            if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
                continue
            first = seen.setdefault((node.args[0], node.args[1]), node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)
                modified = True
        return modified
