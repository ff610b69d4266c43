"""Why a free node got its label, in bytes: what the other label would have cost, everything else being as it is."""

from __future__ import annotations

from collections.abc import Mapping

from amp_compiler.ir.dtypes import DType
from amp_compiler.planner.free_nodes import Demand, FollowProblem, own_elements, upcast_source
from amp_compiler.planner.typing import FP32, LOW


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
        elif saved == 0:
            notes[name] = f"follows: {label} moves as few bytes as {FP32 if label == LOW else LOW}"
        else:
            notes[name] = f"follows: {label} moves {saved} fewer bytes"
    return notes


class _Counts:
    """How many users need a value in each type, by value and region, under given labels."""

    def __init__(self, problem: FollowProblem, labels: Mapping[str, str]) -> None:
        self.problem, self.labels, self.typing = problem, labels, problem.typing
        self.low, self.fp32 = problem.typing.low.itemsize, DType.FLOAT32.itemsize
        self._needs: dict[tuple[str, str], list[int]] = {}

    def saved(self, name: str) -> int | None:
        """Bytes that the label of a free node saves over the other one; `None` where the other one is forbidden."""
        node, typing = self.problem.graph.nodes[name], self.typing[name]
        to_fp32 = self.labels[name] == LOW
        if self._forbidden(name, to_fp32):
            return None
        change = own_elements(self.typing, name) * (self.fp32 - self.low) * (1 if to_fp32 else -1)
        for value in dict.fromkeys(node.inputs[index].value for index in typing.data):
            change += self._as_user(name, value, node.region, to_fp32)
        for value in typing.made:
            change += self._as_maker(value, to_fp32)
        return change

    def _forbidden(self, name: str, to_fp32: bool) -> bool:
        problem, node, typing = self.problem, self.problem.graph.nodes[name], self.typing[name]
        if to_fp32:
            makers = (problem.graph.producer(node.inputs[index].value) for index in typing.data)
            return any(
                maker is not None
                and maker.name in problem.free
                and self.labels[maker.name] == LOW
                and problem.keeps_bits(maker.name)
                for maker in makers
            )
        return problem.keeps_bits(name) and any(
            self.labels[user] == FP32
            for value in typing.made
            for demand in problem.demands(value).values()
            for user in (*demand.takers, *demand.mixers)
        )

    def _needs_of(self, value: str, region: str, demand: Demand) -> list[int]:
        """[users that need it low, users that need it fp32]."""
        found = self._needs.get((value, region))
        if found is None:
            low = sum(self.labels[user] == LOW for user in {*demand.takers, *demand.mixers})
            fp32 = sum(self.labels[user] == FP32 for user in demand.takers)
            found = self._needs[value, region] = [low + demand.low, fp32 + demand.fp32]
        return found

    def _casts(self, value: str, low_users: int, fp32_users: int, dtype: DType, source: DType) -> int:
        if self.problem.graph.is_folded(value):
            return 0
        count = (low_users > 0 and source is DType.FLOAT32) + (fp32_users > 0 and dtype is self.typing.low)
        return count * self.problem.graph.values[value].numel * (self.low + self.fp32)

    def _as_user(self, name: str, value: str, region: str, to_fp32: bool) -> int:
        demand = self.problem.demands(value)[region]
        low, fp32 = self._needs_of(value, region, demand)
        step = 1 if to_fp32 else -1
        takes = step if name in demand.takers else 0
        dtype = self.typing.result(value, self.labels)
        source = self.typing.result(self.problem.source(value), self.labels)
        after = self._casts(value, low - step, fp32 + takes, dtype, source)
        return after - self._casts(value, low, fp32, dtype, source)

    def _as_maker(self, value: str, to_fp32: bool) -> int:
        problem, numel = self.problem, self.problem.graph.values[value].numel
        now, then = (self.typing.low, DType.FLOAT32) if to_fp32 else (DType.FLOAT32, self.typing.low)
        change = 0
        for region, demand in problem.demands(value).items():
            low, fp32 = self._needs_of(value, region, demand)
            change += self._casts(value, low, fp32, then, then) - self._casts(value, low, fp32, now, now)
            for dtype in demand.casts:
                before = 0 if dtype is now else now.itemsize + dtype.itemsize
                change += numel * ((0 if dtype is then else then.itemsize + dtype.itemsize) - before)
        for user, _ in problem.graph.users(value):
            for out in user.outputs:
                if upcast_source(self.typing, out) == value:
                    for region, demand in problem.demands(out).items():
                        low, _fp32 = self._needs_of(out, region, demand)
                        change += self._casts(out, low, 0, DType.FLOAT32, then)
                        change -= self._casts(out, low, 0, DType.FLOAT32, now)
        return change
