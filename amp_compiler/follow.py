"""The labels of free nodes as a minimum cut over the bytes that casts and the nodes themselves move.

Variable 1 is `fp32`, 0 is `low`. A value is cast at most once to each type in each region, however many nodes read the
cast. For a value v made by p and read by u1, u2, … that costs c where p is low and any u is fp32. With one more
variable a this is a sum of pairs: a=1 beside p=0 costs c, and u=1 beside a=0 is forbidden; the other direction
mirrors it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from amp_compiler.dtypes import DType
from amp_compiler.graph import Node, PrecisionGraph, Value
from amp_compiler.mincut import TwoLabelProblem
from amp_compiler.semantics import Semantics
from amp_compiler.typing_rules import FP32, KEEP, LOW, NodeTyping, Role, TypingRules

_ALIASING = "view"  # ops of this family make a new view of the same memory


@dataclass
class Demand:
    """What the users of one value in one region ask of it.

    Args:
        low: some user with a fixed label needs it in the low type.
        fp32: some user with a fixed label needs it in FP32.
        bits: some user takes it as it is, so that rounding it would be seen.
        takers: free users that need it in the type of their label.
        mixers: free users that need it in the low type under `low`, and take it as it is under `fp32`.
        casts: types that explicit casts of the model turn it into.
    """

    low: bool = False
    fp32: bool = False
    bits: bool = False
    takers: list[str] = field(default_factory=list)
    mixers: list[str] = field(default_factory=list)
    casts: list[DType] = field(default_factory=list)


class FollowProblem:
    """The choice of labels for the free nodes of one draft.

    Args:
        typing: the typing rules.
        semantics: fixed labels, free nodes, semantic types.
    """

    def __init__(self, typing: TypingRules, semantics: Semantics) -> None:
        self.typing, self.semantics = typing, semantics
        self.graph: PrecisionGraph = typing.graph
        self.labels = dict(semantics.fixed)
        self.free = dict.fromkeys(semantics.free)
        self.notes: dict[str, str] = {}
        self.returned = set(self.graph.outputs)
        self._anchors: dict[str, int | None] = {}
        self._demands: dict[str, dict[str, Demand]] = {}

    def solve(self) -> dict[str, str]:
        """Labels of all nodes, in execution order: the fixed ones, and the cheapest choice for the free ones."""
        self._hold_exact_nodes()
        problem = TwoLabelProblem()
        variables = {name: problem.variable() for name in self.free}
        builder = _CutBuilder(self, problem, variables)
        for name in self.free:
            builder.add_node(name)
        for value in self._values_at_stake():
            builder.add_value(value)
        chosen, _ = problem.solve()
        for name, variable in variables.items():
            self.labels[name] = FP32 if chosen[variable] else LOW
        return {name: self.labels[name] for name in self.graph.nodes}

    def keeps_bits(self, name: str) -> bool:
        """True for a node that may run low only where nobody could tell: an exact op on semantically FP32 data."""
        typing = self.typing[name]
        if not typing.info.exact:
            return False
        node = self.graph.nodes[name]
        return any(self.semantics.wide[node.inputs[index].value] for index in typing.data)

    def demands(self, value: str) -> dict[str, Demand]:
        """By region, what the users of `value` ask of it. Fixed labels must be known; the answer is kept."""
        found = self._demands.get(value)
        if found is None:
            found = self._demands[value] = self._collect(value)
        return found

    def fixed_type(self, value: str) -> DType | None:
        """The type of a value, `None` where a free node makes it."""
        producer = self.graph.producer(value)
        if producer is not None and producer.name in self.free and self.typing.is_flexible(value):
            return None
        return self.typing.result(value, self.labels)

    def source(self, value: str) -> str:
        """The value that a low reader of `value` reads: what was upcast, where `value` is nothing but an upcast."""
        return upcast_source(self.typing, value) or value

    def _hold_exact_nodes(self) -> None:
        """Label fp32, from the end, the exact nodes of whose result somebody needs every bit."""
        for name in reversed(list(self.free)):
            if not self.keeps_bits(name):
                continue
            made = self.typing[name].made
            if made and not any(self._needs_bits(value) for value in made):
                continue
            self.labels[name] = FP32
            del self.free[name]
            data = self.graph.nodes[name].inputs
            wide = next(data[i].value for i in self.typing[name].data if self.semantics.wide[data[i].value])
            self.notes[name] = f"follows its fp32 input '{wide}', which rounding would change for a later reader"

    def _needs_bits(self, value: str) -> bool:
        demands = self.demands(value).values()
        return any(
            demand.fp32 or demand.bits or any(dtype is not self.typing.low for dtype in demand.casts)
            for demand in demands
        )

    def _values_at_stake(self) -> dict[str, None]:
        """Values that a free node reads or makes, in a fixed order; upcasts are looked through."""
        found: dict[str, None] = {}
        for name in self.free:
            node, typing = self.graph.nodes[name], self.typing[name]
            found.update((node.inputs[index].value, None) for index in typing.data)
            for value in typing.made:
                found[value] = None
                for user, _ in self.graph.users(value):
                    found.update((out, None) for out in user.outputs if upcast_source(self.typing, out) == value)
        return found

    def _collect(self, value: str) -> dict[str, Demand]:
        demands: dict[str, Demand] = {}
        if value in self.returned:
            demand = demands.setdefault("", Demand())
            self._fixed_need(demand, self.graph.values[value].dtype)
        for user, index in self.graph.users(value):
            demand = demands.setdefault(user.region, Demand())
            typing = self.typing[user.name]
            if typing.roles[index] is Role.ANY:
                made = self.graph.values[user.outputs[0]].dtype
                if typing.is_cast and made.is_float:
                    demand.casts.append(made)
                else:
                    demand.bits = True
            elif user.name in self.free and typing.roles[index] is Role.DATA:
                self._free_need(demand, user, index, typing)
            else:
                self._settled_need(demand, user, index, typing)
        return demands

    def _free_need(self, demand: Demand, user: Node, index: int, typing: NodeTyping) -> None:
        kind = demand.mixers if typing.info.promotes and self._anchor(user) != index else demand.takers
        if user.name not in kind:
            kind.append(user.name)

    def _settled_need(self, demand: Demand, user: Node, index: int, typing: NodeTyping) -> None:
        label = self.labels[user.name] if typing.roles[index] is Role.DATA else KEEP
        if typing.mixes(label) and typing.roles[index] is Role.DATA:
            if self._anchor(user) == index:
                demand.fp32 = True
            demand.bits = True
            return
        needed = self.typing.need(user, index, label)
        if needed is not None:
            self._fixed_need(demand, needed)

    def _fixed_need(self, demand: Demand, needed: DType) -> None:
        demand.low |= needed is self.typing.low
        demand.fp32 |= needed is DType.FLOAT32

    def _anchor(self, node: Node) -> int | None:
        """The operand that counts as the one to be cast where a mixing node gets only low operands.

        It must be settled before the labels are: `None` where some operand is FP32 for sure, else the cheapest one. The
        cast is left out later where another operand came to be FP32.
        """
        if node.name not in self._anchors:

            def surely(value: str) -> DType:
                producer = self.graph.producer(value)
                if producer is not None and producer.name in self.free:
                    return DType.FLOAT32 if self.keeps_bits(producer.name) else self.typing.low
                return self.typing.result(value, self.labels)

            self._anchors[node.name] = self.typing.anchor(node, surely)
        return self._anchors[node.name]


def upcast_source(typing: TypingRules, value: str) -> str | None:
    """What a value was upcast from by an explicit cast of the model to FP32; `None` for any other value.

    Reading the source instead is exact where the source has the low type. Memory that changes in place is left alone.
    """
    graph = typing.graph
    producer = graph.producer(value)
    if producer is None or not typing[producer.name].is_cast or typing[producer.name].roles[:1] != (Role.ANY,):
        return None
    source = graph.values[producer.inputs[0].value]
    made: Value = graph.values[value]
    if made.dtype is not DType.FLOAT32 or made.volatile or source.volatile or source.numel != made.numel:
        return None
    return source.name


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
        numel = self.values[value].numel
        cost = numel * (self.low + self.fp32)
        maker = self._maker(value)
        source = self.owner.source(value)
        for demand in self.owner.demands(value).values():
            self._down(cost, demand, source)
            if maker is None:
                if self.owner.fixed_type(value) is self.typing.low:
                    self._up_from_low(cost, demand)
                continue
            variable = self.variables[maker]
            self._explicit(numel, demand, variable)
            if self.owner.keeps_bits(maker):
                for user in (*demand.takers, *demand.mixers):
                    self.problem.pair(self.variables[user], variable, None)
            else:
                self._up(cost, demand, variable)

    def _maker(self, value: str) -> str | None:
        producer = self.owner.graph.producer(value)
        return producer.name if producer is not None and producer.name in self.owner.free else None

    def _up(self, cost: int, demand: Demand, variable: int) -> None:
        if demand.fp32:
            self.problem.single(variable, if_zero=cost)
        elif len(demand.takers) == 1:
            self.problem.pair(self.variables[demand.takers[0]], variable, cost)
        elif demand.takers:
            shared = self.problem.variable()
            self.problem.pair(shared, variable, cost)
            for user in demand.takers:
                self.problem.pair(self.variables[user], shared, None)

    def _up_from_low(self, cost: int, demand: Demand) -> None:
        if demand.fp32 or not demand.takers:
            return  # paid in any case, or never
        shared = self.variables[demand.takers[0]] if len(demand.takers) == 1 else self.problem.variable()
        self.problem.single(shared, if_one=cost)
        for user in demand.takers:
            self.problem.pair(self.variables[user], shared, None)

    def _down(self, cost: int, demand: Demand, source: str) -> None:
        """Casts to the low type; `source` is low already where `value` is only its upcast."""
        users = (*demand.takers, *demand.mixers)
        maker = self._maker(source)
        if maker is None:
            if demand.low or not users or self.owner.fixed_type(source) is not DType.FLOAT32:
                return
            shared = self.variables[users[0]] if len(users) == 1 else self.problem.variable()
            self.problem.single(shared, if_zero=cost)
            for user in users:
                self.problem.pair(shared, self.variables[user], None)
            return
        variable = self.variables[maker]
        if demand.low:
            self.problem.single(variable, if_one=cost)
        elif len(users) == 1:
            self.problem.pair(variable, self.variables[users[0]], cost)
        elif users:
            shared = self.problem.variable()
            self.problem.pair(variable, shared, cost)
            for user in users:
                self.problem.pair(shared, self.variables[user], None)

    def _explicit(self, numel: int, demand: Demand, variable: int) -> None:
        """The model's own casts of the value: each moves memory unless it changes nothing."""
        for dtype in demand.casts:
            self.problem.single(
                variable,
                if_zero=0 if dtype is self.typing.low else numel * (self.low + dtype.itemsize),
                if_one=0 if dtype is DType.FLOAT32 else numel * (self.fp32 + dtype.itemsize),
            )


def own_elements(typing: TypingRules, name: str) -> int:
    """Elements that a node reads and writes at the width of its label; 0 for a view, which moves no memory."""
    node, found = typing.graph.nodes[name], typing[name]
    if found.info.family == _ALIASING:
        return 0
    values = typing.graph.values
    reads = sum(values[node.inputs[index].value].numel for index in found.data)
    return reads + sum(values[value].numel for value in found.made)
