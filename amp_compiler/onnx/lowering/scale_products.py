"""`math: fp8` in an ONNX model: pairs of `QuantizeLinear` and `DequantizeLinear` around the operands of products."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import ml_dtypes
import numpy as np
import onnx_ir as ir

from amp_compiler.errors import LoweringError
from amp_compiler.ir.arithmetic import Fp8
from amp_compiler.ir.plan import PlannedNode, PrecisionPlan
from amp_compiler.onnx.lowering.lowered import Lowered
from amp_compiler.onnx.model.data import array_of, tensor_of
from amp_compiler.onnx.model.edit import drop_unread, names_of, new_node, take_place, unique
from amp_compiler.onnx.model.types import ir_type

FIRST_OPSET = 21  # the two ops take FP8 from 19 on; before 21 nothing that moves elements does
_IR_VERSION = 10  # of opset 21
_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_LARGEST = 448.0  # of E4M3
_VIEWS = ("Transpose", "Identity", "Cast")  # of stored data: written out in the file
_MOVED_IN_FP8 = ("Reshape", "Transpose", "Identity", "Dropout")
_MOVED = ("MaxPool", "Slice", "Squeeze", "Unsqueeze")


def fp8_nodes(plan: PrecisionPlan) -> list[tuple[PlannedNode, Fp8]]:
    """The nodes of a plan whose operands are to be FP8, with how."""
    ways = ((node, Fp8.parse(node.math)) for node in plan.nodes if node.math and node.precision == "low")
    return [(node, way) for node, way in ways if way is not None]


def scale_products(lowered: Lowered, plan: PrecisionPlan, ranges: Mapping[str, float]) -> bool:
    """Let every low node with `math: fp8` read operands that were rounded to FP8 (E4M3), in place.

    A scale is the largest magnitude over 448, in the 16-bit type of the operand. A stored operand is stored in FP8,
    with a scale for each output channel where the rule says `rowwise`; a `DequantizeLinear` makes 16 bits of it. In
    front of another one stands a pair of `QuantizeLinear` and `DequantizeLinear`, with the scale that calibration
    gives it. All readers of a value share a pair.

    Args:
        lowered: the model, on which the plan has been carried out.
        plan: the plan.
        ranges: calibrated largest magnitude by name of a value of the neutral graph.

    Returns:
        Whether there was such a node.
    """
    nodes = fp8_nodes(plan)
    if nodes:
        writer = _Writer(lowered, ranges)
        for planned, way in nodes:
            writer.quantize(planned, way)
        for value in writer.replaced:
            drop_unread(value, (*_VIEWS, "Constant"))
    return bool(nodes)


class _Stored(NamedTuple):
    """A stored operand: data, the order of their axes, and the axis of which each index has a scale of its own."""

    data: ir.TensorProtocol
    origin: ir.Value
    perm: tuple[int, ...]
    axis: int | None

    def array(self, low: np.dtype) -> np.ndarray:
        """The numbers that 16 bits hold, FP32."""
        return np.transpose(array_of(self.data), self.perm).astype(low).astype(np.float32)


class _Writer:
    def __init__(self, lowered: Lowered, ranges: Mapping[str, float]) -> None:
        self.lowered, self.ranges = lowered, ranges
        self.main = lowered.model.ir.graph
        self.value_names, self.node_names = names_of(lowered.model.graphs)
        self.initializers: dict[object, tuple[ir.Value, ir.Value]] = {}
        self.results: dict[object, ir.Value] = {}
        self.replaced: dict[ir.Value, None] = {}
        self.zero: ir.Value | None = None
        lowered.model.ir.ir_version = max(lowered.model.ir.ir_version or 0, _IR_VERSION)

    def quantize(self, planned: PlannedNode, way: Fp8) -> None:
        """Exchange both operands of a product."""
        node = self.lowered.nodes[planned.name]
        for index, name in enumerate(planned.inputs[:2]):
            value = node.inputs[index]
            if value is None:
                raise LoweringError(f"'{planned.name}' has no operand {index}", hint="plan this model again")
            stored = _stored(value, _channels(node, index) if way.scaling == "rowwise" else None)
            key = (stored and stored[1:], value if stored is None else None, way.power_of_2)
            if key not in self.initializers:
                stored_pair = self._measured(value, name, way) if stored is None else self._rounded(stored, way)
                self.initializers[key] = stored_pair
            if (key, node.graph) not in self.results:
                self.results[key, node.graph] = self._pair(value, stored, *self.initializers[key], node)
            node.replace_input_with(index, self.results[key, node.graph])
            self.replaced[value] = None
        self._part_bias(node, self.lowered.graph.values[planned.inputs[1]].rank or 0)

    def _part_bias(self, node: ir.Node, rank: int) -> None:
        """Let no bias be a row, which ONNX Runtime would round to multiples of the product of both scales.

        Where `QuantizeLinear` follows, it takes the operands for 8-bit integers and quantises what is, or becomes,
        their bias (seen in ONNX Runtime 1.31); the multiples are infinite in FP16 where the scales are small. A product
        of matrices takes a matrix of one row as well; behind a convolution stands an `Add`.
        """
        result = node.outputs[0]
        uses = [(user, 1 - index) for user, index in result.uses() if user.graph is node.graph and _is(user, ("Add",))]
        for user, index in uses if node.op_type == "MatMul" else [(node, 2)] * (len(node.inputs) > 2):
            bias = user.inputs[index]
            shape = None if bias is None else bias.shape or self.lowered.model.type_of(bias).shape
            if bias is None or shape is None or len(shape) != 1:
                continue
            axes = np.asarray([0, *range(2, rank)] if node.op_type == "Conv" else [0])
            stored = self._store(f"{bias.name}_axes", ir.Tensor(axes))
            row = self._insert("Unsqueeze", [bias, stored], f"{bias.name}_row", user)
            if node.op_type == "Conv":
                self._add_behind(node, row)
            else:
                user.replace_input_with(index, row)

    def _add_behind(self, node: ir.Node, bias: ir.Value) -> None:
        """Let a convolution have no bias of its own; the sum has the name of its result."""
        result, name = node.outputs[0], node.outputs[0].name or "value"
        total = new_node("Add", [result, bias], name, unique(f"{name}_bias_math", self.node_names))
        take_place(result, total.outputs[0], total, unique(f"{name}_product", self.value_names))
        node.append(total)
        node.resize_inputs(2)

    def _measured(self, value: ir.Value, name: str, way: Fp8) -> tuple[ir.Value, ir.Value]:
        """Scale and zero point of what is made when the model runs."""
        numbers = self.lowered.graph.stored_numbers(name)  # of `ConstantOfShape`
        largest = self.ranges.get(name, None if numbers is None else numbers.largest)
        if largest is None:
            raise LoweringError(f"calibration has not measured '{name}'", hint="take rules without 'math: fp8'")
        self.zero = self.zero or self._store("fp8_zero", ir.Tensor(np.zeros((), _E4M3)))
        return self._store(f"{value.name}_scale", self._scales(np.asarray(largest), way)), self.zero

    def _rounded(self, stored: _Stored, way: Fp8) -> tuple[ir.Value, ir.Value]:
        """Scales of stored data, and the data in FP8."""
        rest = None if stored.axis is None else tuple(one for one in range(len(stored.perm)) if one != stored.axis)
        low = ir_type(self.lowered.low).numpy()
        scales = self._scales(np.abs(stored.array(low)).max(rest, initial=0.0), way)
        spread = scales.numpy().astype(np.float32)
        spread = spread if rest is None else np.expand_dims(spread, rest)
        sizes = stored.data.shape.numpy()

        def make() -> ir.Tensor:
            return ir.Tensor(np.clip(stored.array(low) / spread, -_LARGEST, _LARGEST).astype(_E4M3), name=data.name)

        shape = ir.Shape([sizes[one] for one in stored.perm])
        data = ir.LazyTensor(make, ir.DataType.FLOAT8E4M3FN, shape)
        base = stored.origin.name
        return self._store(f"{base}_scale", scales), self._store(f"{base}_fp8", data)

    def _scales(self, largest: np.ndarray, way: Fp8) -> ir.Tensor:
        """Scales that map these magnitudes to 448 or just below; 1 for a magnitude of zero."""
        low = ir_type(self.lowered.low).numpy()
        exact = np.where(largest > 0, largest.astype(np.float64) / _LARGEST, 1.0)
        if way.power_of_2:
            exact = np.exp2(np.ceil(np.log2(exact)))
        scales = exact.astype(low)
        below = scales.astype(np.float64) < exact  # what is scaled would pass 448: far where the scale is subnormal
        return ir.Tensor(np.where(below, np.nextafter(scales, np.asarray(np.inf, low)), scales))

    def _store(self, name: str, data: ir.Tensor | ir.LazyTensor) -> ir.Value:
        data.name = unique(name, self.value_names)
        value = ir.Value(name=data.name, type=ir.TensorType(data.dtype), shape=ir.Shape(data.shape), const_value=data)
        self.main.register_initializer(value)
        return value

    def _pair(
        self, value: ir.Value, stored: _Stored | None, scale: ir.Value, data: ir.Value, node: ir.Node
    ) -> ir.Value:
        """What stands in front of a node; the first one of its graph that reads it."""
        if stored is None:
            if _is_moved(value):
                value = self._insert("Max", [value], f"{value.name}_held", node)
            rounded = self._insert("QuantizeLinear", [value, scale, data], f"{value.name}_fp8", node)
            return self._insert("DequantizeLinear", [rounded, scale, data], f"{value.name}_scaled", node)
        return self._insert("DequantizeLinear", [data, scale], f"{stored.origin.name}_scaled", node, stored.axis)

    def _insert(self, op: str, inputs: list[ir.Value], name: str, node: ir.Node, axis: int | None = None) -> ir.Value:
        attributes = [] if axis is None else [ir.AttrInt64("axis", axis)]
        result = unique(name, self.value_names)
        inserted = new_node(op, inputs, result, unique(f"{result}_math", self.node_names), attributes)
        node.prepend(inserted)
        return inserted.outputs[0]


def _stored(value: ir.Value, axis: int | None) -> _Stored | None:
    """The data behind an operand, transposes looked through; `None` where there are none, or they may be exchanged."""
    orders: list[list[int] | None] = []
    while (node := value.producer()) is not None and _is(node, _VIEWS) and node.inputs[0] is not None:
        if node.op_type == "Transpose":
            orders.append(list(node.attributes["perm"].as_ints()) if "perm" in node.attributes else None)
        value = node.inputs[0]
    data = tensor_of(value) if node is None or _is(node, ("Constant",)) else None
    if data is None or value.is_graph_input():
        return None
    perm = tuple(range(len(data.shape)))
    for order in orders:  # the last transpose first
        perm = tuple((order or [*range(len(perm))][::-1])[one] for one in perm)
    return _Stored(data, value, perm, None if axis is None or len(perm) < 2 else axis % len(perm))


def _is(node: ir.Node, ops: tuple[str, ...]) -> bool:
    return node.domain in ("", "ai.onnx") and node.op_type in ops


def _is_moved(value: ir.Value) -> bool:
    """Whether ONNX Runtime would round earlier, in front of an op of which it has no FP8 kernel.

    It moves `QuantizeLinear` in front of these ops, and takes `DequantizeLinear` away behind them (seen in 1.31, on a
    CPU). A `Max` of one operand, which is that operand, holds it back.
    """
    while (node := value.producer()) is not None and _is(node, (*_MOVED, *_MOVED_IN_FP8)):
        if node.op_type in _MOVED or node.inputs[0] is None:
            return True
        value = node.inputs[0]
    return False


def _channels(node: ir.Node, index: int) -> int | None:
    """The axis of an operand that goes into the result: of rows, columns or output channels."""
    if node.op_type == "Conv":
        return 0 if index == 1 else None
    turned = node.attributes.get("transB" if index else "transA")
    return -2 if bool(index) == bool(turned is not None and turned.as_int()) else -1
