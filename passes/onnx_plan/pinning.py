"""What the passes that pin nodes share: their contract, and the questions that they ask about a graph."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.facts import StoredNumbers
from amp_compiler.ir.graph import STORED_KINDS, Node, Pin, PrecisionGraph
from amp_compiler.passes.base import FunctionalPass, PassResult
from amp_compiler.planner.draft import Draft
from amp_compiler.policy.op_table import op_table
from amp_compiler.policy.rules import OpInfo

MARGIN = 2.0  # what is added to a greater number than the largest one / MARGIN may take it out of range


class PinPass(FunctionalPass[Draft]):
    """Base of the passes that pin nodes to FP32 which neither the model nor a pass before has pinned."""

    exact: ClassVar[bool] = True
    idempotent: ClassVar[bool] = True

    def requires(self, subject: Draft) -> str | None:
        """No decision was made yet."""
        return "the nodes are classified already" if subject.decisions else None

    def remember(self, subject: Draft) -> dict[str, Pin]:
        """The pins that are there."""
        return {name: node.pin for name, node in subject.graph.nodes.items() if node.pin is not None}

    def ensures(self, subject: Draft, remembered: Any) -> str | None:
        """Every pin that was there is there."""
        nodes = subject.graph.nodes
        lost = next((name for name, pin in remembered.items() if nodes[name].pin != pin), None)
        return None if lost is None else f"the pin of '{lost}' was changed"

    @abstractmethod
    def pins(self, draft: Draft) -> Mapping[str, str]:
        """By name of the node, why it must run in FP32."""

    def run(self, subject: Draft) -> PassResult[Draft]:
        """Pin them."""
        pins = self.pins(subject)
        if not pins:
            return PassResult(subject, False)
        return PassResult(replace(subject, graph=subject.graph.changed(pins)), True)


class Walker:
    """Questions about the neighbourhood of nodes.

    Args:
        graph: the graph.
        low: the 16-bit type.

    Attributes:
        pins: by node, why it must run in FP32; filled by `pin`.
    """

    def __init__(self, graph: PrecisionGraph, low: DType) -> None:
        self.graph, self.low = graph, low
        self.pins: dict[str, str] = {}
        self._ops = op_table()
        self._origins: dict[str, str] = {}

    def info(self, node: Node) -> OpInfo:
        """What the op table says of a node."""
        return self._ops.info(node.op)

    def pin(self, node: Node, reason: str) -> None:
        """Pin a node, unless it is pinned; the first reason stands."""
        if node.pin is None:
            self.pins.setdefault(node.name, reason)

    def passes(self, node: Node) -> bool:
        """True for a node that gives elements on as they are."""
        cast = node.pin is not None and node.pin.precision == "cast" and node.op == "onnx.Cast"
        return (cast or self.info(node).moves != "") and self.makes_floats(node)

    def origin(self, name: str) -> str:
        """The value that a value holds elements of, moves of elements looked through."""
        way = []
        while name not in self._origins and (maker := self.graph.producer(name)) is not None and self.passes(maker):
            if self.info(maker).moves == "place":  # which adds elements, or those of another operand
                break
            way.append(name)
            name = maker.inputs[0].value
        result = self._origins.get(name, name)
        self._origins.update(dict.fromkeys(way, result))
        return result

    def makes_floats(self, node: Node) -> bool:
        """True for a node with a floating-point result."""
        return any(self.graph.values[name].dtype.is_float for name in node.outputs)

    def holds_data(self, name: str) -> bool:
        """True for a value with stored data."""
        return self.graph.values[name].kind in STORED_KINDS

    def users(self, node: Node) -> Iterator[Node]:
        """The nodes that read what a node makes."""
        for name in node.outputs:
            for user, _ in self.graph.users(name):
                yield user

    def reach(self, node: Node, through: Callable[[Node], bool], most: float = math.inf) -> list[Node]:
        """A node, and what reads what it makes, as far as nodes are let through, and at most so many steps."""
        reached, frontier = {node.name: node}, [node]
        while frontier and most > 0:
            users = (user for one in frontier for user in self.users(one) if user.name not in reached)
            fresh = {user.name: user for user in users if through(user)}
            reached.update(fresh)
            frontier, most = list(fresh.values()), most - 1
        return list(reached.values())

    def leaves(self, nodes: Iterable[Node]) -> bool:
        """True where a node makes an output of the model, which is no output of the graph where its type is free."""
        return any(name in self.graph.outputs or not self.graph.users(name) for one in nodes for name in one.outputs)

    def scalar(self, node: Node, index: int) -> float | None:
        """The number that an operand holds, perhaps many times, where it is stored and but one."""
        if index >= len(node.inputs):
            return None
        name = self.origin(node.inputs[index].value)
        value = self.graph.values[name]
        if value.numel != 1 or not (value.dtype.is_float or value.dtype.value.startswith("int")):
            return None
        numbers = self.graph.stored_numbers(name) if self.holds_data(name) else None
        return None if numbers is None else numbers.number

    def largest(self, name: str, ranges: Mapping[str, float]) -> float:
        """The largest magnitude of stored data, or that calibration has seen; 0 where it is not known."""
        numbers = self.graph.stored_numbers(name) if self.holds_data(name) else None
        return ranges.get(name, 0.0) if numbers is None else numbers.largest

    def scales(self, node: Node) -> bool:
        """True for a product with one stored number."""
        return node.op == "onnx.Mul" and any(self.scalar(node, index) is not None for index in range(2))

    def behind(self, node: Node, index: int) -> Node | None:
        """What made an operand, moves of elements looked through."""
        return self.maker(node.inputs[index].value)

    def maker(self, name: str) -> Node | None:
        """What made the elements of a value."""
        return self.graph.producer(self.origin(name))

    def fits(self, name: str) -> bool:
        """True for stored data that the low type holds to all their digits."""
        numbers = self.graph.stored_numbers(name)
        if numbers is None:
            return self.graph.values[name].numel == 0
        return not (numbers.infinite or numbers.subnormal) and numbers.largest <= self.low.format.max

    def stored(self) -> Iterator[tuple[str, StoredNumbers]]:
        """The FP32 data that some node reads, with what is known of them."""
        graph = self.graph
        for name, value in graph.values.items():
            if value.kind in STORED_KINDS and value.dtype is DType.FLOAT32 and graph.readers(name):
                numbers = graph.stored_numbers(name)
                if numbers is not None:
                    yield name, numbers
