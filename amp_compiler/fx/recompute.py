"""Values of a forward that the backward in the same graph computes again, rather than keep them."""

import operator
from collections.abc import Collection, Sequence

import torch
from torch import fx

from amp_compiler.fx.alias import alias_sources
from amp_compiler.fx.meta import Key


def computed_again(graph: fx.Graph, forward: Sequence[fx.Node], values: Collection[fx.Node]) -> bool:
    """Put copies of values in front of what reads them first behind the forward, and views of them.

    Args:
        graph: forward and backward.
        forward: its nodes, in order.
        values: those of them that are made again, from others of them or from what is kept.

    Returns:
        Whether there were any to be made.
    """
    changed = set(values)
    for node in forward:  # views of it are taken again
        if changed.intersection(memory_of(node)):
            changed.add(node)
    copies: dict[fx.Node, fx.Node] = {}

    def copy_of(node: fx.Node, place: fx.Node) -> fx.Node:
        if node not in copies:
            sources = {one: copy_of(one, place) for one in node.all_input_nodes if one in changed}
            with graph.inserting_before(place):
                copy = graph.node_copy(node, lambda one: sources.get(one, one))
            copy.meta = {**node.meta, Key.PHASE: "backward"}
            copies[node] = copy
        return copies[node]

    within = set(forward)
    for reader in [node for node in graph.nodes if node not in within and node.op != "output"]:
        for source in reader.all_input_nodes:
            if source in changed:
                reader.replace_input_with(source, copy_of(source, reader))
    for node in reversed(forward):
        if node in changed and not node.users:
            graph.erase_node(node)
    return bool(copies)


def memory_of(node: fx.Node) -> list[fx.Node]:
    """What a node is a view of; nothing for a result of several that an operator makes."""
    if node.target is torch.ops.aten._unsafe_view.default:
        return [node.args[0]]  # type: ignore[list-item]
    sources = alias_sources(node)
    if node.target is operator.getitem and sources and not memory_of(sources[0]):
        return []
    return sources
