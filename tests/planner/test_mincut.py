"""Two-label problems against networkx and against brute force."""

from __future__ import annotations

import itertools
import random

import networkx as nx
import pytest

from amp_compiler.planner.mincut import TwoLabelProblem

Pairs = list[tuple[int, int, int | None]]


def random_problem(rng: random.Random, size: int) -> tuple[list[tuple[int, int]], Pairs]:
    singles = [(rng.randint(0, 9), rng.randint(0, 9)) for _ in range(size)]
    pairs: Pairs = []
    for _ in range(2 * size):
        one = rng.randrange(size)
        near = min(max(one + rng.randint(-3, 3), 0), size - 1)
        if one != near:
            pairs.append((one, near, rng.choice([None, 1, 2, 3, 5])))
    return singles, pairs


def solve(singles: list[tuple[int, int]], pairs: Pairs) -> tuple[list[int], int]:
    problem = TwoLabelProblem()
    for zero, one in singles:
        problem.single(problem.variable(), if_zero=zero, if_one=one)
    for pair in pairs:
        problem.pair(*pair)
    return problem.solve()


def cost_of(labels: tuple[int, ...], singles: list[tuple[int, int]], pairs: Pairs) -> float:
    total: float = sum(single[label] for single, label in zip(singles, labels, strict=True))
    for one, zero, cost in pairs:
        if labels[one] == 1 and labels[zero] == 0:
            total += float("inf") if cost is None else cost
    return total


@pytest.mark.parametrize("seed", range(60))
def test_labels_are_the_optimum_with_the_fewest_ones(seed: int) -> None:
    rng = random.Random(seed)
    singles, pairs = random_problem(rng, rng.randint(1, 9))
    every = list(itertools.product((0, 1), repeat=len(singles)))
    best = min(every, key=lambda labels: (cost_of(labels, singles, pairs), sum(labels)))
    labels, cost = solve(singles, pairs)
    assert (cost, tuple(labels)) == (cost_of(best, singles, pairs), best)


def by_networkx(singles: list[tuple[int, int]], pairs: Pairs) -> tuple[list[int], int]:
    """The same answer by another road: any maximum flow of networkx; ones are what can still reach the sink."""
    graph = nx.DiGraph()
    graph.add_nodes_from(["source", "sink"])
    for index, (zero, one) in enumerate(singles):
        graph.add_edge("source", index, capacity=one)
        graph.add_edge(index, "sink", capacity=zero)
    for one, zero, cost in pairs:
        more = 10**6 if cost is None else cost
        known = graph.get_edge_data(zero, one, {"capacity": 0})["capacity"]
        graph.add_edge(zero, one, capacity=known + more)
    flow = nx.algorithms.flow.dinitz(graph, "source", "sink")
    room = nx.subgraph_view(flow, filter_edge=lambda a, b: flow.edges[a, b]["flow"] < flow.edges[a, b]["capacity"])
    ones = nx.ancestors(room, "sink")
    return [int(index in ones) for index in range(len(singles))], flow.graph["flow_value"]


@pytest.mark.parametrize("seed", range(8))
def test_labels_and_cost_are_those_of_networkx_on_a_long_chain(seed: int) -> None:
    singles, pairs = random_problem(random.Random(seed), 400)
    assert solve(singles, pairs) == by_networkx(singles, pairs)


def test_components_that_are_not_joined_do_not_mix() -> None:
    """Chains that are interleaved, so that the variables of a component do not stand side by side."""
    parts = [random_problem(random.Random(seed), 30) for seed in range(5)]
    singles = [singles[place] for place in range(30) for singles, _ in parts]
    pairs = [
        (5 * one + part, 5 * zero + part, cost) for part, (_, mine) in enumerate(parts) for one, zero, cost in mine
    ]
    labels, cost = solve(singles, pairs)
    alone = [solve(*part) for part in parts]
    assert [labels[part::5] for part in range(5)] == [labels for labels, _ in alone]
    assert cost == sum(cost for _, cost in alone)


def test_nothing_to_solve() -> None:
    assert TwoLabelProblem().solve() == ([], 0)
    assert solve([(4, 4), (3, 1)], []) == ([0, 1], 5)
