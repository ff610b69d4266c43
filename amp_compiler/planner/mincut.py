"""Minimum of a sum of two-label costs, by s-t minimum cut: exact and deterministic."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_SOURCE, _SINK = "source", "sink"
_FORBIDDEN = 1 << 100  # more than all other costs together


@dataclass
class TwoLabelProblem:
    """Binary variables with costs on single variables and on ordered pairs.

    Example:
        >>> problem = TwoLabelProblem()
        >>> first, second = problem.variable(), problem.variable()
        >>> problem.single(first, if_zero=5, if_one=0)
        >>> problem.single(second, if_zero=0, if_one=3)
        >>> problem.pair(first, second, 4)  # first = 1 beside second = 0 costs 4
        >>> problem.solve()
        [1, 1]
    """

    _zero: list[int] = field(default_factory=list)
    _one: list[int] = field(default_factory=list)
    _arcs: list[dict[int, int]] = field(default_factory=list)  # by variable: what its being 1 costs beside others at 0

    def variable(self) -> int:
        """A new variable; returns its number."""
        self._zero.append(0)
        self._one.append(0)
        self._arcs.append({})
        return len(self._zero) - 1

    def single(self, variable: int, *, if_zero: int = 0, if_one: int = 0) -> None:
        """Add a cost (at least 0) for each label of one variable."""
        self._zero[variable] += if_zero
        self._one[variable] += if_one

    def pair(self, one: int, zero: int, cost: int | None) -> None:
        """Add a cost for variable `one` being 1 while variable `zero` is 0; `None` forbids it."""
        if one != zero and cost != 0:
            self._arcs[one][zero] = self._arcs[one].get(zero, 0) + (_FORBIDDEN if cost is None else cost)
            self._arcs[zero].setdefault(one, 0)

    def solve(self) -> list[int]:
        """Labels of least total cost.

        Among labellings of equal cost it is the one with the fewest ones: minimum cuts form a lattice, so that one is
        unique and the answer depends on nothing but the costs. The problem is used up.
        """
        leaves = self._take_leaves()
        labels = [int(one < zero) for zero, one in zip(self._zero, self._one, strict=True)]
        if any(self._arcs):
            self._cut(labels)
        for leaf, other, up, down in reversed(leaves):
            labels[leaf] = int(self._one[leaf] + up * (1 - labels[other]) < self._zero[leaf] + down * labels[other])
        return labels

    def _take_leaves(self) -> list[tuple[int, int, int, int]]:
        """Take away variables with one neighbour, and whole trees of them, as their neighbours' costs.

        Returns (leaf, neighbour, cost of 1 beside 0, of 0 beside 1), in the order of going.
        """
        zeros, ones, arcs = self._zero, self._one, self._arcs
        leaves = []
        pending = [variable for variable, beside in enumerate(arcs) if len(beside) == 1]
        while pending:
            leaf = pending.pop()
            for other, up in arcs[leaf].items():  # none, where that one went first
                down = arcs[other].pop(leaf)
                zeros[other] += min(zeros[leaf], ones[leaf] + up)
                ones[other] += min(zeros[leaf] + down, ones[leaf])
                leaves.append((leaf, other, up, down))
                if len(arcs[other]) == 1:
                    pending.append(other)
            arcs[leaf] = {}
        return leaves

    def _cut(self, labels: list[int]) -> None:
        """Label the variables that have neighbours."""
        import networkx as nx

        graph: nx.DiGraph = nx.DiGraph()
        graph.add_nodes_from((_SOURCE, _SINK))
        core = [variable for variable, beside in enumerate(self._arcs) if beside]
        for variable in core:
            zero, one = self._zero[variable], self._one[variable]
            if zero != one:
                ends = (_SOURCE, variable) if zero < one else (variable, _SINK)
                graph.add_edge(*ends, capacity=abs(one - zero))
            for other, cost in self._arcs[variable].items():  # a variable that is 1 is on the side of the sink
                if cost:
                    graph.add_edge(other, variable, capacity=cost)
        residual = nx.algorithms.flow.boykov_kolmogorov(graph, _SOURCE, _SINK)
        # Which maximum flow it is does not count: all of them leave room to the sink from the same nodes.
        at_one: set[Any] = {_SINK}
        pending: list[Any] = [_SINK]
        while pending:
            for maker, arc in residual.pred[pending.pop()].items():
                if arc["flow"] < arc["capacity"] and maker not in at_one:
                    at_one.add(maker)
                    pending.append(maker)
        for variable in core:
            labels[variable] = int(variable in at_one)
