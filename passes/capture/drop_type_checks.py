"""`DropTypeChecks`: checks on element types that capture leaves in a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from amp_compiler.passes.base import RewritePass

_CHECK = torch.ops.aten._assert_tensor_metadata.default


@dataclass(frozen=True)
class DropTypeChecks(RewritePass):
    """Remove `_assert_tensor_metadata`: it states the captured element types, which a rewrite changes.

    Before::

        _assert_tensor_metadata_default = aten._assert_tensor_metadata.default(x, dtype=torch.float32)
        to: fp32[4] = aten.to.dtype(x, torch.float32)

    After::

        to: fp32[4] = aten.to.dtype(x, torch.float32)

    Left alone: every other check, such as those on sizes.
    """

    exact: ClassVar[bool] = True
    idempotent: ClassVar[bool] = True

    def rewrite(self, graph: fx.Graph) -> bool:
        """Rewrite in place."""
        return drop_type_checks(graph)


def drop_type_checks(graph: fx.Graph) -> bool:
    """Erase the checks; returns whether there were any."""
    checks = graph.find_nodes(op="call_function", target=_CHECK)
    for node in checks:
        graph.erase_node(node)
    return bool(checks)
