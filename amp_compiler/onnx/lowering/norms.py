"""Layer normalisations that an exporter has written out in parts, found on the lowered graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import onnx_ir as ir

from amp_compiler.ir.graph import Node, Pin
from amp_compiler.onnx.lowering.compounds import GELU
from amp_compiler.onnx.lowering.lowered import Lowered
from amp_compiler.onnx.lowering.walk import Walker, is_square
from amp_compiler.onnx.model.edit import unique

_SQUARING = ("onnx.Mul", "onnx.Pow")
_ROOTS = ("onnx.Sqrt", "onnx.Pow")

_ONE_TYPE = 17  # the first opset whose LayerNormalization ties the types of data and scale


def find_norms(lowered: Lowered) -> list[list[str]]:
    """The nodes of each layer normalisation that is written out, as names: the mean, the difference to it, the others.

    A norm is a quotient `d / sqrt(mean(d²) + eps)`, by `Div` or by a product with the reciprocal, where `d` is
    `x - mean(x)`. The product with stored data behind it and the sum after that belong to it. Casts between them are
    looked through, and are no part. RMS normalisations, where `d` is `x`, are none: runtimes fuse them whatever types
    data and scale have.

    Example:
        >>> find_norms(lower(read_model(open_model(proto)), DType.FLOAT16))
        [['mean', 'centred', 'square', 'variance', 'plus_eps', 'root', 'quotient', 'scale', 'bias']]
    """
    walker = _Norms(lowered, {})
    squaring = [node for node in lowered.graph.nodes.values() if node.op in _SQUARING]
    found = (walker.around(node) for node in squaring if is_square(node) or _is_power(walker, node))
    return [[node.name for node in norm] for norm in found if norm]


def pin_norm(lowered: Lowered, norm: list[str], cause: str) -> None:
    """Pin what is not pinned yet of a norm or GELU to FP32. Changes `lowered.graph`.

    Args:
        lowered: the lowered model.
        norm: its nodes, as `find_norms` gives them.
        cause: the one that is FP32, for the reason.
    """
    nodes = lowered.graph.nodes
    for name in norm:
        if nodes[name].pin is None and name != cause:
            what = "GELU" if nodes[name].part == GELU else "normalisation"
            reason = f"part of one {what} with '{cause}', which is FP32"
            nodes[name] = replace(nodes[name], pin=Pin("fp32", reason))


def guard_norms(lowered: Lowered) -> None:
    """Keep ONNX Runtime from fusing a norm with the cast in front of it. Changes the model, after a plan was applied.

    Where nothing but a written-out layer norm reads an upcast value, its fusion takes the 16-bit value itself beside
    the FP32 scale. The `LayerNormalization` of opset 17 and later has one type for both, and the model does not load
    (seen in ONNX Runtime 1.31). A `Reshape` to the shape that the value has, which moves no data, keeps the cast apart.
    """
    if lowered.model.opset("") < _ONE_TYPE:
        return
    heads = [found for norm in find_norms(lowered) if (found := _cast_head(lowered, norm)) is not None]
    if not heads:
        return
    graphs = lowered.model.graphs()
    nodes = {*lowered.node_names, *(node.name or "" for graph in graphs for node in graph)}
    values = {name for graph in graphs for name in (*graph.initializers, *(value.name or "" for value in graph.inputs))}
    values |= {value.name or "" for graph in graphs for node in graph for value in node.outputs} | lowered.value_names
    for mean, difference in heads:
        source, graph = difference.inputs[0], mean.graph
        if source is None or not isinstance(graph, ir.Graph):
            continue
        name = f"{source.name}_whole"
        sizes = f"{name}_shape"
        shape = ir.Node("", "Shape", [source], outputs=[_new(sizes, values)], name=unique(sizes, nodes))
        read = [source, shape.outputs[0]]
        whole = ir.Node("", "Reshape", read, outputs=[_new(name, values)], name=unique(name, nodes))
        for node in (mean, difference):
            node.replace_input_with(0, whole.outputs[0])
        producer = source.producer()
        if producer is not None and producer.graph is graph:
            graph.insert_after(producer, (shape, whole))
        else:
            graph.insert_before(mean, (shape, whole))


def _new(name: str, taken: set[str]) -> ir.Value:
    return ir.Value(name=unique(name, taken))


def _cast_head(lowered: Lowered, norm: list[str]) -> tuple[ir.Node, ir.Node] | None:
    """The mean and the difference of a norm with a bias, where they alone read the result of a cast."""
    mean, difference, bias = (lowered.nodes[name] for name in (*norm[:2], norm[-1]))
    kinds = (mean.op_type, difference.op_type, bias.op_type)
    if kinds != ("ReduceMean", "Sub", "Add") or mean.graph is not difference.graph:
        return None
    value = difference.inputs[0]
    maker = value.producer() if value is not None else None
    if value is None or maker is None or maker.op_type != "Cast" or mean.inputs[0] is not value:
        return None
    readers = [node for node, _ in value.uses()]
    return (mean, difference) if len(readers) == 2 and not value.is_graph_output() else None


def _is_power(walker: Walker, node: Node) -> bool:
    return node.op == "onnx.Pow" and walker.scalar(node, 1) == 2


class _Norms(Walker):
    def around(self, square: Node) -> list[Node]:
        """The norm that a square is part of; empty where it is part of none."""
        centred = self.origin(square, 0)
        head = self._head(centred)
        if not head:
            return []
        for mean in self._readers(square, "onnx.ReduceMean"):
            for path in self._to_quotient([square, mean], centred):
                return [*head, *path, *self._tail(path[-1])]
        return []

    def _readers(self, node: Node, *ops: str) -> Iterator[Node]:
        """What reads the result of a node, casts looked through."""
        for user in self.users(node):
            if user.op == "onnx.Cast":
                yield from self._readers(user, *ops)
            elif not ops or user.op in ops:
                yield user

    def _to_quotient(self, path: list[Node], centred: str) -> Iterator[list[Node]]:
        """Ways from the mean of the squares, over the sum with epsilon and the root, to the quotient."""
        for sum_ in [path, *([*path, user] for user in self._readers(path[-1], "onnx.Add") if self._is_stored(user))]:
            for root in self._readers(sum_[-1], *_ROOTS):
                power = self.scalar(root, 1) if root.op == "onnx.Pow" else 0.5
                if power == 0.5:
                    yield from self._divided([*sum_, root], centred)
                elif power == -0.5:
                    yield from self._multiplied([*sum_, root], centred)

    def _divided(self, path: list[Node], centred: str) -> Iterator[list[Node]]:
        for user in self._readers(path[-1], "onnx.Div", "onnx.Reciprocal"):
            if user.op == "onnx.Reciprocal" or self.scalar(user, 0) == 1:
                yield from self._multiplied([*path, user], centred)
            elif self.origin(user, 0) == centred:
                yield [*path, user]

    def _multiplied(self, path: list[Node], centred: str) -> Iterator[list[Node]]:
        for user in self._readers(path[-1], "onnx.Mul"):
            if any(self.origin(user, index) == centred for index in range(2)):
                yield [*path, user]

    def _head(self, centred: str) -> list[Node]:
        """The mean, the difference to it, and what `guard_norms` has put before them."""
        difference = self.graph.producer(centred)
        if difference is None or difference.op != "onnx.Sub":
            return []
        mean = self.behind(difference, 1)
        if mean is None or mean.op != "onnx.ReduceMean" or self.origin(mean, 0) != self.origin(difference, 0):
            return []
        guard = self.graph.producer(difference.inputs[0].value)
        return [mean, difference, *([guard] if guard is not None and self._is_guard(guard) else [])]

    def _is_guard(self, node: Node) -> bool:
        """True for what `guard_norms` puts in: a `Reshape` to the shape that the value has."""
        sizes = self.graph.producer(node.inputs[1].value) if node.op == "onnx.Reshape" else None
        return sizes is not None and sizes.op == "onnx.Shape" and sizes.inputs[0].value == node.inputs[0].value

    def _tail(self, quotient: Node) -> list[Node]:
        """The product with a stored scale, and the sum with a stored bias, where nothing else reads what is before."""
        found: list[Node] = []
        for op in ("onnx.Mul", "onnx.Add"):
            readers = list(self._readers(found[-1] if found else quotient))
            if len(readers) != 1 or readers[0].op != op or not self._is_stored(readers[0]):
                break
            found.append(readers[0])
        return found

    def _is_stored(self, node: Node) -> bool:
        """True where an operand of a node is stored data."""
        return any(self.holds_data(self.origin(node, index)) for index in range(len(node.inputs)))
