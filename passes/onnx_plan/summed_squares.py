"""Sums of squares, and all that stands between an op that overflows and the one that brings its result back."""

from __future__ import annotations

from collections.abc import Iterator

from amp_compiler.ir.graph import Node
from amp_compiler.passes.onnx_plan.pinning import Walker

SUMS = frozenset({"onnx.ReduceSum", "onnx.ReduceMean", "onnx.AveragePool", "onnx.GlobalAveragePool"})
_GROWING = SUMS | {f"onnx.{op}" for op in ("Add", "Sub", "Max", "Min", "Clip", "Sum", "Relu", "Abs", "Neg", "CumSum")}
_TOTALS = SUMS | {"onnx.ReduceLogSum"}
_ROOTS = frozenset({"onnx.Sqrt", "onnx.Log", "onnx.Reciprocal"})  # steep at zero: a lost square shows
_ENDING = frozenset(f"onnx.{op}" for op in ("Sqrt", "Reciprocal", "Div", "Log", "ReduceLogSum", "Pow"))
PRODUCTS = frozenset({"onnx.MatMul", "onnx.Einsum", "onnx.Gemm"})
SQUARING = PRODUCTS | {"onnx.Mul", "onnx.Pow", "onnx.ReduceSumSquare"}
"""The ops that may make squares, or sums of them."""
_MANY = 256  # a divisor that brings back what overflows, and no scale of scores
REACH = 12  # nodes between an op that overflows and the one that brings its result back into range


class Squares(Walker):
    """Finds squares that are summed, and follows them to the root or quotient that they end in."""

    def sums_of_squares(self) -> Iterator[tuple[str, ...]]:
        """The nodes of each sum of squares, up to the root or quotient that it ends in; the square comes first."""
        for node in [node for node in self.graph.nodes.values() if node.op in ("onnx.Mul", "onnx.Pow")]:
            if self.squares(node) and self.is_summed(node):
                yield (node.name, *self.to_end(node))

    def sums_squares(self, node: Node) -> bool:
        """True for a product of a value with itself that is summed, or ends under a root, a logarithm or a quotient."""
        return self._squares(node) and (self.is_summed(node) or self._ends_steeply(node))

    def squares(self, node: Node) -> bool:
        """True for a square, or a sum of squares."""
        power = node.op == "onnx.Pow" and self.scalar(node, 1) == 2
        return power or node.op == "onnx.ReduceSumSquare" or self._squares(node)

    def _squares(self, node: Node) -> bool:
        if node.op != "onnx.Mul" and node.op not in PRODUCTS:
            return False
        factors = [operand.value for operand in node.inputs]
        if node.op in PRODUCTS and len(factors) >= 2:  # of rows with themselves: squares, and their sum
            crosses = node.op == "onnx.MatMul" or _crosses(str(node.attrs.get("equation", "")))
            is_power = factors[0] == factors[1] and crosses  # of a matrix: rows times columns
            return self.origin(factors[0]) == self.origin(factors[1]) and not is_power
        return node.op == "onnx.Mul" and len(factors) == 2 and self._are_same(factors[0], factors[1])

    def _are_same(self, one: str, other: str, depth: int = 3) -> bool:
        """True for one value, and for two that nodes of one kind make of the same: exporters repeat slices."""
        first, second = self.graph.producer(one), self.graph.producer(other)
        known = first is not None and (self.passes(first) or first.op == "onnx.Constant")
        if one == other or first is None or second is None or not known or not depth:
            numbers = self.graph.stored_numbers(one) if self.holds_data(one) and self.holds_data(other) else None
            return one == other or (numbers is not None and numbers == self.graph.stored_numbers(other))
        alike = first.op == second.op and first.attrs == second.attrs and len(first.inputs) == len(second.inputs)
        places = first.outputs.index(one) == second.outputs.index(other)
        pairs = zip(first.inputs, second.inputs, strict=True) if alike and places else ()
        return alike and places and all(self._are_same(a.value, b.value, depth - 1) for a, b in pairs)

    def _ends_steeply(self, node: Node) -> bool:
        """True where a root, logarithm or quotient by it lies behind a square; of products by all but small numbers."""
        names = [node.name, *self.to_end(node)]
        values = {value for name in names for value in self.graph.nodes[name].outputs}

        def is_steep(end: Node) -> bool:
            divisor = end.inputs[1].value if end.op == "onnx.Div" else ""
            far = not self.holds_data(divisor) or (self.scalar(end, 1) or 0.0) >= _MANY if divisor else False
            cosine = node.op in PRODUCTS and far
            return end.op in _ROOTS or divisor in values or cosine or (
                end.op == "onnx.Pow" and end is not node and (self.scalar(end, 1) or 1.0) < 1
            )  # fmt: skip

        return any(is_steep(self.graph.nodes[name]) for name in names)

    def to_end(self, seed: Node) -> list[str]:
        """The nodes between an op that overflows and the ops that bring its result back into range, those included."""
        came: dict[str, str] = {}
        mixed: set[str] = set()  # behind a product with stored numbers, of which a logarithm or root alone is an end
        means: set[str] = set()  # behind a quotient by a stored number
        ends: list[str] = []
        frontier = [seed]
        for _ in range(REACH):
            following: list[Node] = []
            for node in frontier:
                for user in self.users(node):
                    if user.name in came or (node.name in mixed and user.op in _ENDING - {"onnx.Log", "onnx.Sqrt"}):
                        continue
                    mixes = self.mixes(user) and node.name not in means
                    mixed.update([user.name] if mixes or node.name in mixed or node.name in means else [])
                    means.update([user.name] if node.name in means else [])
                    if user.op in _ENDING:
                        came[user.name] = node.name
                        if user.op == "onnx.Div" and self._rescales(user):  # to a mean, of which a root may be taken
                            means.add(user.name)
                            following.append(user)
                        ends.append(user.name)
                        ends += self._after_root(user, came)
                    elif (
                        user.op in _GROWING
                        or self.passes(user)
                        or self._rescales(user)
                        or mixes
                        or self._multiplies_sums(user)
                        or (self.weighs(user) and node.name not in mixed)
                    ):
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

    def _rescales(self, node: Node) -> bool:
        """True for a product with, or a quotient by, one number, stored or computed as a size is."""
        divisor = node.inputs[1:] if node.op == "onnx.Div" else node.inputs if node.op == "onnx.Mul" else ()
        by_one = any(self.graph.values[one.value].shape == () for one in divisor)
        return by_one or self.scales(node) or (node.op == "onnx.Div" and self.scalar(node, 1) is not None)

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

    def is_summed(self, node: Node) -> bool:
        """True for what a sum or mean reads, moves of elements, scales and weights between."""
        return bool(self.to_sum(node))

    def to_sum(self, node: Node) -> list[Node]:
        """The nodes up to the first sums or means of what a node makes, those included; none where there are none."""
        frontier, between = [node], list[Node]()
        for _ in range(REACH):
            users = [user for current in frontier for user in self.users(current)]
            sums = [user for user in users if user.op in _TOTALS or self.averages(user)]
            if sums:
                return [*between, *sums]
            frontier = [user for user in users if self.passes(user) or self.scales(user) or self.weighs(user)]
            between += frontier
        return []

    def mixes(self, node: Node) -> bool:
        """True for a product of matrices or a convolution with stored numbers."""
        product = self.info(node).family in ("matmul", "convolution")
        return product and any(self.holds_data(one.value) for one in node.inputs[:2])

    def averages(self, node: Node) -> bool:
        """True for a convolution with a stored window, which has no negative number."""
        numbers = self.graph.stored_numbers(node.inputs[1].value) if node.op == "onnx.Conv" else None
        return numbers is not None and self.mixes(node) and numbers.least >= 0

    def _multiplies_sums(self, node: Node) -> bool:
        """True for the product of two sums of squares, as under the root of a cosine."""
        makers = [self.behind(node, index) for index in range(2)] if node.op == "onnx.Mul" else [None]
        return all(one is not None and self.squares(one) for one in makers)

    def weighs(self, node: Node) -> bool:
        """True for a product that is summed: that of squares with weights or a mask."""
        return node.op == "onnx.Mul" and any(user.op in SUMS for user in self.users(node))


def _crosses(equation: str) -> bool:
    """True for an einsum that sums over one dimension of its first operand and another one of its second."""
    read, _, result = equation.replace(" ", "").partition("->")
    one, _, other = read.partition(",")
    summed = [letter for letter in one if letter in other and letter not in result]
    return any(one.index(letter) != other.index(letter) for letter in summed)
