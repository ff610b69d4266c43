"""Sums of squares, and all that stands between an op that overflows and the one that brings its result back."""

from __future__ import annotations

from collections.abc import Iterator

from amp_compiler.ir.graph import Node
from amp_compiler.passes.onnx_plan.pinning import Walker

_GROWING = frozenset(
    {"onnx.Add", "onnx.Sub", "onnx.Max", "onnx.Min", "onnx.Clip", "onnx.Sum", "onnx.ReduceSum", "onnx.ReduceMean"}
)
_ENDING = frozenset({"onnx.Sqrt", "onnx.Reciprocal", "onnx.Div", "onnx.Log", "onnx.Pow"})
_SQUARING = ("onnx.Mul", "onnx.Pow")
_REACH = 12  # nodes between an op that overflows and the one that brings its result back into range


class Squares(Walker):
    """Finds squares that are summed, and follows them to the root or quotient that they end in."""

    def sums_of_squares(self) -> Iterator[tuple[str, ...]]:
        """The nodes of each sum of squares, up to the root or quotient that it ends in; the square comes first."""
        for node in [node for node in self.graph.nodes.values() if node.op in _SQUARING]:
            squared = self.sums_squares(node) or (node.op == "onnx.Pow" and self.scalar(node, 1) == 2)
            if squared and self._is_summed(node):
                yield (node.name, *self.to_end(node))

    def sums_squares(self, node: Node) -> bool:
        """True for a product of a value with itself that is summed."""
        square = node.op == "onnx.Mul" and len(node.inputs) == 2 and node.inputs[0].value == node.inputs[1].value
        return square and self._is_summed(node)

    def to_end(self, seed: Node) -> list[str]:
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
                    elif user.op in _GROWING or self.passes(user) or self.scales(user):
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
        names: list[str] = []
        following = [node] if node.op == "onnx.Sqrt" else []
        if node.op == "onnx.Reciprocal" or (node.op in ("onnx.Div", "onnx.Pow") and self.scalar(node, 0) is not None):
            following = [node]
        while following:
            current = following.pop()
            wanted = ("onnx.Reciprocal", "onnx.Div") if current.op == "onnx.Sqrt" else ("onnx.Mul",)
            for user in self.users(current):
                if user.op in wanted and user.name not in came:
                    came[user.name] = current.name
                    names.append(user.name)
                    if user.op == "onnx.Reciprocal" or (user.op == "onnx.Div" and self.scalar(user, 0) is not None):
                        following.append(user)
        return names

    def _is_summed(self, node: Node) -> bool:
        frontier = [node]
        for _ in range(_REACH):
            users = [user for current in frontier for user in self.users(current)]
            if any(user.op in ("onnx.ReduceSum", "onnx.ReduceMean") for user in users):
                return True
            frontier = [user for user in users if self.passes(user) or self.scales(user)]
        return False
