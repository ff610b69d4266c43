"""Minimum of a sum of two-label costs, by s-t minimum cut: exact and deterministic."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_SOURCE, _SINK = "source", "sink"


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
        ([1, 1], 3)
    """

    _zero: list[int] = field(default_factory=list)
    _one: list[int] = field(default_factory=list)
    _pairs: list[tuple[int, int, int | None]] = field(default_factory=list)

    def variable(self) -> int:
        """A new variable; returns its number."""
        self._zero.append(0)
        self._one.append(0)
        return len(self._zero) - 1

    def single(self, variable: int, *, if_zero: int = 0, if_one: int = 0) -> None:
        """Add a cost (at least 0) for each label of one variable."""
        self._zero[variable] += if_zero
        self._one[variable] += if_one

    def pair(self, one: int, zero: int, cost: int | None) -> None:
        """Add a cost for variable `one` being 1 while variable `zero` is 0; `None` forbids it."""
        if one != zero and cost != 0:
            self._pairs.append((one, zero, cost))

    def solve(self) -> tuple[list[int], int]:
        """Labels of least total cost, and that cost.

        Among labellings of equal cost it is the one with the fewest ones: minimum cuts form a lattice, so that one is
        unique and the answer depends on nothing but the costs.
        """
        import networkx as nx

        graph: nx.DiGraph = nx.DiGraph()
        graph.add_nodes_from((_SOURCE, _SINK))
        for variable, (zero, one) in enumerate(zip(self._zero, self._one, strict=True)):
            if zero != one:
                ends = (_SOURCE, variable) if zero < one else (variable, _SINK)
                graph.add_edge(*ends, capacity=abs(one - zero))
        total = sum(min(zero, one) for zero, one in zip(self._zero, self._one, strict=True))
        infinite = 1 + sum(self._zero) + sum(self._one)
        for one, zero, cost in self._pairs:  # a variable that is 1 is on the side of the sink
            known = graph.get_edge_data(zero, one, {"capacity": 0})["capacity"]
            graph.add_edge(zero, one, capacity=known + (infinite if cost is None else cost))
        residual = nx.algorithms.flow.boykov_kolmogorov(graph, _SOURCE, _SINK)
        # Which maximum flow it is does not count: all of them leave room to the sink from the same nodes.
        ones: set[Any] = {_SINK}
        pending: list[Any] = [_SINK]
        while pending:
            for maker, arc in residual.pred[pending.pop()].items():
                if arc["flow"] < arc["capacity"] and maker not in ones:
                    ones.add(maker)
                    pending.append(maker)
        return [int(variable in ones) for variable in range(len(self._zero))], total + residual.graph["flow_value"]
