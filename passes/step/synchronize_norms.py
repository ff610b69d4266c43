"""`SynchronizeNorms`: a `SyncBatchNorm` takes its statistics over the rows of all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from amp_compiler.fx.meta import Key
from amp_compiler.ops import synchronized_norm as _operators  # noqa: F401  # what it registers
from amp_compiler.ops.typed_op import typed_op
from amp_compiler.passes.base import RewritePass

_PLAIN = torch.ops.aten.batch_norm.default
_SYNCHRONIZED = torch.ops.amp_compiler.synchronized_batch_norm.default


@dataclass(frozen=True)
class SynchronizeNorms(RewritePass):
    """Let the batch norms that are marked with a group of ranks take their statistics over the rows of all of them.

    `differentiate` opens the operator: one message of FP32 numbers forward, means, variances and a count, and one
    backward, the two sums of which the gradient of the data is made. Statistics, running ones too, are the same on all
    ranks to the bit.

    Before::

        batch_norm: bf16[4, 8] = aten.batch_norm.default(x, w, b, mean, var, True, 0.1, 1e-05, True)  # group=0:2

    After::

        batch_norm: bf16[4, 8] = amp_compiler.synchronized_batch_norm.default(x, w, …, 1e-05, True, "0", 2)

    The operator inside of a `typed_op` is changed like any other.

    Left alone: every other batch norm; a step of one process, which marks none, and a graph of one rank by itself, as
    a report of what is not finite runs it.

    Args:
        group: torch's name of the step's ranks; empty for one process.
    """

    group: str = ""
    exact: ClassVar[bool] = False
    idempotent: ClassVar[bool] = True

    def ensures(self, subject: fx.GraphModule, remembered: Any) -> str | None:
        """No norm is left over the rows of this rank alone that is to be over those of others."""
        left = [node.name for node in subject.graph.nodes if self.group and Key.GROUP in node.meta]
        return (
            f"'{left[0]}' is marked with a group of ranks and is no batch norm that can be replaced" if left else None
        )

    def rewrite(self, graph: fx.Graph) -> bool:
        """Change targets in place."""
        marked = [node for node in graph.nodes if self.group and Key.GROUP in node.meta]
        modified = [_replace(node, node.meta[Key.GROUP]) for node in marked]
        return any(modified)


def _replace(node: fx.Node, group: tuple[Any, ...]) -> bool:
    if node.target is _PLAIN:
        node.target, node.args = _SYNCHRONIZED, (*node.args, *group)
    elif node.target is typed_op and node.args[0] is _PLAIN:
        _, arguments, *types = node.args
        node.args = (_SYNCHRONIZED, (*arguments, *group), *types)  # type: ignore[misc]
    else:
        return False
    del node.meta[Key.GROUP]
    return True
