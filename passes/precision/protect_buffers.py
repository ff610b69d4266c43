"""`ProtectBuffers`: the buffers that a forward writes stay as they were where it makes what is not finite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, fx

from amp_compiler.fx.graph import call_before, node_tensor, results_of, trace_before
from amp_compiler.passes.base import RewritePass
from amp_compiler.passes.step.separate_buffers import work_on_copies

aten = torch.ops.aten


@dataclass(frozen=True)
class ProtectBuffers(RewritePass):
    """Let the forward work on copies of the buffers that it changes, and write these back if all is finite.

    All is what the graph returns and what it writes. As in a training step, which skips such a batch.

    Before (`protected=("mean",)`)::

        in mean: fp32[8]
        in x: fp32[4, 8]
        add_: fp32[8] = aten.add_.Tensor(mean, 1)  # volatile
        return x

    After::

        in mean: fp32[8]
        in x: fp32[4, 8]
        clone: fp32[8] = aten.clone.default(mean)
        add_: fp32[8] = aten.add_.Tensor(clone, 1)  # volatile
        (whether x and clone are finite)
        where: fp32[8] = aten.where.self(finite, clone, mean)
        copy_: fp32[8] = aten.copy_.default(mean, where)
        return x

    Left alone: buffers that are only read.

    Args:
        protected: placeholders of the buffers that the graph changes, see `written_placeholders`.
    """

    protected: tuple[str, ...] = ()
    exact: ClassVar[bool] = True

    def rewrite(self, graph: fx.Graph) -> bool:
        """Rewrite in place."""
        pairs, output = work_on_copies(graph, self.protected), graph.output_node()
        if not pairs:
            return False
        results = [node for node in results_of(graph) if isinstance(node, fx.Node)]
        read = [
            node for node in dict.fromkeys([*results, *(copy for _, copy in pairs)]) if _may_overflow(node_tensor(node))
        ]
        (finite,) = trace_before(output, _all_finite, read, "") if read else (None,)
        for node, copy in pairs:
            new = copy if finite is None else trace_before(output, torch.where, [finite, copy, node], "")[0]
            call_before(output, aten.copy_.default, [node, new], "")
        return True


def _may_overflow(value: Tensor | None) -> bool:
    return value is not None and (value.is_floating_point() or value.is_complex())


def _all_finite(*values: Tensor) -> Tensor:
    return torch.stack([torch.isfinite(value).all() for value in values]).all()
