"""What a run of a model would cost, estimated from shapes before anything is drawn or run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx
from onnx import helper

from amp_compiler.errors import OnnxError
from amp_compiler.onnx.model.infer import infer, is_open, stripped
from amp_compiler.onnx.model.walk import proto_bodies

_PRODUCTS_A_SECOND = 15e9  # multiplications of products on one core with vectors of 8 numbers
_NUMBERS_A_SECOND = 5e7  # numbers made in both models, each rounded, measured and compared with its original
_COPIES = 4  # of the largest value while it is rounded and measured: itself, in 16 bits, widened, its magnitudes

Shape = Sequence[int]


@dataclass
class _Work:
    """What was counted of the graphs of a model."""

    held: int = 0  # bytes at the moment
    most: int = 0
    largest: int = 0  # bytes of one value
    numbers: int = 0
    products: int = 0


class Cost:
    """Estimates what it takes to run a model in both types on inputs of certain shapes.

    A dimension that inference leaves open counts as large as the largest of the inputs, all such of a value together
    as many elements as an input has at most, a value of unknown rank as nothing, and a `Loop` or `Scan` as one turn.

    Args:
        proto: the model.
    """

    def __init__(self, proto: onnx.ModelProto) -> None:
        self._light = stripped(proto)
        self._sizes: dict[str, int] = {}
        self._largest = self._most = 1

    def _inferred(self, shapes: Mapping[str, Shape]) -> onnx.GraphProto:
        """The graph with what is inferred where its inputs have these shapes."""
        light = onnx.ModelProto()
        light.CopyFrom(self._light)
        self._sizes, self._largest = {}, max((size for shape in shapes.values() for size in shape), default=1)
        self._most = max(map(math.prod, shapes.values()), default=1)
        for value in light.graph.input:
            for dim, size in zip(value.type.tensor_type.shape.dim, shapes.get(value.name, ()), strict=False):
                if dim.dim_param:
                    self._sizes[dim.dim_param] = size
                dim.dim_value = size
        try:
            return infer(light).graph
        except OnnxError:  # of these sizes; whether the model runs on them is seen when it runs
            return light.graph

    def values(self, shapes: Mapping[str, Shape]) -> dict[str, tuple[list[int], int]]:
        """Shape and bytes of each value of the main graph; those of the inputs that are named have these shapes."""
        return self._values(self._inferred(shapes))

    def _values(self, graph: onnx.GraphProto) -> dict[str, tuple[list[int], int]]:
        kinds = {value.name: value.type.tensor_type for value in (*graph.value_info, *graph.output, *graph.input)}
        return {name: self._measured(kind) for name, kind in kinds.items() if kind.elem_type}

    def _measured(self, kind: onnx.TypeProto.Tensor) -> tuple[list[int], int]:
        shape: list[int] = []
        left = self._most
        for dim in kind.shape.dim:
            size = dim.dim_value
            if is_open(dim) and dim.dim_param in self._sizes:
                size = self._sizes[dim.dim_param]
            elif is_open(dim):
                size = max(min(self._largest, left), 1)
                left //= size
            shape.append(size)
        return shape, math.prod(shape) * helper.tensor_dtype_to_np_dtype(kind.elem_type).itemsize

    def of(self, shapes: Mapping[str, Shape]) -> tuple[float, float]:
        """Bytes that are held at once, and seconds."""
        work = _Work()
        graph = self._inferred(shapes)
        values = self._add(graph, {}, work)
        returned = sum(values[value.name][1] for value in graph.output if value.name in values)
        seconds = 2 * work.products / _PRODUCTS_A_SECOND + work.numbers / _NUMBERS_A_SECOND
        return work.most + _COPIES * work.largest + 2 * returned, seconds

    def _add(
        self, graph: onnx.GraphProto, outer: Mapping[str, list[int]], work: _Work
    ) -> dict[str, tuple[list[int], int]]:
        """Count a graph and its bodies; what its values take."""
        values = self._values(graph)
        sizes = {**outer, **{tensor.name: list(tensor.dims) for tensor in graph.initializer}}
        sizes |= {name: shape for name, (shape, _) in values.items()}
        last = {name: index for index, node in enumerate(graph.node) for name in node.input}
        last |= {value.name: len(graph.node) for value in graph.output}
        within, inputs = work.held, {value.name for value in graph.input}
        for index, node in enumerate(graph.node):
            for body in proto_bodies(node).values():
                self._add(body, sizes, work)
            outputs = [values[name] for name in node.output if name in values]
            work.held += sum(size for _, size in outputs)
            work.most = max(work.most, work.held)
            work.largest = max([work.largest, *(size for _, size in outputs)])
            work.numbers += sum(math.prod(shape) for shape, _ in outputs)
            work.products += _products(node, [sizes.get(name, []) for name in node.input], [one for one, _ in outputs])
            done = {name for name in (*node.input, *node.output) if last.get(name, index) == index}
            work.held -= sum(values[name][1] for name in done & values.keys() - inputs)
        work.held = within
        return values


def _products(node: onnx.NodeProto, inputs: list[list[int]], outputs: list[list[int]]) -> int:
    """The multiplications of a product, convolution or recurrent layer; none of another op."""
    if len(inputs) < 2 or not outputs or not inputs[0] or not inputs[1]:
        return 0
    data, other = inputs[:2]
    if node.op_type == "Conv":
        return math.prod(outputs[0]) * math.prod(other[1:])
    if node.op_type == "ConvTranspose":
        return math.prod(data) * math.prod(other[1:])
    if node.op_type in ("LSTM", "GRU", "RNN"):
        return math.prod(data[:-1]) * sum(math.prod(weight) for weight in inputs[1:3])
    if node.op_type == "Gemm":
        return math.prod(outputs[0]) * math.prod(data) // max(outputs[0][0], 1)
    if node.op_type in ("MatMul", "FusedMatMul", "MatMulInteger"):
        return math.prod(outputs[0]) * data[-1]
    return 0


def stride_of(proto: onnx.ModelProto) -> int:
    """By how much the sizes of an image are divided on the way through a model, as far as strides tell; at least 1."""
    depth: dict[str, int] = {}
    for node in proto.graph.node:
        strides = next((list(one.ints) for one in node.attribute if one.name == "strides"), [])
        step = max(strides, default=1) if node.op_type in ("Conv", "MaxPool", "AveragePool") else 1
        depth.update(dict.fromkeys(node.output, step * max([depth.get(name, 1) for name in node.input], default=1)))
    return max(depth.values(), default=1)
