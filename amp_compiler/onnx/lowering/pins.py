"""What an ONNX node's schema and surroundings demand: which operands may be 16-bit, which nodes stay as they are."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import onnx_ir as ir

from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.graph import Pin
from amp_compiler.onnx.model.model import OnnxModel, bodies
from amp_compiler.onnx.model.types import (
    LIST_OPS,
    Formal,
    Signature,
    canonical_domain,
    first_version,
    signature_of,
)

_CASTS = ("onnx.Cast", "onnx.CastLike")
_BITS = ("onnx.BitCast",)
_LISTING = frozenset({*(f"onnx.{name}" for name in LIST_OPS), "onnx.Identity"})
UNKNOWN_TYPE = "cannot be inferred, and is not guessed"
UNNAMED_OP = "an op of a custom domain that neither the op table nor a rule names"
_FP32_WITHIN = ("onnx.MeanVarianceNormalization",)


class _Constraints:
    """The type constraints of one node, from `onnx.defs` for the model's own opset."""

    def __init__(self, model: OnnxModel, node: ir.Node, low: DType) -> None:
        self.model, self.node, self.low = model, node, low
        self.flexible = frozenset({DType.FLOAT32, low})
        self.domain = canonical_domain(node.domain)
        self.version = node.version or model.opset(self.domain)
        known = signature_of(self.domain, node.op_type, self.version)
        self.signature = _tied_to_scale(known, self.domain, node.op_type)
        self.first_opset: int | None = None
        self.late_reason = ""
        self._tied_variables: set[str] = set()
        if self.signature is not None:
            for index, value in enumerate(node.outputs):
                formal = self.signature.output(index)
                if formal is not None and value.name and self.is_flexible(value):
                    self._tied_variables.add(formal.variable)

    def is_flexible(self, value: ir.Value | None) -> bool:
        """True for a value captured in FP32 or in the low type, or for a list of such."""
        if value is None:
            return False
        known = self.model.type_of(value)
        return (known.dtype if known.tensor else known.item) in self.flexible

    def operand(self, index: int) -> tuple[str, frozenset[DType] | None, bool]:
        """Slot name, allowed types, and whether the type is tied to that of an output."""
        formal = self._input(index)
        if formal is None:
            return f"input.{index}", None, False
        if self.node.op_type == "CastLike" and index == 1:  # its type is what the node is there for
            captured = self.model.type_of(self.node.inputs[1]).dtype if self.node.inputs[1] is not None else None
            return formal.name, frozenset() if captured is None else frozenset({captured}), False
        return formal.name, formal.allowed, formal.variable in self._tied_variables

    def _input(self, index: int) -> Formal | None:
        return None if self.signature is None else self.signature.input(index)

    def unmovable(self) -> str | None:
        """Why no other type may flow through the node, by its schema; `None` where one may."""
        if self.signature is None:
            return None
        carried = set()
        starved: list[int] = []
        for index, value in enumerate(self.node.inputs):
            formal = self._input(index)
            if formal is None or not self.is_flexible(value):
                continue
            if self.flexible <= formal.allowed:
                carried.add(formal.variable)
            elif self.low not in formal.allowed:
                starved.append(index)
        for index, value in enumerate(self.node.outputs):
            formal = self.signature.output(index)
            if formal is None or formal.variable in carried or not value.name or not self.is_flexible(value):
                continue
            if carried and self.node.op_type in LIST_OPS:  # what a list holds has the type of the list
                continue
            return self._starved(starved) or f"its output '{value.name}' does not take the type of an input"
        return None if carried else self._starved(starved)

    def _starved(self, indices: list[int]) -> str | None:
        if not indices:
            return None
        self.first_opset = first_version(self.domain, self.node.op_type, self.version, indices[0], self.low)
        since = f" before opset {self.first_opset}" if self.first_opset else ""
        self.late_reason = f"{self.node.op_type} takes no {self.low.short}{since}; the opset is {self.version}"
        return self.late_reason


def _tied_to_scale(signature: Signature | None, domain: str, op_type: str) -> Signature | None:
    """The result of a `DequantizeLinear` has the type of its scale, though its schema (opset 23) names them apart."""
    if signature is None or domain or op_type != "DequantizeLinear":
        return signature
    (name, _, variadic), scale = signature.outputs[0], signature.inputs[1][1]
    return replace(signature, outputs=((name, scale, variadic),))


def _pin_of(constraints: _Constraints, op: str, *, named: bool, quantized: str) -> Pin | None:
    """What the model demands of a node; `None` where the rules decide."""
    model, node = constraints.model, constraints.node
    values = [value for value in (*node.inputs, *node.outputs) if value is not None and value.name]
    if bodies(node):
        return Pin("keep", "control flow: what enters and leaves its bodies keeps its type")
    unknown = next((value.name for value in values if model.type_of(value).dtype is None), None)
    if op in _CASTS:
        return Pin("cast", "the model's own cast")
    if node.op_identifier() in model.ir.functions:
        return Pin("keep", "a call of a model-local function, which is not rewritten")
    if unknown is not None:
        return Pin("keep", f"the type of '{unknown}' {UNKNOWN_TYPE}")
    if op in _BITS:
        return Pin("keep", "it reads the bits of its input as another type of the same width")
    lists = [value for value in values if not model.type_of(value).tensor]
    listed = op in _LISTING and all(constraints.is_flexible(value) for value in lists)
    unnamed = not op.startswith("onnx.") and not named
    if lists and not listed:
        return Pin("keep", UNNAMED_OP if unnamed else "it handles a sequence, an optional or a sparse tensor")
    if quantized:
        return Pin("keep", quantized)
    if op == "onnx.DequantizeLinear" and "output_dtype" in node.attributes:
        return Pin("keep", "it names the type of its result")
    if unnamed:
        return Pin("keep", UNNAMED_OP)
    if constraints.signature is None and op.startswith("onnx."):
        return Pin("keep", "this version of onnx does not know the op")
    if not any(constraints.is_flexible(value) for value in values):
        return None
    wrong = constraints.unmovable()
    if wrong is None and op in _FP32_WITHIN:
        return Pin("fp32", "ONNX defines it by arithmetic with FP32 numbers, which other types do not fit")
    return Pin("keep", wrong) if wrong is not None else None


class Demands(NamedTuple):
    """What the model demands of a node.

    Args:
        pin: what it is to be; `None` where the rules decide.
        late: the first opset that admits the low type, where that alone keeps the node.
        slots: by operand, its slot, the types that it may have, and whether its type is tied to that of an output.
    """

    pin: Pin | None
    late: int | None
    slots: tuple[tuple[str, frozenset[DType] | None, bool], ...]


def demands_of(model: OnnxModel, low: DType, node: ir.Node, op: str, *, named: bool, quantized: str) -> Demands:
    """The demands on one node.

    Args:
        model: the model.
        low: the 16-bit type.
        node: the node.
        op: its canonical name.
        named: a rule names it.
        quantized: why it stays as it is that is part of a quantised pattern; empty where the rules decide.
    """
    constraints = _Constraints(model, node, low)
    pin = _pin_of(constraints, op, named=named, quantized=quantized)
    late = pin is not None and pin.reason == constraints.late_reason
    slots = tuple([constraints.operand(index) for index in range(len(node.inputs))])
    return Demands(pin, constraints.first_opset if late else None, slots)
