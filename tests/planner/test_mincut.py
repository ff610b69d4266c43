"""Two-label problems against brute force."""

from __future__ import annotations

import itertools
import random

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


def solve(singles: list[tuple[int, int]], pairs: Pairs) -> list[int]:
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
    assert tuple(solve(singles, pairs)) == best


def test_nothing_to_solve() -> None:
    assert TwoLabelProblem().solve() == []
    assert solve([(4, 4), (3, 1)], []) == [0, 1]
