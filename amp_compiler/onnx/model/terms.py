"""Terms: what a value may be made by, matched backwards from it on an `onnx_ir` graph.

`onnxscript.rewriter` has patterns too. It takes another order of operands for another pattern, so that a GELU by tanh
is 64 of them, knows no alternatives at the root, and tells nothing of a match whose inner values are read elsewhere;
such a one is planned as a whole here, though it cannot be fused.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
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


class Term(ABC):
    """What a value may be."""

    @abstractmethod
    def match(self, value: ir.Value, so_far: Found) -> Iterator[Found]:
        """The ways in which a value is that, with what was found before."""


@dataclass(frozen=True)
class Whatever(Term):
    """Any value, the same one wherever the name stands."""

    name: str

    def match(self, value: ir.Value, so_far: Found) -> Iterator[Found]:
        """Bind it."""
        bound = so_far.binding(self.name, value)
        if bound is not None:
            yield bound


@dataclass(frozen=True)
class Stored(Term):
    """Data that are stored with the model, or a copy or cast of such."""

    name: str

    def match(self, value: ir.Value, so_far: Found) -> Iterator[Found]:
        """Bind it."""
        behind: ir.Value | None = value
        while behind is not None and (maker := behind.producer()) is not None and maker.op_type in _COPIES:
            behind = maker.inputs[0] if is_op(maker, maker.op_type) else None
        if behind is not None and is_stored(behind):
            yield from Whatever(self.name).match(value, so_far)


@dataclass(frozen=True)
class Number(Term):
    """One stored number, as it is or rounded to the type that it is stored in."""

    number: float

    def match(self, value: ir.Value, so_far: Found) -> Iterator[Found]:
        """Compare it."""
        held = scalar_of(value)
        if held is not None and self._is(float(held), held.dtype):
            yield so_far

    def _is(self, held: float, dtype: np.dtype) -> bool:
        if math.isclose(held, self.number, rel_tol=_CLOSE):
            return True
        return dtype.kind not in "iub" and held == float(np.asarray(self.number, dtype))


@dataclass(frozen=True, init=False)
class Made(Term):
    """The one output of an op of ONNX's own domain, whose operands are these; those of `Add` and `Mul` in any order."""

    op: str
    operands: tuple[Term, ...]

    def __init__(self, op: str, *operands: Term) -> None:
        object.__setattr__(self, "op", op)
        object.__setattr__(self, "operands", operands)

    def match(self, value: ir.Value, so_far: Found) -> Iterator[Found]:
        """Match the operands of what makes it, one after the other."""
        node = value.producer()
        if node is None or not is_op(node, self.op) or len(node.outputs) != 1:
            return
        if self.op not in ("ReduceMean", "Cast") and len(node.inputs) != len(self.operands):
            return
        yield from self._operands(tuple(node.inputs), so_far.holding(node))
        if self.op in ("Add", "Mul"):
            yield from self._operands(tuple(reversed(node.inputs)), so_far.holding(node))

    def _operands(self, values: tuple[ir.Value | None, ...], so_far: Found) -> Iterator[Found]:
        ways = iter((so_far,))
        for term, value in zip(self.operands, values, strict=False):
            if value is None:
                return
            ways = _onward(ways, term, value)
        yield from ways


def _onward(ways: Iterator[Found], term: Term, value: ir.Value) -> Iterator[Found]:
    for so_far in ways:
        yield from term.match(value, so_far)


@dataclass(frozen=True, init=False)
class Either(Term):
    """One of several terms."""

    terms: tuple[Term, ...]

    def __init__(self, *terms: Term) -> None:
        object.__setattr__(self, "terms", terms)

    def match(self, value: ir.Value, so_far: Found) -> Iterator[Found]:
        """The ways of each, in their order."""
        for term in self.terms:
            yield from term.match(value, so_far)


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
