"""Free nodes that run low whatever the costs of others are: found before the cut, which is then the smaller."""

from __future__ import annotations

from collections.abc import Iterator

from amp_compiler.ir.graph import Node, ValueKind
from amp_compiler.planner.free_nodes import FollowProblem
from amp_compiler.planner.typing import LOW, NodeTyping, Role


def settled_low(problem: FollowProblem) -> set[str]:
    """The free nodes in whose group nothing asks for FP32.

    A group is what free nodes are joined to by the values between them. Where all that a group reads is low or stored,
    and all that reads it from without is low, no cast is needed beside it as long as it is low as a whole, and each of
    its nodes moves the fewest bytes so. No labels of other nodes make another choice cheaper.

    Args:
        problem: its exact nodes are held already.
    """
    pending = list(_may_be_fp32(problem))
    if len(pending) == len(problem.free):
        return set()
    found = set(problem.free).difference(pending)
    graph, typings, free = problem.graph, problem.typing.nodes, problem.free
    while pending and found:
        name = pending.pop()
        node, typing = graph.nodes[name], typings[name]
        makers = (graph.maker(node.inputs[index].value) for index in typing.data)
        beside = [maker for maker in makers if maker is not None and maker in free]
        beside += [user for value in typing.made_by(node) for user, _ in graph.readers(value)]
        for other in beside:
            if other in found:
                found.remove(other)
                pending.append(other)
    return found


def _may_be_fp32(problem: FollowProblem) -> Iterator[str]:
    """The free nodes beside which something that is not free is FP32, or asks for it, or sees what is rounded."""
    graph, typings, free, labels = problem.graph, problem.typing.nodes, problem.free, problem.labels
    values, makers, readers, low, returned = (
        graph.values,
        graph.maker,
        graph.readers,
        problem.typing.low,
        problem.returned,
    )

    def reads_fp32(node: Node, typing: NodeTyping) -> bool:
        for index in typing.data:
            name = node.inputs[index].value
            value = values[name]
            if value.kind is ValueKind.RESULT:
                if makers(name) not in free and problem.typing.result(name, labels) is not low:
                    return True
            elif not graph.is_folded(name) and value.dtype is not low:
                return True
        return False

    def is_asked_for_fp32(made: tuple[str, ...]) -> bool:
        for value in made:
            if value in returned:
                return True
            for user, index in readers(value):
                if typings[user].roles[index] is not Role.DATA or (user not in free and labels[user] != LOW):
                    return True
        return False

    for name in free:
        node, typing = graph.nodes[name], typings[name]
        rounds = typing.info.promotes or (typing.info.exact and problem.keeps_bits(name))
        if rounds or reads_fp32(node, typing) or is_asked_for_fp32(typing.made_by(node)):
            yield name
