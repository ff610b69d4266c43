"""Free nodes that run low whatever the costs of others are: found before the cut, which is then the smaller."""

from __future__ import annotations

from amp_compiler.ir.graph import ValueKind
from amp_compiler.planner.free_nodes import FollowProblem
from amp_compiler.planner.typing import LOW, Role


def settled_low(problem: FollowProblem) -> set[str]:
    """The free nodes in whose group nothing asks for FP32.

    A group is what free nodes are joined to by the values between them. Where all that a group reads is low or stored,
    and all that reads it from without is low, no cast is needed beside it as long as it is low as a whole, and each of
    its nodes moves the fewest bytes so. No labels of other nodes make another choice cheaper.

    Args:
        problem: its exact nodes are held already.
    """
    pending = [name for name in problem.free if _may_be_fp32(problem, name)]
    if len(pending) == len(problem.free):
        return set()
    found = set(problem.free).difference(pending)
    graph, typings, free = problem.graph, problem.typing.nodes, problem.free
    while pending and found:
        name = pending.pop()
        node, typing = graph.nodes[name], typings[name]
        makers = (graph.maker(node.inputs[index].value) for index in typing.data)
        beside = [maker for maker in makers if maker is not None and maker in free]
        beside += [user for value in typing.made for user, _ in graph.readers(value)]
        for other in beside:
            if other in found:
                found.remove(other)
                pending.append(other)
    return found


def _may_be_fp32(problem: FollowProblem, name: str) -> bool:
    """True for a free node beside which something that is not free is FP32, or asks for it, or sees what is rounded."""
    graph, typings, free, labels = problem.graph, problem.typing.nodes, problem.free, problem.labels
    node, typing = graph.nodes[name], typings[name]
    if typing.info.promotes or (typing.info.exact and problem.keeps_bits(name)):
        return True
    low, values, maker, returned = problem.typing.low, graph.values, graph.maker, problem.returned
    for index in typing.data:
        value = node.inputs[index].value
        if values[value].kind is ValueKind.RESULT:
            if maker(value) not in free and problem.typing.result(value, labels) is not low:
                return True
        elif not graph.is_folded(value) and values[value].dtype is not low:
            return True
    for value in typing.made:
        if value in returned:
            return True
        for user, index in graph.readers(value):
            if typings[user].roles[index] is not Role.DATA or (user not in free and labels[user] != LOW):
                return True
    return False
