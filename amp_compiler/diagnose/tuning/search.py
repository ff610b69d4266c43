"""The search for the few nodes that have to stay in FP32: a pure function of what a measurement says."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Measure = Callable[[frozenset[str]], float]
LEAST = 8  # runs that a graph of a few nodes has


def run_limit(nodes: int) -> int:
    """Runs of a model that a search may take beside one for each node that it keeps: 4 log2(nodes), and at least 8.

    Args:
        nodes: the number of nodes that are searched.

    Example:
        >>> run_limit(200), run_limit(3)
        (30, 8)
    """
    return max(LEAST, math.floor(4 * math.log2(max(nodes, 1))))


@dataclass(frozen=True)
class Found:
    """What a search found.

    Args:
        kept: the nodes to keep, in the order that was given.
        error: what was measured with them.
        before: what was measured with none kept.
        needed: for each kept node that was shown to be needed, the error of the kept ones without it.
        runs: measurements taken.
        stopped: why the search ended before every kept node was shown to be needed; empty where it did not.
    """

    kept: tuple[str, ...]
    error: float
    before: float
    needed: dict[str, float] = field(default_factory=dict)
    runs: int = 0
    stopped: str = ""


class OutOfReachError(Exception):
    """The tolerance is not met with all nodes kept.

    Args:
        error: what was measured so.
    """

    def __init__(self, error: float) -> None:
        super().__init__(f"with all nodes kept the error is {error:g}")
        self.error = error


def find_kept(
    order: Sequence[str],
    measure: Measure,
    tolerance: float,
    *,
    first: int = 1,
    allowance: int | None = None,
    most: int | None = None,
    expired: Callable[[], bool] = lambda: False,
) -> Found:
    """Find a small set of nodes which, kept in FP32, bring the error under the tolerance.

    First the shortest prefix of `order` is searched, from a guess on in steps that double, then halved. Then nodes that
    are not needed are dropped from it, the last ones first, in groups that double as long as that goes well and are
    halved where it does not (delta debugging). A measurement that shows one node to be needed counts against that
    node, every other one against the allowance; so there are never more than `allowance` and the number kept.

    What is given back was measured, and met the tolerance. Where keeping more nodes never makes the error larger, no
    node can be taken from it, unless the search was stopped.

    Args:
        order: the nodes, the most sensitive first.
        measure: the error with some nodes kept; NaN counts as infinite.
        tolerance: the largest error that is allowed.
        first: the length of the prefix to begin with.
        allowance: measurements beside one for each kept node; `run_limit` by default.
        most: measurements in all; no limit by default.
        expired: whether the time is up.

    Raises:
        OutOfReachError: the tolerance is not met with all nodes kept.

    Example:
        >>> search = find_kept(["a", "b", "c", "d"], lambda kept: 0.0 if {"a", "c"} <= kept else 1.0, 0.5)
        >>> search.kept, search.needed
        (('a', 'c'), {'c': 1.0, 'a': 1.0})
    """
    spare = run_limit(len(order)) if allowance is None else allowance
    return _Search(list(order), measure, tolerance, spare, math.inf if most is None else most, expired).run(first)


@dataclass
class _Search:
    """The course of one search, with what it has shown so far."""

    order: list[str]
    measured: Measure
    tolerance: float
    allowance: int
    most: float
    expired: Callable[[], bool]
    runs: int = 0
    needed: dict[str, float] = field(default_factory=dict)
    kept: frozenset[str] | None = None  # the last that met the tolerance
    error: float = math.inf
    stopped: str = ""

    def run(self, first: int) -> Found:
        before = self.measure(frozenset())
        if before > self.tolerance and self.order:
            self.shorten(first, before)
            self.prune()
        elif before > self.tolerance:
            raise OutOfReachError(before)
        kept = tuple(name for name in self.order if name in (self.kept or ()))
        return Found(kept, self.error, before, self.needed, self.runs, self.stopped if kept else "")

    def measure(self, kept: frozenset[str]) -> float:
        self.runs += 1
        error = self.measured(kept)
        error = math.inf if math.isnan(error) else error
        if error <= self.tolerance:
            self.kept, self.error = kept, error
        return error

    def may_go_on(self, reserve: int = 0) -> bool:
        """Whether there is time for a measurement that may come to nothing, with `reserve` of them left behind it."""
        if self.stopped:
            return False
        if self.expired():
            self.stopped = "the time was up"
        elif self.runs + 1 + reserve > self.most:
            self.stopped = "the runs that were allowed are used up"
        elif self.runs - len(self.needed) + 1 + reserve > self.allowance:
            self.stopped = f"{self.allowance} runs and one for each kept node are used up"
        return not self.stopped

    # ---- the shortest prefix

    def prefix(self, length: int) -> float:
        return self.measure(frozenset(self.order[:length]))

    def shorten(self, first: int, before: float) -> None:
        """Find the shortest prefix that meets the tolerance, as far as the allowance reaches."""
        whole = len(self.order)
        low, high, at_low = 0, whole + 1, before  # `low` fails; `high` meets it, but for the one behind the end
        length, step = min(max(first, 1), whole), 1
        while high > whole:  # up, in steps that double
            if length < whole and not self.may_go_on(reserve=1):
                length = whole
            error = self.prefix(length)
            if error <= self.tolerance:
                high = length
            elif length == whole:
                raise OutOfReachError(error)
            else:
                low, at_low = length, error
                length, step = min(low + step, whole), 2 * step
        step = 1
        while high - low > 1 and self.may_go_on():
            # Down from a guess that was too long in steps that double, until one fails; then halves.
            length = max(low + 1, high - step) if low == 0 else (low + high) // 2
            error = self.prefix(length)
            if error <= self.tolerance:
                high, step = length, 2 * step
            else:
                low, at_low = length, error
        if high - low == 1:
            self.needed[self.order[low]] = at_low

    # ---- what of it is needed

    def prune(self) -> None:
        """Drop what is not needed."""
        kept = self.kept or frozenset()
        pending = [name for name in reversed(self.order) if name in kept and name not in self.needed]
        size = 1
        while pending and self.may_go_on():
            size = min(size, len(pending))
            group = pending[:size]
            error = self.without(group)
            if error <= self.tolerance:
                pending, size = pending[size:], 2 * size
                continue
            gone = self.narrow(group, error)
            pending, size = pending[gone + 1 :], max(gone, 1)

    def without(self, group: Sequence[str]) -> float:
        """The error without a group of nodes, which are dropped where the tolerance is met all the same."""
        return self.measure((self.kept or frozenset()) - set(group))

    def narrow(self, group: Sequence[str], error: float) -> int:
        """How many nodes at the head of a group can go; the one behind them is needed, and noted so.

        Args:
            group: the nodes, which cannot go together.
            error: what was measured without all of them.
        """
        low, high = 0, len(group)
        while high - low > 1 and self.may_go_on():
            middle = (low + high) // 2
            measured = self.without(group[low:middle])
            if measured <= self.tolerance:
                low = middle
            else:
                high, error = middle, measured
        if high - low == 1:
            self.needed[group[low]] = error
        return low
