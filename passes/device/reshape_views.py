"""`ReshapeViews`: views become reshapes, for a compiler that traces the graph once more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from amp_compiler.passes.base import RewritePass

_VIEW, _RESHAPE = torch.ops.aten.view.default, torch.ops.aten.reshape.default


@dataclass(frozen=True)
class ReshapeViews(RewritePass):
    """Let a view be a reshape.

    A compiler traces the graph anew with some operators opened. Behind what it makes of them, such as of dropout, other
    strides may come out than those that the view was traced for, over which there is none.

    Before::

        view: bf16[6] = aten.view.default(x, [6])

    After::

        view: bf16[6] = aten.reshape.default(x, [6])

    Left alone: views that say their strides, and those of other operators, such as a transpose.
    """

    exact: ClassVar[bool] = True
    idempotent: ClassVar[bool] = True

    def rewrite(self, graph: fx.Graph) -> bool:
        """Change targets in place."""
        views = graph.find_nodes(op="call_function", target=_VIEW)
        for view in views:
            view.target = _RESHAPE
        return bool(views)
