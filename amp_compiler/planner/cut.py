"""The labels of free nodes as a minimum cut over the bytes that casts and the nodes themselves move.

Variable 1 is `fp32`, 0 is `low`. A value is cast at most once to each type in each region, however many nodes read the
cast. For a value v made by p and read by u1, u2, … that costs c where p is low and any u is fp32. With one more
variable a this is a sum of pairs: a=1 beside p=0 costs c, and u=1 beside a=0 is forbidden; the other direction
mirrors it. Where casts are nodes that a runtime starts, each costs a constant more (`Execution.cast_overhead`).
"""

from __future__ import annotations

from amp_compiler.ir.dtypes import DType
from amp_compiler.planner.free_nodes import Demand, FollowProblem, cast_origin, own_elements, upcast_source
from amp_compiler.planner.mincut import TwoLabelProblem
from amp_compiler.planner.typing import FP32, LOW

_CHEAPEST = "follows: so that casts and nodes move the fewest bytes"
_ROUNDS = 4  # of cuts, each behind the first with anchors chosen anew


def solve_follow(problem: FollowProblem) -> dict[str, str]:
    """Labels of all nodes, in execution order: the fixed ones, and the cheapest choice for the free ones.

    Args:
        problem: its `labels`, `free` and `notes` are filled in.
    """
    problem.hold_exact_nodes()
    for _ in range(_ROUNDS):
        _cut(problem)
        if not problem.better_anchors():
            break
    problem.notes.update(dict.fromkeys(problem.free, _CHEAPEST))
    return {name: problem.labels[name] for name in problem.graph.nodes}


def _cut(problem: FollowProblem) -> None:
    """Label the free nodes, optimal for the anchors as they are."""
    costs = TwoLabelProblem()
    variables = {name: costs.variable() for name in problem.free}
    builder = _CutBuilder(problem, costs, variables)
    for name in problem.free:
        builder.add_node(name)
    for value in _values_at_stake(problem):
        builder.add_value(value)
    chosen = costs.solve()
    for name, variable in variables.items():
        problem.labels[name] = FP32 if chosen[variable] else LOW


def _values_at_stake(problem: FollowProblem) -> dict[str, None]:
    """Values that free nodes read or make, in a fixed order; upcasts are looked through."""
    values: dict[str, None] = {}
    for name in problem.free:
        node, typing = problem.graph.nodes[name], problem.typing[name]
        for index in typing.data:
            values[node.inputs[index].value] = None
        for value in typing.decided_outputs(node):
            values[value] = None
            for user, _ in problem.graph.users(value) if problem.typing.cast_results else ():
                values.update((out, None) for out in user.outputs if upcast_source(problem.typing, out) == value)
    return values


class _CutBuilder:
    """Writes nodes and values of a `FollowProblem` as costs."""

    def __init__(self, owner: FollowProblem, problem: TwoLabelProblem, variables: dict[str, int]) -> None:
        self.owner, self.problem, self.variables = owner, problem, variables
        self.typing, self.values = owner.typing, owner.graph.values
        self.low, self.fp32 = owner.typing.low.itemsize, DType.FLOAT32.itemsize

    def add_node(self, name: str) -> None:
        """The node's own reads and writes."""
        moved = own_elements(self.typing, name)
        self.problem.single(self.variables[name], if_zero=moved * self.low, if_one=moved * self.fp32)

    def add_value(self, value: str) -> None:
        """The casts of one value, and that nobody sees it rounded who must not."""
        owner, low = self.owner, self.typing.low
        maker = above = owner.maker(value)
        source = value
        if value in self.typing.cast_results:
            origin = cast_origin(self.typing, value)
            if origin is not None:
                self._add_origin(value, origin.dtype)
                return
            source = upcast_source(self.typing, value) or value
            above = owner.maker(source)
        cost = owner.cast_cost(value, low, DType.FLOAT32)
        for demand in owner.demands(value).values():
            self._down(cost, demand, source, above)
            if maker is None:
                if demand.takers and self.typing.result(value, owner.labels) is low:
                    self._up(cost, demand, None)
                continue
            variable = self.variables[maker]
            if demand.casts:
                self._explicit(self.values[value].numel, demand, variable)
            if owner.keeps_bits(maker):
                for user in (*demand.takers, *demand.mixers):
                    self.problem.pair(self.variables[user], variable, None)
            else:
                self._up(cost, demand, variable)

    def _add_origin(self, value: str, origin: DType) -> None:
        """A value that the model made FP32 from a third type: both types are cast from that one, each if needed."""
        down = self.owner.cast_cost(value, origin, self.typing.low)
        demands = self.owner.demands(value).values()
        for demand in demands:
            self._down(down, demand, value, self.owner.maker(value))
        if not any(demand.fp32 or demand.bits or demand.casts for demand in demands):
            takers = [user for demand in demands for user in (*demand.takers, *demand.mixers)]
            self._up(self.owner.cast_cost(value, origin, DType.FLOAT32), Demand(takers=takers), None)

    def _up(self, cost: int, demand: Demand, variable: int | None) -> None:
        """Casts to FP32 of what a free node makes, or of what is low in any case."""
        if demand.fp32:
            if variable is not None:
                self.problem.single(variable, if_zero=cost)
        elif demand.takers:
            wide = self._shared(demand.takers, 1)
            if variable is None:
                self.problem.single(wide, if_one=cost)
            else:
                self.problem.pair(wide, variable, cost)

    def _down(self, cost: int, demand: Demand, source: str, maker: str | None) -> None:
        """Casts to the low type; `source`, made by a free `maker`, is low already where `value` is only its upcast."""
        users = [*demand.takers, *demand.mixers]
        if maker is not None:
            if demand.low:
                self.problem.single(self.variables[maker], if_one=cost)
            elif users:
                self.problem.pair(self.variables[maker], self._shared(users, 0), cost)
        elif users and not demand.low and self.typing.result(source, self.owner.labels) is DType.FLOAT32:
            self.problem.single(self._shared(users, 0), if_zero=cost)

    def _shared(self, users: list[str], label: int) -> int:
        """A variable that has a label where any of the users has it: of the one user, or a new one."""
        if len(users) == 1:
            return self.variables[users[0]]
        shared = self.problem.variable()
        for user in users:
            one, zero = (self.variables[user], shared) if label else (shared, self.variables[user])
            self.problem.pair(one, zero, None)
        return shared

    def _explicit(self, numel: int, demand: Demand, variable: int) -> None:
        """The model's own casts of the value: each moves memory unless it changes nothing."""
        for dtype in demand.casts:
            self.problem.single(
                variable,
                if_zero=0 if dtype is self.typing.low else numel * (self.low + dtype.itemsize) + self.owner.overhead,
                if_one=0 if dtype is DType.FLOAT32 else numel * (self.fp32 + dtype.itemsize) + self.owner.overhead,
            )
