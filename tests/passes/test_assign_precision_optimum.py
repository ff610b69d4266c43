"""`assign_precision` against brute force: the cost of every labelling, computed here from the definition of traffic."""

import itertools
from collections.abc import Iterator

import pytest
from planning import FP16, FP32, OPS, draft_of, finish
from planning_random import random_graph

from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.facts import Execution
from amp_compiler.ir.graph import Node, PrecisionGraph
from amp_compiler.ir.graph_text import format_graph
from amp_compiler.ir.plan import RETURN
from amp_compiler.planner.draft import Draft

AS_TORCH_RUNS = Execution()


class Oracle:
    """Costs by definition. It shares no code with the passes."""

    def __init__(self, graph: PrecisionGraph, requested: dict[str, str], start: int = 0) -> None:
        self.graph, self.requested, self.start = graph, requested, start
        self.sem: dict[str, DType] = {v.name: v.dtype for v in graph.values.values() if graph.producer(v.name) is None}
        self.fixed: dict[str, str] = {}
        self.free: list[str] = []
        for node in graph.nodes.values():
            self._settle(node)

    def data(self, node: Node) -> list[int]:
        return [] if node.op in ("aten.to", "aten.gt") else list(range(len(node.inputs)))

    def _settle(self, node: Node) -> None:
        captured = self.graph.values[node.outputs[0]].dtype
        widest = FP32 if any(self.sem[node.inputs[i].value] is FP32 for i in self.data(node)) else FP16
        requested = self.requested[node.name]
        if not self.data(node):
            self.fixed[node.name], sem = "keep", captured
        elif requested == "follow" or (requested == "widest" and widest is FP16 and self._is_behind_free(node)):
            self.free.append(node.name)
            sem = widest
        else:
            label = requested if requested != "widest" else "fp32" if widest is FP32 else "low"
            self.fixed[node.name], sem = label, FP32 if label == "fp32" else FP16
        for out in node.outputs:
            self.sem[out] = sem

    def _is_behind_free(self, node: Node) -> bool:
        """In a file, `widest` is free where what it reads is made by a free node."""
        makers = [self.graph.producer(operand.value) for operand in node.inputs]
        return self.graph.execution.widest_is_open and any(maker and maker.name in self.free for maker in makers)

    def widest_of(self, name: str) -> DType:
        node = self.graph.nodes[name]
        return FP32 if any(self.sem[o.value] is FP32 for o in node.inputs) else FP16

    def needs_bits(self, name: str) -> bool:
        return OPS.info(self.graph.nodes[name].op).exact and self.widest_of(name) is FP32

    def type_of(self, value: str, labels: dict[str, str]) -> DType:
        producer = self.graph.producer(value)
        captured = self.graph.values[value].dtype
        if producer is None or not captured.is_float or labels[producer.name] == "keep":
            return captured
        return FP32 if labels[producer.name] == "fp32" else FP16

    def anchor(self, node: Node) -> int | None:
        """The operand that a mixing node has cast where it has no operand that is FP32 under every labelling."""
        for operand in node.inputs:
            producer = self.graph.producer(operand.value)
            if producer is None or producer.name in self.fixed:
                if self.type_of(operand.value, self.fixed) is FP32:
                    return None
            elif self.needs_bits(producer.name):
                return None
        return min(range(len(node.inputs)), key=lambda i: (self.graph.values[node.inputs[i].value].numel, i))

    def settled(self) -> bool:
        """True where no node could be served by one of several operands."""
        mixing = (node for node in self.graph.nodes.values() if OPS.info(node.op).promotes)
        return all(self.anchor(node) is None for node in mixing if self.fixed.get(node.name) != "low")

    def reads(self, labels: dict[str, str]) -> Iterator[tuple[str, str, DType | None, bool, str]]:
        """(value, region, type that it must have, whether rounding it before would be seen, reader)."""
        for value in self.graph.outputs:
            captured = self.graph.values[value].dtype
            yield value, "", captured, captured is FP32, "return"
        for node in self.graph.nodes.values():
            label = labels[node.name]
            for index, operand in enumerate(node.inputs):
                mixes = label == "fp32" and OPS.info(node.op).promotes
                need: DType | None = None
                if index not in self.data(node):
                    seen = not (node.op == "aten.to" and self.graph.values[node.outputs[0]].dtype is FP16)
                else:
                    seen = label == "fp32"
                    if not mixes or self.anchor(node) == index:
                        need = FP32 if label == "fp32" else FP16
                yield operand.value, node.region, need, seen, node.name

    def cost(self, labels: dict[str, str]) -> int | None:
        """Bytes moved, `None` where the labelling breaks the rule for exact ops."""
        casts: set[tuple[str, DType, str]] = set()
        for value, region, need, seen, _ in self.reads(labels):
            dtype = self.type_of(value, labels)
            producer = self.graph.producer(value)
            if seen and producer is not None and self._is_rounded(producer.name, labels):
                return None
            if need is None or need is dtype:
                continue
            upcast = producer is not None and producer.op == "aten.to" and need is FP16
            if upcast and producer is not None and self.type_of(producer.inputs[0].value, labels) is FP16:
                continue  # reads what was upcast
            casts.add((value, need, region))
        total = sum(6 * self.graph.values[value].numel + self.start for value, _, _ in casts)
        for node in self.graph.nodes.values():
            if node.op == "aten.to":
                src, dst = self.type_of(node.inputs[0].value, labels), self.graph.values[node.outputs[0]].dtype
                total += 0 if src is dst else 6 * self.graph.values[node.inputs[0].value].numel + self.start
        return total + self.own_cost(labels)

    def own_cost(self, labels: dict[str, str]) -> int:
        """Bytes that free nodes read and write."""
        total = 0
        for node in map(self.graph.nodes.__getitem__, self.free):
            if OPS.info(node.op).family != "view":
                result = [out for out in node.outputs if self.graph.values[out].dtype.is_float]
                width = 4 if labels[node.name] == "fp32" else 2
                total += width * sum(
                    self.graph.values[value].numel for value in [o.value for o in node.inputs] + result
                )
        return total

    def _is_rounded(self, name: str, labels: dict[str, str]) -> bool:
        return name in self.free and self.needs_bits(name) and labels[name] == "low"

    def best(self) -> tuple[int, dict[str, str]]:
        """The least cost, and of the labellings that have it the one with the fewest fp32."""
        result: tuple[int, int, dict[str, str]] | None = None
        for chosen in itertools.product(("low", "fp32"), repeat=len(self.free)):
            labels = {**self.fixed, **dict(zip(self.free, chosen, strict=True))}
            if any(labels[name] == "low" and self.needs_bits(name) and not self._has_float(name) for name in self.free):
                continue
            cost = self.cost(labels)
            if cost is not None and (result is None or (cost, chosen.count("fp32")) < result[:2]):
                result = (cost, chosen.count("fp32"), labels)
        assert result is not None
        return result[0], result[2]

    def _has_float(self, name: str) -> bool:
        return any(self.graph.values[out].dtype.is_float for out in self.graph.nodes[name].outputs)


def shared_bytes(draft: Draft, start: int) -> int:
    own = {(cast.value, cast.dst): cast.bytes + start for cast in draft.casts or () if cast.explicit}
    total = 0
    for cast in draft.casts or ():
        maker = draft.graph.producer(cast.value)
        returned = not cast.explicit and any(name == RETURN for name, _ in cast.users)
        if returned and cast.src == cast.dst and maker is not None and maker.op == "aten.to":
            total += own.get((maker.inputs[0].value, cast.dst), 0)
    return total


def check(seed: int, free: int, execution: Execution = AS_TORCH_RUNS) -> bool:
    graph, decisions = random_graph(seed, free)
    graph.execution, start = execution, execution.cast_overhead
    draft = draft_of(graph, decisions)
    oracle = Oracle(graph, {name: decision.precision.value for name, decision in draft.decisions.items()}, start)
    draft = finish(draft)
    labels = dict(draft.labels)
    cost, best = oracle.best()
    # A cast of the model's own that is returned too is paid once; the oracle counts the planner's beside it.
    casts = [cast.bytes + start for cast in draft.casts or () if cast.src != cast.dst]
    placed = sum(casts) + shared_bytes(draft, start) + oracle.own_cost(labels)
    # Where one of several operands may be the wide one, the oracle settles on one ahead, which may cost more.
    assert placed <= cost, format_graph(graph)
    if oracle.settled():
        assert oracle.cost(labels) == placed == cost, format_graph(graph)
        assert labels == best, format_graph(graph)
    return oracle.settled()


@pytest.mark.parametrize("start", range(0, 240, 40))
def test_cost_is_the_optimum_on_small_graphs(start: int) -> None:
    settled = [check(seed, free=seed % 7 + 1) for seed in range(start, start + 40)]
    assert sum(settled) > 10


@pytest.mark.parametrize("seed", [1000, 1001, 1002])
def test_cost_is_the_optimum_on_fourteen_free_nodes(seed: int) -> None:
    check(seed, free=13)


@pytest.mark.parametrize("start", [0, 3, 17, 4096])
def test_cost_is_the_optimum_in_files_whose_casts_are_nodes(start: int) -> None:
    """There each cast costs its start too, and what runs in the widest type behind what follows is free."""
    file = Execution(cast_overhead=start, widest_is_open=True, halves_stay=True, casts_join=True, run_only=True)
    settled = [check(seed, seed % 6 + 1, file) for seed in range(40)]
    assert sum(settled) > 10
