"""`SeparateBuffers`: the forward works on copies of the buffers that it changes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from amp_compiler.fx.alias import AliasGroups, written_roots
from amp_compiler.fx.graph import call_before, replace_other_uses, results_of
from amp_compiler.passes.base import RewritePass


@dataclass(frozen=True)
class SeparateBuffers(RewritePass):
    """Let the forward work on copies of the buffers that it changes; their final values become outputs.

    So that a step which is skipped leaves the buffers as they were.

    Before (`buffers=("mean",)`)::

        in mean: fp32[8]
        in x: fp32[4, 8]
        add_: fp32[8] = aten.add_.Tensor(mean, 1)  # volatile
        return loss

    After::

        in mean: fp32[8]
        in x: fp32[4, 8]
        clone: fp32[8] = aten.clone.default(mean)
        add_: fp32[8] = aten.add_.Tensor(clone, 1)  # volatile
        return loss, clone

    Left alone: buffers that are only read.

    Args:
        buffers: placeholders of the buffers that the graph changes, see `written_placeholders`.
    """

    buffers: tuple[str, ...] = ()
    exact: ClassVar[bool] = True

    def rewrite(self, graph: fx.Graph) -> bool:
        """Rewrite in place."""
        copies = [copy for _, copy in work_on_copies(graph, self.buffers)]
        if copies:
            graph.output_node().args = ((*results_of(graph), *copies),)
        return bool(copies)


def work_on_copies(graph: fx.Graph, names: Iterable[str]) -> list[tuple[fx.Node, fx.Node]]:
    """Let a graph work on copies of some placeholders; gives each of these with its copy.

    Args:
        graph: the graph.
        names: of the placeholders.
    """
    placeholders, wanted = graph.find_nodes(op="placeholder"), frozenset(names)
    pairs = []
    for node in [node for node in placeholders if node.name in wanted]:
        copy = call_before(placeholders[-1].next, torch.ops.aten.clone.default, [node], "")
        replace_other_uses(node, copy)
        pairs.append((node, copy))
    return pairs


def written_placeholders(graph: fx.Graph, among: Iterable[str]) -> tuple[str, ...]:
    """Those of the named placeholders whose memory the graph changes in place, in the graph's order."""
    groups, names = AliasGroups(graph), set(among)
    written = written_roots(graph, groups)
    return tuple(
        node.name for node in graph.find_nodes(op="placeholder") if node.name in names and groups.root(node) in written
    )
