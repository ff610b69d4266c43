"""`assign_precision` against brute force: the cost of every labelling, computed here from the definition of traffic."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
from planning import DEFAULT, FP16, FP32, OPS, draft_of, finish

from amp_compiler.dtypes import DType
from amp_compiler.graph import Node, Operand, Pin, PrecisionGraph, Value, ValueKind
from amp_compiler.passes.assign_precision import AssignPrecision
from amp_compiler.policy import Precision

CHOICES = ("linear", "layer_norm", "gelu", "relu", "view", "cat", "maximum", "split", "add", "mul", "gt", "to", "argmax")
SLOTS = {"linear": ("input", "weight"), "layer_norm": ("input",), "gt": ("self", "other")}


def random_graph(seed: int, free: int) -> tuple[PrecisionGraph, dict[str, str]]:
    """A graph with about `free` nodes that follow, and the decisions for its additions."""
    rng = random.Random(seed)
    window = 2 + seed % 5  # a narrow one makes values with many readers
    graph = PrecisionGraph()
    pool = []
    for index in range(rng.randint(1, 3)):
        name, dtype = f"x{index}", rng.choice([FP32, FP32, FP16])
        graph.add_value(Value(name, dtype, (rng.randint(1, 9),), rng.randint(1, 9), ValueKind.INPUT))
        pool.append(name)
    decisions: dict[str, str] = {}
    count = 0
    while count < free and len(graph.nodes) < 3 * free:
        short = rng.choice(CHOICES)
        op, name = f"aten.{short}", f"n{len(graph.nodes)}"
        arity = 2 if short in ("linear", "cat", "maximum", "add", "mul", "gt") else 1
        slots = SLOTS.get(short, ("self", "other"))
        inputs = tuple(Operand(rng.choice(pool[-window:]), slot) for slot in slots[:arity])
        dtype = FP16 if short == "to" and rng.random() < 0.5 else DType.BOOL if short in ("gt", "argmax") else FP32
        numel = rng.randint(1, 9)
        if short in ("to", "view"):
            numel = graph.values[inputs[0].value].numel
        outputs = (f"{name}a", f"{name}b") if short == "split" else (f"{name}a",)
        region = rng.choice(["", "", "", "body"])
        pin = Pin("cast", "model") if short == "to" else None
        node = Node(name, op, inputs, outputs, region=region, pin=pin)
        graph.add_node(node, [Value(out, dtype, (numel,), numel) for out in outputs])
        if short == "add" and rng.random() < 0.7:
            decisions[name] = "follow"
        count += DEFAULT.get(op, Precision.FOLLOW) is Precision.FOLLOW or name in decisions
        pool += [out for out in outputs if dtype.is_float]
    graph.outputs = rng.sample(pool, min(len(pool), rng.randint(1, 2)))
    return graph, decisions


class Oracle:
    """Costs by definition. It shares no code with the passes."""

    def __init__(self, graph: PrecisionGraph, asked: dict[str, str]) -> None:
        self.graph, self.asked = graph, asked
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
        asked = self.asked[node.name]
        if not self.data(node):
            self.fixed[node.name], sem = "keep", captured
        elif asked == "follow":
            self.free.append(node.name)
            sem = widest
        else:
            label = asked if asked != "widest" else "fp32" if widest is FP32 else "low"
            self.fixed[node.name], sem = label, FP32 if label == "fp32" else FP16
        for out in node.outputs:
            self.sem[out] = sem

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
            if producer is not None and producer.name in self.free and self.needs_bits(producer.name):
                if labels[producer.name] == "low" and seen:
                    return None
            if need is None or need is dtype:
                continue
            if producer is not None and producer.op == "aten.to" and need is FP16:
                if self.type_of(producer.inputs[0].value, labels) is FP16:
                    continue  # reads what was upcast
            casts.add((value, need, region))
        total = sum(6 * self.graph.values[value].numel for value, _, _ in casts)
        for node in self.graph.nodes.values():
            if node.op == "aten.to":
                src, dst = self.type_of(node.inputs[0].value, labels), self.graph.values[node.outputs[0]].dtype
                total += 0 if src is dst else 6 * self.graph.values[node.inputs[0].value].numel
            elif node.name in self.free and OPS.info(node.op).family != "view":
                floats = [o.value for o in node.inputs] + [
                    out for out in node.outputs if self.graph.values[out].dtype.is_float
                ]
                width = 4 if labels[node.name] == "fp32" else 2
                total += width * sum(self.graph.values[value].numel for value in floats)
        return total

    def best(self) -> tuple[int, dict[str, str]]:
        """The least cost, and of the labellings that have it the one with the fewest fp32."""
        found: tuple[int, int, dict[str, str]] | None = None
        for chosen in itertools.product(("low", "fp32"), repeat=len(self.free)):
            labels = {**self.fixed, **dict(zip(self.free, chosen, strict=True))}
            if any(
                labels[name] == "low" and self.needs_bits(name) and not self._has_float(name) for name in self.free
            ):
                continue
            cost = self.cost(labels)
            if cost is not None and (found is None or (cost, chosen.count("fp32")) < found[:2]):
                found = (cost, chosen.count("fp32"), labels)
        assert found is not None
        return found[0], found[2]

    def _has_float(self, name: str) -> bool:
        return any(self.graph.values[out].dtype.is_float for out in self.graph.nodes[name].outputs)


def check(seed: int, free: int) -> None:
    graph, decisions = random_graph(seed, free)
    draft = draft_of(graph, decisions)
    oracle = Oracle(graph, {name: decision.precision.value for name, decision in draft.decisions.items()})
    labels = dict(AssignPrecision()(draft).subject.labels)
    cost, best = oracle.best()
    assert oracle.cost(labels) == cost, graph.to_text()
    assert labels == best, graph.to_text()
    # The casts that are placed cost no more than the optimum said.
    casts = finish(draft).casts or ()
    own = cost - _cast_cost(oracle, labels)
    assert sum(cast.bytes for cast in casts) <= cost - own


def _cast_cost(oracle: Oracle, labels: dict[str, str]) -> int:
    """The part of a labelling's cost that is casts."""
    free, oracle.free = oracle.free, []
    cost = oracle.cost(labels)
    oracle.free = free
    assert cost is not None
    return cost


@pytest.mark.parametrize("start", range(0, 240, 40))
def test_cost_is_the_optimum_on_small_graphs(start: int) -> None:
    for seed in range(start, start + 40):
        check(seed, free=seed % 7 + 1)


@pytest.mark.parametrize("seed", [1000, 1001, 1002])
def test_cost_is_the_optimum_on_fourteen_free_nodes(seed: int) -> None:
    check(seed, free=13)
