"""The writes of a step that happen only where its gradients are finite, done together instead of one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from amp_compiler.passes.step.trace_update import lies_in_input, readers

_aten = torch.ops.aten


@dataclass(frozen=True)
class Commit:
    """One such write: `copy_(target, where(skip != 0, target, value))`.

    Args:
        skip: node of the number that is not 0 where the step does not count.
        target: placeholder of what is written.
        value: node of its new value.
        nodes: the nodes that do it, which nothing else needs.
    """

    skip: fx.Node
    target: fx.Node
    value: fx.Node
    nodes: tuple[fx.Node, ...]


def commits(graph: fx.Graph) -> list[Commit]:
    """All such writes of a graph to placeholders that nothing reads afterwards."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    found = (_commit(node) for node in graph.find_nodes(op="call_function", target=_aten.copy_.default))
    return [
        one
        for one in found
        if one is not None and all(places[user] <= places[one.nodes[-1]] for user in readers(one.target))
    ]


def _commit(copy: fx.Node) -> Commit | None:
    target, chosen = copy.args[:2]
    if copy.users or not isinstance(chosen, fx.Node) or chosen.target is not _aten.where.self or len(chosen.users) > 1:
        return None
    bad, old, value = chosen.args
    if old is not target or not isinstance(value, fx.Node) or not isinstance(target, fx.Node):
        return None
    if target.op != "placeholder" or not _alike(target.meta["val"], value.meta["val"]) or lies_in_input(value):
        return None  # another such write may come before this one, and change what it reads
    if not isinstance(bad, fx.Node) or bad.target is not _aten.ne.Scalar or bad.args[1] != 0 or len(bad.users) > 1:
        return None
    skip = bad.args[0]
    return Commit(skip, target, value, (bad, chosen, copy)) if isinstance(skip, fx.Node) else None


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape


def run_commits(skip: Tensor, targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Write the values unless the step is skipped. For a CPU, where looking at a tensor waits for nothing.

    Args:
        skip: one number.
        targets: what to write.
        values: of the targets' shapes.
    """
    if skip.item() == 0:
        torch._foreach_copy_(list(targets), list(values))
