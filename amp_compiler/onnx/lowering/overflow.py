"""Ops known to leave the range of fp16: powers, sums of squares, exponentials, and what works on their results."""

from __future__ import annotations

from collections.abc import Iterator

from amp_compiler.ir.graph import Node
from amp_compiler.onnx.lowering.compounds import GELU
from amp_compiler.onnx.lowering.walk import Walker, is_square

_SQUARES = frozenset({"onnx.ReduceSumSquare", "onnx.ReduceL2"})
_GROWING = frozenset(
    {"onnx.Add", "onnx.Sub", "onnx.Max", "onnx.Min", "onnx.Clip", "onnx.Sum", "onnx.ReduceSum", "onnx.ReduceMean"}
)
_ENDING = frozenset({"onnx.Sqrt", "onnx.Reciprocal", "onnx.Div", "onnx.Log", "onnx.Pow"})
_OFF_ZERO = frozenset({"onnx.Clip", "onnx.Max", "onnx.Add"})  # what keeps a divisor off zero
_SQUARING = ("onnx.Mul", "onnx.Pow")
_WATCHED = frozenset({"onnx.Pow", "onnx.Mul", "onnx.Exp", *_SQUARES})  # what may overflow
_REACH = 12  # nodes between an op that overflows and the one that brings its result back into range


class Overflows(Walker):
    """Pins the patterns, each up to the op that brings its numbers back into range."""

    def patterns(self) -> None:
        """Squares and exponentials."""
        for node in self.graph.nodes.values():
            if node.op not in _WATCHED or node.part == GELU:
                continue  # an infinite cube is the argument of a tanh, which is then 1
            if node.op == "onnx.Pow" and (self.scalar(node, 1) or 0) >= 2:
                self._overflows(node, "powers leave the range of fp16")
            elif node.op in _SQUARES:
                self._overflows(node, "sums of squares leave the range of fp16")
            elif self._sums_squares(node):
                self._overflows(node, "its squares are summed, which leaves the range of fp16")
            elif node.op == "onnx.Exp" and not self._is_bounded(node):
                self._overflows(node, "exponentials of more than 11 leave the range of fp16")

    def sums_of_squares(self) -> Iterator[list[str]]:
        """The nodes of each sum of squares, up to the root or quotient that it ends in; the square comes first."""
        for node in [node for node in self.graph.nodes.values() if node.op in _SQUARING]:
            squared = self._sums_squares(node) or (node.op == "onnx.Pow" and self.scalar(node, 1) == 2)
            if squared and self._is_summed(node):
                yield [node.name, *self._to_end(node)]

    def _sums_squares(self, node: Node) -> bool:
        return is_square(node) and self._is_summed(node)

    def _overflows(self, node: Node, reason: str) -> None:
        self.pin(node, reason)
        for name in self._to_end(node):
            self.pin(self.graph.nodes[name], f"it works on the result of '{node.name}': {reason}")

    def _to_end(self, seed: Node) -> list[str]:
        """The nodes between an op that overflows and the ops that bring its result back into range, those included."""
        came: dict[str, str] = {}
        ends: list[str] = []
        frontier = [seed]
        for _ in range(_REACH):
            following: list[Node] = []
            for node in frontier:
                for user in self.users(node):
                    if user.name in came:
                        continue
                    if user.op in _ENDING:
                        came[user.name] = node.name
                        ends.append(user.name)
                        ends += self._after_root(user, came)
                    elif user.op in _GROWING or self.passes(user) or self._scales(user):
                        came[user.name] = node.name
                        following.append(user)
            frontier = following
        between: dict[str, None] = {}
        for end in ends:
            name = end
            while name != seed.name and name not in between:
                between[name] = None
                name = came[name]
        return list(between)

    def _after_root(self, node: Node, came: dict[str, str]) -> list[str]:
        """After a root the quotient by it, and the product with a reciprocal: that of a large root is subnormal."""
        found: list[str] = []
        following = [node] if node.op == "onnx.Sqrt" else []
        if node.op == "onnx.Reciprocal" or (node.op in ("onnx.Div", "onnx.Pow") and self.scalar(node, 0) is not None):
            following = [node]
        while following:
            current = following.pop()
            wanted = ("onnx.Reciprocal", "onnx.Div") if current.op == "onnx.Sqrt" else ("onnx.Mul",)
            for user in self.users(current):
                if user.op in wanted and user.name not in came:
                    came[user.name] = current.name
                    found.append(user.name)
                    if user.op == "onnx.Reciprocal" or (user.op == "onnx.Div" and self.scalar(user, 0) is not None):
                        following.append(user)
        return found

    def means(self) -> Iterator[tuple[Node, list[Node]]]:
        """Each sum with what makes a mean of it, which may bring it back into range."""
        for node in self.graph.nodes.values():
            if node.op == "onnx.ReduceSum":
                yield node, list(self._brought_back(node))

    def _brought_back(self, total: Node) -> Iterator[Node]:
        """What divides a sum by another one or by a stored number, or multiplies it by one: it makes a mean of it."""
        for user in self.users(total):
            divisor = self._divisor(user) if user.op == "onnx.Div" and self.behind(user, 0) is total else None
            if divisor is not None or self._scales(user):
                yield user
                yield from divisor or ()
            elif self.passes(user):
                yield from self._brought_back(user)

    def _divisor(self, quotient: Node) -> list[Node] | None:
        """What lies between a sum and the quotient by it; nothing for a stored number, `None` for anything else."""
        if self.scalar(quotient, 1) is not None:
            return []
        found: list[Node] = []
        maker = self.graph.producer(quotient.inputs[1].value)
        while maker is not None and (maker.op in _OFF_ZERO or self.passes(maker)):
            found.append(maker)
            maker = self.graph.producer(maker.inputs[0].value)
        return found if maker is not None and maker.op == "onnx.ReduceSum" else None

    def _scales(self, node: Node) -> bool:
        return node.op == "onnx.Mul" and any(self.scalar(node, index) is not None for index in range(2))

    def _is_summed(self, node: Node) -> bool:
        frontier = [node]
        for _ in range(_REACH):
            users = [user for current in frontier for user in self.users(current)]
            if any(user.op in ("onnx.ReduceSum", "onnx.ReduceMean") for user in users):
                return True
            frontier = [user for user in users if self.passes(user) or self._scales(user)]
        return False

    def _is_bounded(self, node: Node) -> bool:
        """True for the exponential of a difference to a maximum, which is at most one."""
        maker = self.behind(node, 0)
        if maker is None or maker.op != "onnx.Sub":
            return False
        taken = self.behind(maker, 1)
        return taken is not None and taken.op == "onnx.ReduceMax" and self.origin(maker, 0) == self.origin(taken, 0)
