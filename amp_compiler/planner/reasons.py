"""Why a free node got its label, in bytes: what the other label would have cost, everything else being as it is."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from amp_compiler.ir.dtypes import DType
from amp_compiler.planner.free_nodes import Demand, FollowProblem, cast_origin, own_elements, upcast_source
from amp_compiler.planner.typing import FP32, LOW


class Notes(Mapping[str, str]):
    """How nodes came to their labels: those of free nodes are put into words when somebody first reads any.

    Args:
        settled: those of the nodes whose label was never free.
        problem: the problem, solved.
        labels: the labels of all nodes.
    """

    def __init__(self, settled: Mapping[str, str], problem: FollowProblem, labels: Mapping[str, str]) -> None:
        self._settled, self._problem, self._labels = settled, problem, labels

    @functools.cached_property
    def _notes(self) -> dict[str, str]:
        return {**self._settled, **self._problem.notes, **follow_notes(self._problem, self._labels)}

    def __getitem__(self, name: str) -> str:
        return self._notes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._notes)

    def __len__(self) -> int:
        return len(self._notes)


def follow_notes(problem: FollowProblem, labels: Mapping[str, str]) -> dict[str, str]:
    """By free node, one clause that says why it has its label.

    Args:
        problem: the problem, solved.
        labels: the labels of all nodes.

    Example:
        `follows: low moves 128 fewer bytes`
    """
    counts = _Counts(problem, labels)
    notes = {}
    for name in problem.free:
        saved = counts.saved(name)
        label = labels[name]
        if saved is None:
            inputs = (
                "reads low values that an fp32 result would show to be rounded" if label == LOW else "is read in fp32"
            )
            notes[name] = f"follows: it {inputs}"
        else:
            notes[name] = f"follows: {_saving(label, *saved)}"
    return notes


def _saving(label: str, saved: int, casts: int) -> str:
    if saved > 0:
        return f"{label} moves {saved} fewer bytes"
    if saved < 0:
        return f"{label} saves {'a cast' if casts == 1 else f'{casts} casts'} for {-saved} more bytes"
    return f"{label} moves as few bytes as {FP32 if label == LOW else LOW}"


class _Counts:
    """How many users need a value in each type, by value and region, under given labels."""

    def __init__(self, problem: FollowProblem, labels: Mapping[str, str]) -> None:
        self.problem, self.labels, self.typing = problem, labels, problem.typing
        self.graph, self.casts_inside = problem.graph, bool(problem.typing.cast_results)
        self.low, self.fp32 = problem.typing.low.itemsize, DType.FLOAT32.itemsize
        self._needs: dict[tuple[str, str], tuple[int, int]] = {}

    def saved(self, name: str) -> tuple[int, int] | None:
        """Bytes and casts that the label of a free node saves over the other one; `None` where that is forbidden."""
        node, typing = self.problem.graph.nodes[name], self.typing[name]
        to_fp32 = self.labels[name] == LOW
        if self._forbidden(name, to_fp32):
            return None
        change = _Change(own_elements(self.typing, name) * (self.fp32 - self.low) * (1 if to_fp32 else -1))
        for value in dict.fromkeys([node.inputs[index].value for index in typing.data]):
            self._as_user(change, name, value, node.region, to_fp32)
        for value in typing.decided_outputs(node):
            self._as_maker(change, value, to_fp32)
        return change.moved, change.casts

    def _forbidden(self, name: str, to_fp32: bool) -> bool:
        problem, node, typing = self.problem, self.problem.graph.nodes[name], self.typing[name]
        if to_fp32:
            for index in typing.data:
                maker = problem.maker(node.inputs[index].value)
                if maker is not None and self.labels[maker] == LOW and problem.keeps_bits(maker):
                    return True
            return False
        return problem.keeps_bits(name) and any(
            self.labels[user] == FP32
            for value in typing.decided_outputs(node)
            for demand in problem.demands(value).values()
            for user in (*demand.takers, *demand.mixers)
        )

    def _needs_of(self, value: str, region: str, demand: Demand) -> tuple[int, int]:
        """(users that need it low, users that need it fp32)."""
        known = self._needs.get((value, region))
        if known is None:
            low, fp32 = int(demand.low), int(demand.fp32)
            if demand.takers or demand.mixers:
                low += sum([self.labels[user] == LOW for user in {*demand.takers, *demand.mixers}])
                fp32 += sum([self.labels[user] == FP32 for user in demand.takers])
            known = self._needs[value, region] = (low, fp32)
        return known

    def _casts(
        self, change: _Change, value: str, users: tuple[int, int], types: tuple[DType, DType], sign: int = 1
    ) -> None:
        """Add the casts of a value in one region.

        Args:
            change: what they are added to.
            value: the value.
            users: how many need it low, and in FP32.
            types: its own type, and that of what a low user reads.
            sign: -1 takes them away.
        """
        dtype, source = types
        down = users[0] > 0 and source is DType.FLOAT32
        up = users[1] > 0 and dtype is self.typing.low
        if not (down or up) or self.graph.is_folded(value):
            return
        numel = self.graph.values[value].numel
        if down:
            origin = cast_origin(self.typing, value)
            change.add(sign, numel * (self.low + (self.fp32 if origin is None else origin.dtype.itemsize)))
        if up:
            change.add(sign, numel * (self.low + self.fp32))

    def _as_user(self, change: _Change, name: str, value: str, region: str, to_fp32: bool) -> None:
        demand = self.problem.demands(value)[region]
        low, fp32 = self._needs_of(value, region, demand)
        step = 1 if to_fp32 else -1
        takes = step if name in demand.takers else 0
        dtype, source = self.typing.result(value, self.labels), self.problem.source(value)
        types = (dtype, dtype if source == value else self.typing.result(source, self.labels))
        self._casts(change, value, (low - step, fp32 + takes), types)
        self._casts(change, value, (low, fp32), types, -1)

    def _as_maker(self, change: _Change, value: str, to_fp32: bool) -> None:
        problem, numel = self.problem, self.problem.graph.values[value].numel
        now, then = (self.typing.low, DType.FLOAT32) if to_fp32 else (DType.FLOAT32, self.typing.low)
        for region, demand in problem.demands(value).items():
            users = self._needs_of(value, region, demand)
            for own, sign in ((then, 1), (now, -1)):
                self._casts(change, value, users, (own, own), sign)
                for dtype in demand.casts:
                    if dtype is not own:
                        change.add(sign, numel * (own.itemsize + dtype.itemsize))
        for user, _ in problem.graph.users(value) if self.casts_inside else ():
            for out in user.outputs:
                if upcast_source(self.typing, out) == value:
                    for region, demand in problem.demands(out).items():
                        low, _fp32 = self._needs_of(out, region, demand)
                        self._casts(change, out, (low, 0), (DType.FLOAT32, then))
                        self._casts(change, out, (low, 0), (DType.FLOAT32, now), -1)


@dataclass
class _Change:
    """What another label would move and cast more."""

    moved: int = 0
    casts: int = 0

    def add(self, sign: int, moved: int) -> None:
        """One cast more, or less."""
        self.moved += sign * moved
        self.casts += sign
