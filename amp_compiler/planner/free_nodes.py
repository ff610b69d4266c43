"""What labels free nodes may have, and what every reader asks of the values between them: the facts behind the cut."""

from __future__ import annotations

from dataclasses import dataclass, field

from amp_compiler.ir.dtypes import INTEGERS, DType
from amp_compiler.ir.graph import Node, PrecisionGraph, Value
from amp_compiler.planner.fixed_labels import Semantics
from amp_compiler.planner.typing import FP32, KEEP, NodeTyping, Role, TypingRules

_NEVER = 1 << 48  # bytes that a cast costs which there is not: more than all others together
_EXACT = INTEGERS | {DType.BOOL}
_FLOATS = frozenset({DType.FLOAT64, DType.FLOAT16, DType.BFLOAT16})


@dataclass(slots=True)
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
        self.overhead = self.graph.execution.cast_overhead
        self._anchors: dict[str, int | None] = {}
        self._demands: dict[str, dict[str, Demand]] = {}

    def keeps_bits(self, name: str) -> bool:
        """True for a node that may run low only where nobody could tell: an exact op on semantically FP32 data."""
        typing = self.typing[name]
        return typing.info.exact and self.semantics.widest(self.graph.nodes[name], typing.data) is not None

    def demands(self, value: str) -> dict[str, Demand]:
        """By region, what the users of `value` ask of it. Fixed labels must be known; the answer is kept."""
        known = self._demands.get(value)
        if known is None:
            known = self._demands[value] = self._collect(value)
        return known

    def cast_cost(self, value: str, src: DType, dst: DType) -> int:
        """What one cast of a value costs: its bytes, and in a file the start of a node; 0 for stored data."""
        if self.graph.is_folded(value):
            return 0
        if value in self.graph.lists:
            return _NEVER
        return self.graph.values[value].numel * (src.itemsize + dst.itemsize) + self.overhead

    def maker(self, value: str) -> str | None:
        """The free node that makes a value; `None` where there is none."""
        producer = self.graph.producer(value)
        return producer.name if producer is not None and producer.name in self.free else None

    def hold_exact_nodes(self) -> None:
        """Label fp32, from the end, the exact nodes of whose result somebody needs every bit."""
        for name in reversed(list(self.free)) if self.typing.has_exact else ():
            if not self.keeps_bits(name):
                continue
            outputs = self.typing[name].decided_outputs(self.graph.nodes[name])
            if outputs and not any(self.needs_bits(value) for value in outputs):
                continue
            self.labels[name] = FP32
            del self.free[name]
            wide = self.semantics.widest(self.graph.nodes[name], self.typing[name].data)
            self.notes[name] = f"follows its fp32 input '{wide}', which rounding would change for a later reader"

    def needs_bits(self, value: str) -> bool:
        """True where a reader with a settled label would see that `value` was rounded to the low type."""
        demands = self.demands(value).values()
        return any(
            demand.fp32 or demand.bits or any(dtype is not self.typing.low for dtype in demand.casts)
            for demand in demands
        )

    def _collect(self, value: str) -> dict[str, Demand]:
        demands: dict[str, Demand] = {}
        if value in self.returned:
            demand = demands.setdefault("", Demand())
            self._fixed_need(demand, self.graph.values[value].dtype)
        typings, free, nodes = self.typing.nodes, self.free, self.graph.nodes
        for name, index in self.graph.readers(value):
            user, typing = nodes[name], typings[name]
            demand = demands.get(user.region) or demands.setdefault(user.region, Demand())
            role = typing.roles[index]
            if role is Role.ANY:
                dtype = self.graph.values[user.outputs[0]].dtype if user.outputs else None
                if typing.is_cast and dtype is not None and dtype.is_float:
                    demand.casts.append(dtype)
                else:
                    demand.bits = True
            elif role is Role.DATA and name in free:
                self._free_need(demand, user, index, typing)
            else:
                self._settled_need(demand, user, index, typing)
        return demands

    def _free_need(self, demand: Demand, user: Node, index: int, typing: NodeTyping) -> None:
        kind = demand.mixers if typing.info.promotes and self._anchor(user) != index else demand.takers
        if not kind or kind[-1] != user.name:  # that reads it more than once
            kind.append(user.name)

    def _settled_need(self, demand: Demand, user: Node, index: int, typing: NodeTyping) -> None:
        data = typing.roles[index] is Role.DATA
        label = self.labels[user.name] if data else KEEP
        if data and typing.mixes(label):
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
        """The operand of a mixing node that must be FP32, so that the node computes in FP32.

        That any one of several will do is no cost that a cut can hold, so one is chosen before: `None` where some
        operand is FP32 for sure, else the cheapest one.
        """
        if node.name not in self._anchors:

            def surely(value: str) -> DType:
                producer = self.graph.producer(value)
                if producer is not None and producer.name in self.free:
                    return DType.FLOAT32 if self.keeps_bits(producer.name) else self.typing.low
                return self.typing.result(value, self.labels)

            self._anchors[node.name] = self.typing.anchor(node, surely)
        return self._anchors[node.name]

    def better_anchors(self) -> bool:
        """Choose as anchor what came to be FP32 anyway; True where that changed an anchor.

        The labels then cost no more than before, and the next cut may find better ones.
        """
        changed = False
        for name, anchor in self._anchors.items():
            if anchor is None or self.labels[name] != FP32:
                continue
            inputs = self.graph.nodes[name].inputs
            wide = [
                index
                for index in self.typing[name].data
                if self.typing.result(inputs[index].value, self.labels) is DType.FLOAT32
            ]
            if wide and anchor not in wide:
                self._anchors[name] = wide[0]
                changed = True
                for operand in inputs:
                    self._demands.pop(operand.value, None)
        return changed


def upcast_source(typing: TypingRules, value: str) -> str | None:
    """What a value was upcast from by an explicit cast of the model to FP32; `None` for any other value.

    Reading the source instead is exact where the source has the low type. Memory that changes in place is left alone.
    """
    source, producer = _cast_source(typing, value), typing.graph.producer(value)
    if source is None or producer is None or typing[producer.name].roles[:1] != (Role.ANY,):
        return None
    return source.name


def cast_origin(typing: TypingRules, value: str) -> Value | None:
    """What a cast of the model made FP32 that was of a third type: a mask, whole numbers; `None` for any other value.

    A low reader has it cast to the low type from the start. The result is the same: whole numbers that FP32 rounds are
    beyond FP16, and BF16 is made of them by way of FP32 in every kernel. FP64 is rounded once instead of twice, so that
    is done where casts may join: where nothing has to agree with eager execution.
    """
    source = _cast_source(typing, value)
    if source is None or source.dtype in typing.flexible:
        return None
    exact = source.dtype in _EXACT or (source.dtype in _FLOATS and typing.graph.execution.casts_join)
    return source if exact else None


def _cast_source(typing: TypingRules, value: str) -> Value | None:
    """What an explicit cast of the model to FP32 made a value of, element by element; `None` for any other value."""
    graph = typing.graph
    producer = graph.producer(value) if value in typing.cast_results else None
    if producer is None:
        return None
    source, cast = graph.values[producer.inputs[0].value], graph.values[value]
    alike = cast.dtype is DType.FLOAT32 and source.numel == cast.numel
    return source if alike and not cast.volatile and not source.volatile else None


def own_elements(typing: TypingRules, name: str) -> int:
    """Elements that a node reads and writes at the width of its label; 0 for a view, which moves no memory."""
    node, rules = typing.graph.nodes[name], typing[name]
    if rules.info.moves == "shape":
        return 0
    values, inputs, moved = typing.graph.values, node.inputs, 0
    for index in rules.data:
        moved += values[inputs[index].value].numel
    for value in rules.decided_outputs(node):
        moved += values[value].numel
    return moved
