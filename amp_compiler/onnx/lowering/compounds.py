"""Compounds: norms and GELUs that an exporter has written out in parts. What each may look like stands here.

| kind | what it is |
|---|---|
| `rms_norm` | `x / sqrt(mean(x²) + eps)`, times stored data |
| `layer_norm` | the same of `x - mean(x)`, plus stored data |
| `gelu` | `x/2 (1 + erf(x / √2))`, or by a tanh of `√(2/π) (x + 0.044715 x³)` |

A new form is one more term here, a new kind one more entry of `_KINDS`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import onnx_ir as ir

from amp_compiler.ir.graph import GELU as GELU
from amp_compiler.ir.graph import LAYER_NORM as LAYER_NORM
from amp_compiler.ir.graph import RMS_NORM as RMS_NORM
from amp_compiler.onnx.lowering.lowered import Lowered
from amp_compiler.onnx.model.model import OnnxModel
from amp_compiler.onnx.model.terms import Found, Term, either, is_op, number, output_of, scalar_of, stored, whatever

_ANCHORS = {"ReduceMean": (LAYER_NORM, RMS_NORM), "Erf": (GELU,), "Tanh": (GELU,)}
_BETWEEN = frozenset({"Add", "Mul", "Div", "Sqrt", "Reciprocal", "Pow", "Cast"})  # from an anchor to the last node
_LAST = ("Add", "Mul", "Div")
_REACH = 9  # nodes from an anchor to the last one: eps, root, reciprocal, cast, product, cast, scale, bias
_MOST = 64  # nodes that are looked at behind one anchor
_WAYS = 32  # ways of one term that are looked at


def _square(term: Term) -> Term:
    return either(output_of("Mul", term, term), output_of("Pow", term, number(2)))


def _normalized(data: Term) -> Term:
    """A quotient by the root of the mean of squares, cast or not."""
    mean = output_of("ReduceMean", _square(data))
    plus = either(output_of("Add", mean, stored("epsilon")), mean)
    root = either(output_of("Sqrt", plus), output_of("Pow", plus, number(0.5)))
    inverse = either(
        output_of("Reciprocal", root),
        output_of("Div", number(1), root),
        output_of("Pow", plus, number(-0.5)),
        output_of("Pow", root, number(-1)),
    )
    quotient = either(output_of("Mul", data, inverse), output_of("Div", data, root))
    return either(output_of("Cast", quotient), quotient)


def _scaled(data: Term) -> Term:
    return output_of("Mul", _normalized(data), stored("scale"))


_X = whatever("x")
_READ = either(output_of("Cast", _X), _X)
_CENTRED = output_of("Sub", _READ, output_of("ReduceMean", _READ))
_HALF, _ONE, _TWO = number(0.5), number(1), number(2)


def _gelu(bell: Term) -> Term:
    """`x/2 (1 + bell)` in the orders in which it is written."""
    plus = output_of("Add", bell, _ONE)
    return either(
        output_of("Mul", output_of("Mul", _X, _HALF), plus),
        output_of("Mul", output_of("Div", _X, _TWO), plus),
        output_of("Mul", _HALF, output_of("Mul", _X, plus)),
        output_of("Mul", _X, output_of("Mul", _HALF, plus)),
        output_of("Mul", _X, output_of("Div", plus, _TWO)),
        output_of("Div", output_of("Mul", _X, plus), _TWO),
    )


def _tanh_argument() -> Term:
    """`√(2/π) (x + 0.044715 x³)`, or `√(2/π) x (1 + 0.044715 x²)`."""
    outer, inner, square = number(math.sqrt(2 / math.pi)), number(0.044715), _square(_X)
    cube = either(output_of("Pow", _X, number(3)), output_of("Mul", _X, square))
    cubed = either(
        output_of("Mul", inner, cube),
        output_of("Mul", output_of("Mul", inner, _X), square),
        output_of("Mul", _X, output_of("Mul", inner, square)),
    )
    squared = either(output_of("Mul", inner, square), output_of("Mul", _X, output_of("Mul", inner, _X)))
    near_one = output_of("Add", squared, _ONE)
    return either(
        output_of("Mul", outer, output_of("Add", _X, cubed)),
        output_of("Mul", output_of("Mul", outer, _X), near_one),
        output_of("Mul", outer, output_of("Mul", _X, near_one)),
        output_of("Mul", _X, output_of("Mul", outer, near_one)),
    )


_ROOT = math.sqrt(2)
_KINDS: dict[str, tuple[Term, ...]] = {
    RMS_NORM: (_scaled(_READ), _normalized(_READ)),
    LAYER_NORM: (
        output_of("Add", _scaled(_CENTRED), stored("bias")),
        _scaled(_CENTRED),
        output_of("Add", _normalized(_CENTRED), stored("bias")),
        _normalized(_CENTRED),
    ),
    GELU: (
        _gelu(output_of("Erf", either(output_of("Div", _X, number(_ROOT)), output_of("Mul", _X, number(1 / _ROOT))))),
        _gelu(output_of("Tanh", _tanh_argument())),
    ),
}


@dataclass(frozen=True)
class Compound:
    """Nodes that make up one norm or GELU.

    Args:
        kind: `rms_norm`, `layer_norm` or `gelu`.
        last: the node that makes its result.
        nodes: its nodes, the last one first.
        values: `x`, and as far as it has them `epsilon`, `scale` and `bias`.
    """

    kind: str
    last: ir.Node
    nodes: tuple[ir.Node, ...]
    values: Mapping[str, ir.Value]


def find_compounds(model: OnnxModel) -> Iterator[list[Compound]]:
    """What is written out in a model and its bodies: the ways in which each may be read, that of most nodes first.

    The ways differ in how far it reaches: with the product with stored data or without, with the cast of its input or
    behind it. Inner values may be read by others.

    Example:
        >>> [[way.kind for way in ways] for ways in find_compounds(read_model(open_model(proto)))]
        [['rms_norm', 'rms_norm']]
    """
    for node in (node for graph in model.graphs for node in graph):
        if node.op_type in _ANCHORS and is_op(node, node.op_type) and _is_likely(node):
            ways = _ways(node)
            if ways:
                yield ways


def mark_compounds(lowered: Lowered) -> None:
    """Say of each node which kind of compound it is part of (`Node.part`, `compounds`). Changes `lowered.graph`."""
    names: dict[ir.Node, str] = {}
    order: dict[str, int] = {}
    for ways in find_compounds(lowered.model):
        if not names:
            names = {node: name for name, node in lowered.nodes.items()}
            order = {name: index for index, name in enumerate(lowered.graph.nodes)}
        nodes = lowered.graph.nodes
        parts = (*ways[0].nodes, *_guard(ways[0].values["x"]))
        own = sorted((names[node] for node in parts if node in names), key=order.__getitem__)
        for name in own:
            if not nodes[name].part and nodes[name].op != "onnx.Cast":
                nodes[name] = replace(nodes[name], part=ways[0].kind)
        lowered.graph.compounds.append(tuple(own))


def _guard(data: ir.Value) -> tuple[ir.Node, ...]:
    """What `guard_norms` has put before a norm: a `Reshape` to the shape that the value has."""
    maker = data.producer()
    if maker is None or not is_op(maker, "Reshape") or len(maker.inputs) != 2:
        return ()
    read, shape = maker.inputs
    sizes = shape.producer() if shape is not None else None
    return (maker,) if sizes is not None and is_op(sizes, "Shape") and sizes.inputs[0] is read else ()


def _is_likely(node: ir.Node) -> bool:
    """Whether what stands beside an anchor may be part of a compound: squares before a mean, `1 +` behind the rest."""
    if node.op_type == "ReduceMean":
        read = node.inputs[0] if node.inputs else None
        maker = read.producer() if read is not None else None
        return maker is not None and maker.op_type in ("Mul", "Pow")
    for user, _ in node.outputs[0].uses():
        if user.op_type == "Add" and any(scalar_of(value) == 1 for value in user.inputs):
            return True
    return False


def _ways(anchor: ir.Node) -> list[Compound]:
    ways: dict[tuple[frozenset[ir.Node], frozenset[tuple[str, ir.Value]]], Compound] = {}
    for last in _behind(anchor):
        for kind in _ANCHORS[anchor.op_type]:
            for term in _KINDS[kind]:
                for way in itertools.islice(term(last.outputs[0], Found()), _WAYS):
                    whole = anchor in way.nodes and all(node.graph is anchor.graph for node in way.nodes)
                    if whole and last.op_type != "Cast":
                        key = frozenset(way.nodes), frozenset(way.values.items())
                        ways.setdefault(key, Compound(kind, last, way.nodes, way.values))
    return sorted(ways.values(), key=lambda way: -len(way.nodes))  # stable: among equals the first found stays first


def _behind(anchor: ir.Node) -> list[ir.Node]:
    """The nodes that may be the last one of a compound."""
    seen: dict[ir.Node, None] = {}
    frontier = [anchor]
    for _ in range(_REACH):
        users = [user for node in frontier for user, _ in node.outputs[0].uses()]
        frontier = [user for user in dict.fromkeys(users) if user.op_type in _BETWEEN and user not in seen]
        seen.update(dict.fromkeys(frontier))
        if len(seen) > _MOST:
            break
    return [node for node in seen if node.op_type in _LAST and len(node.outputs) == 1]
