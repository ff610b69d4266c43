"""Terms: what a value may be made by, matched backwards from it on an `onnx_ir` graph.

`onnxscript.rewriter` has patterns too. It takes another order of operands for another pattern, so that a GELU by tanh
is 64 of them, knows no alternatives at the root, and tells nothing of a match whose inner values are read elsewhere;
such a one is planned as a whole here, though it cannot be fused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from amp_compiler.onnx.model.data import array_of, tensor_of

MOST = 16
"""Elements up to which stored data are looked at: axes, and single numbers."""
_NUMPY = {int(kind): kind.numpy() for kind in (
    ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE, ir.DataType.INT32,
    ir.DataType.INT64,
)}  # fmt: skip
_COPIES = ("Cast", "Identity")
_SHAPES = ("Reshape", "Unsqueeze", "Squeeze")
_CLOSE = 1e-6  # relative: a constant that was written with seven digits


@dataclass(frozen=True)
class Found:
    """What was found of a term.

    Args:
        values: by the names that the term gives them.
        nodes: the nodes matched, each once.
    """

    values: Mapping[str, ir.Value] = field(default_factory=dict)
    nodes: tuple[ir.Node, ...] = ()

    def binding(self, name: str, value: ir.Value) -> Found | None:
        """With a value under a name; `None` where another value has that name."""
        known = self.values.get(name)
        if known is not None:
            return self if known is value else None
        return Found({**self.values, name: value}, self.nodes)

    def holding(self, node: ir.Node) -> Found:
        """With one node more."""
        return self if node in self.nodes else Found(self.values, (*self.nodes, node))


Term = Callable[[ir.Value, Found], Iterator[Found]]
"""What a value may be: gives the ways in which it is that, with what was found before."""


def whatever(name: str) -> Term:
    """Any value, the same one wherever the name stands."""

    def match(value: ir.Value, so_far: Found) -> Iterator[Found]:
        bound = so_far.binding(name, value)
        if bound is not None:
            yield bound

    return match


def stored(name: str) -> Term:
    """Data that are stored with the model, or a copy or cast of such."""

    def match(value: ir.Value, so_far: Found) -> Iterator[Found]:
        behind: ir.Value | None = value
        while behind is not None and (maker := behind.producer()) is not None and maker.op_type in _COPIES:
            behind = maker.inputs[0] if is_op(maker, maker.op_type) else None
        if behind is not None and is_stored(behind):
            yield from whatever(name)(value, so_far)

    return match


def number(wanted: float) -> Term:
    """One stored number, as it is or rounded to the type that it is stored in."""

    def match(value: ir.Value, so_far: Found) -> Iterator[Found]:
        held = scalar_of(value)
        if held is None:
            return
        rounded = held.dtype.kind not in "iub" and float(held) == float(np.asarray(wanted, held.dtype))
        if rounded or math.isclose(float(held), wanted, rel_tol=_CLOSE):
            yield so_far

    return match


def output_of(op: str, *operands: Term) -> Term:
    """The one output of an op of ONNX's own domain, whose operands are these; those of `Add` and `Mul` in any order."""

    def match(value: ir.Value, so_far: Found) -> Iterator[Found]:
        node = value.producer()
        if node is None or not is_op(node, op) or len(node.outputs) != 1:
            return
        if op not in ("ReduceMean", "Cast") and len(node.inputs) != len(operands):
            return
        for values in (node.inputs, node.inputs[::-1])[: 1 + (op in ("Add", "Mul"))]:
            ways = iter((so_far.holding(node),))
            for term, operand in zip(operands, values, strict=False):
                ways = _onward(ways, term, operand)
            yield from ways

    return match


def _onward(ways: Iterator[Found], term: Term, value: ir.Value | None) -> Iterator[Found]:
    if value is not None:
        for so_far in ways:
            yield from term(value, so_far)


def either(*terms: Term) -> Term:
    """One of several terms: the ways of each, in their order."""

    def match(value: ir.Value, so_far: Found) -> Iterator[Found]:
        for term in terms:
            yield from term(value, so_far)

    return match


def is_op(node: ir.Node, op: str) -> bool:
    """True for a node with an op of ONNX's own domain."""
    return node.op_type == op and node.domain in ("", "ai.onnx")


def is_stored(value: ir.Value) -> bool:
    """True for data that nobody can replace: an initializer that is no input, or what a `Constant` makes."""
    maker = value.producer()
    if maker is None:
        return value.const_value is not None and not value.is_graph_input()
    return is_op(maker, "Constant") and tensor_of(value) is not None


def numbers_of(value: ir.Value | None, steps: int = 4) -> np.ndarray | None:
    """A few stored numbers in a row, casts and other shapes of them looked through; `None` where they are not stored.

    Args:
        value: a value, of at most `MOST` elements.
        steps: casts and changes of shape that are looked through.
    """
    if value is None or steps < 0:
        return None
    maker = value.producer()
    if maker is not None and maker.op_type in (*_COPIES, *_SHAPES) and is_op(maker, maker.op_type):
        held = numbers_of(maker.inputs[0], steps - 1) if maker.inputs else None
        to = maker.attributes.get("to")
        if held is None or to is None:
            return held
        return held.astype(_NUMPY[to.value]) if to.value in _NUMPY else None
    if maker is not None and is_op(maker, "Constant"):
        for name in ("value_int", "value_ints"):
            if name in maker.attributes:
                return np.asarray(maker.attributes[name].value, np.int64).reshape(-1)
    tensor = tensor_of(value) if is_stored(value) else None
    if tensor is None or not 0 < tensor.size <= MOST:
        return None
    held = np.asarray(array_of(tensor)).reshape(-1)
    return held if held.dtype.kind in "fiuV" else None


def scalar_of(value: ir.Value | None) -> np.ndarray | None:
    """The one number that a value holds, without dimensions; `None` where it is not stored, or more than one."""
    held = numbers_of(value)
    return held.reshape(()) if held is not None and held.size == 1 else None
