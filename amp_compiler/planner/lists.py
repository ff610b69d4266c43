"""Lists of tensors: no cast takes one, so what reads or makes a list, puts in or takes out, runs in one precision."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from amp_compiler.ir.graph import ValueKind
from amp_compiler.planner.draft import Draft
from amp_compiler.planner.typing import Role
from amp_compiler.policy.rules import Decision, Precision

_OPEN = frozenset({Precision.FOLLOW, Precision.LOW, Precision.FP32})


def unify_lists(draft: Draft, decisions: dict[str, Decision], between: Collection[str]) -> None:
    """Give all nodes of each list of tensors one precision. Changes `decisions`.

    A list that enters or leaves the graph stays as captured, and one of which a node is kept. Else FP32 that a rule
    asks for beats the low type, and both beat `follow`; by `between`, a list is low as soon as one of its nodes is.

    Args:
        draft: the graph.
        decisions: by node name.
        between: the nodes for which the rules ask `between`, which is settled.
    """
    for values, nodes in _lists(draft):
        requested = {name: decisions[name].precision for name in nodes}
        ends = values & set(draft.graph.outputs)
        ends |= {name for name in values if draft.graph.values[name].kind is ValueKind.INPUT}
        reason = "all that reads or makes one list of tensors has one type"
        if ends:
            chosen, reason = Precision.KEEP, f"{reason}, and '{min(ends)}' enters or leaves the graph"
        elif not _OPEN.issuperset(requested.values()):
            chosen = Precision.KEEP
        elif any(precision is Precision.FP32 and name not in between for name, precision in requested.items()):
            chosen = Precision.FP32
        elif Precision.LOW in requested.values():
            chosen = Precision.LOW
        else:
            chosen = Precision.FP32 if Precision.FP32 in requested.values() else Precision.FOLLOW
        cause = next((name for name, precision in requested.items() if precision is chosen), "")
        for name, precision in requested.items():
            if precision is not chosen:
                why = reason if ends else f"{reason}, and '{cause}' is {chosen.value}"
                decisions[name] = replace(decisions[name], precision=chosen, rule="", reason=why)


def _lists(draft: Draft) -> list[tuple[set[str], list[str]]]:
    """The values of each list, and its nodes in execution order: those that do more than look at it."""
    import networkx as nx

    graph, typings = draft.graph, draft.typing.nodes
    shared: nx.Graph = nx.Graph()
    for node in graph.nodes.values():
        roles = typings[node.name].roles
        read = [one.value for one, role in zip(node.inputs, roles, strict=True) if role is not Role.ANY]
        held = [name for name in (*read, *node.outputs) if name in graph.lists and not graph.is_folded(name)]
        shared.add_edges_from(((node.name, True), (name, False)) for name in held)
    order = {name: place for place, name in enumerate(graph.nodes)}
    parts = []
    for part in nx.connected_components(shared):
        nodes = sorted((name for name, is_node in part if is_node), key=order.__getitem__)
        parts.append(({name for name, is_node in part if not is_node}, nodes))
    return sorted(parts, key=lambda part: order[part[1][0]])
