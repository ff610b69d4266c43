"""The search of `amp.tune` on measurements that are made up: what it finds, and what that costs."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_compiler.diagnose.tuning.search import OutOfReachError, find_kept, run_limit

TOLERANCE = 1.0
OVERHEAD = 6  # runs that a tuning takes beside the search


class Planted:
    """An error that is small exactly where the planted nodes are kept.

    Args:
        alone: nodes each of which has to be kept.
        pairs: of two nodes, which make a large error unless both are kept.
        small: what each other node adds.
    """

    def __init__(self, alone, pairs=(), small=0.0, nodes=0):
        self.alone, self.pairs, self.small, self.nodes = set(alone), [set(pair) for pair in pairs], small, nodes
        self.requests: list[frozenset[str]] = []

    @property
    def needed(self) -> set[str]:
        return self.alone.union(*self.pairs)

    def __call__(self, kept: frozenset[str]) -> float:
        self.requests.append(kept)
        error = self.small * (self.nodes - len(kept))
        error += sum(10.0 for name in self.alone if name not in kept)
        return error + sum(7.0 for pair in self.pairs if not pair <= kept)


@st.composite
def plants(draw):
    """Nodes, the planted ones near the head of the order between a few others that only look bad."""
    nodes = draw(st.integers(200, 5000))
    count = draw(st.integers(0, 8))
    lookalikes = draw(st.integers(0, 4))
    rng = random.Random(draw(st.integers(0, 2**32)))
    names = [f"n{place}" for place in range(nodes)]
    head = rng.sample(names, count + lookalikes)
    others = [name for name in names if name not in set(head)]
    planted = head[:count]
    rng.shuffle(head)
    pairs = [tuple(planted[:2])] if count >= 2 and draw(st.booleans()) else []
    alone = planted[2:] if pairs else planted
    oracle = Planted(alone, pairs, small=0.5 / nodes, nodes=nodes)
    return [*head, *others], oracle, draw(st.integers(1, 2 * len(head) + 1))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(plants())
def test_exactly_the_planted_nodes_are_found_at_a_bounded_cost(case):
    order, oracle, guess = case
    result = find_kept(order, oracle, TOLERANCE, first=guess, allowance=run_limit(len(order)) - OVERHEAD)
    assert set(result.kept) == oracle.needed and not result.stopped
    assert set(result.needed) == oracle.needed and all(error > TOLERANCE for error in result.needed.values())
    assert result.runs == len(oracle.requests) <= 4 * math.log2(len(order)) + len(result.kept)
    assert result.error <= TOLERANCE and len(set(oracle.requests)) == len(oracle.requests)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.integers(200, 5000), st.integers(1, 8), st.integers(0, 2**32))
def test_the_cost_is_bounded_where_the_order_says_nothing(nodes, count, seed):
    rng = random.Random(seed)
    order = [f"n{place}" for place in range(nodes)]
    oracle = Planted(rng.sample(order, count))
    result = find_kept(order, oracle, TOLERANCE)
    assert result.error <= TOLERANCE and oracle(frozenset(result.kept)) <= TOLERANCE
    assert result.runs <= 4 * math.log2(nodes) + len(result.kept)
    assert oracle.needed <= set(result.kept) and set(result.needed) <= oracle.needed
    assert bool(result.stopped) == (set(result.kept) != set(result.needed))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(2, 300), st.integers(0, 2**32), st.integers(2, 12), st.integers(1, 20))
def test_any_measurement_gives_a_set_that_met_the_tolerance_or_says_that_there_is_none(nodes, seed, allowance, first):
    order, requested = [f"n{place}" for place in range(nodes)], {}

    def measure(kept):
        requested.setdefault(kept, random.Random(f"{seed} {sorted(kept)}").choice([0.0, 2.0, math.nan, math.inf]))
        return requested[kept]

    try:
        result = find_kept(order, measure, TOLERANCE, allowance=allowance, first=first)
    except OutOfReachError as out:
        assert not requested[frozenset(order)] <= TOLERANCE and not out.error <= TOLERANCE
        return
    assert requested[frozenset(result.kept)] <= TOLERANCE
    assert result.runs <= allowance + len(result.kept)


def test_errors_that_add_up_keep_as_few_as_meet_the_tolerance():
    sizes = {f"n{place}": 2.0**-place for place in range(200)}
    result = find_kept(list(sizes), lambda kept: sum(sizes[one] for one in sizes if one not in kept), 0.3)
    assert result.kept == ("n0", "n1", "n2") and result.needed["n2"] == pytest.approx(0.5)


def test_of_two_nodes_that_are_harmless_alone_one_is_kept():
    order = [f"n{place}" for place in range(200)]
    result = find_kept(order, lambda kept: 0.0 if {"n0", "n1"} & kept else 5.0, TOLERANCE)
    assert result.kept in {("n0",), ("n1",)} and result.needed


def test_time_and_runs_that_are_up_leave_a_set_that_meets_the_tolerance():
    order = [f"n{place}" for place in range(1000)]
    oracle = Planted(["n500", "n700"])
    result = find_kept(order, oracle, TOLERANCE, expired=lambda: True)
    assert set(result.kept) == set(order) and result.stopped == "the time was up" and result.runs == 2
    result = find_kept(order, oracle, TOLERANCE, most=12)
    assert (
        result.runs <= 12 and oracle(frozenset(result.kept)) <= TOLERANCE and "runs that were allowed" in result.stopped
    )
