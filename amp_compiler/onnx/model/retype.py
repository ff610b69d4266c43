"""FP64, FP16 or BF16 parts of a model made FP32, so that rules decide on them as on the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
import onnx_ir as ir

from amp_compiler.errors import OnnxError
from amp_compiler.ir.dtypes import DType, element_type
from amp_compiler.onnx.model.data import array_of, convert
from amp_compiler.onnx.model.edit import KeptTypes, cast_node, keeps, names_of, set_data, set_type, unique
from amp_compiler.onnx.model.model import OnnxModel, ValueType, bodies
from amp_compiler.onnx.model.types import canonical_domain, ir_type
from amp_compiler.policy.marks import nearest

TYPE_ATTRIBUTES = frozenset(
    {"dtype", "to", "output_dtype", "output_datatype", "precision", "softmax_precision", "stash_type"}
)
"""Attributes that hold an element type. Elsewhere an integer of 10, 11 or 16 is only a number."""
_SOURCES = (DType.FLOAT64, DType.FLOAT16, DType.BFLOAT16)


def types_of(names: Iterable[str] | str) -> frozenset[DType]:
    """The types that a user names: `fp64`, `fp16`, `bf16`.

    Raises:
        OnnxError: another name.
    """
    elements = set()
    for name in [names] if isinstance(names, str) else names:
        element = element_type(name)
        if element not in _SOURCES:
            known = [one.short for one in _SOURCES]
            raise OnnxError(
                f"'{name}' is no type that can be made FP32", where="as_fp32", hint=nearest(str(name), known)
            )
        elements.add(element)
    return frozenset(elements)


def refuse_custom_ops(model: OnnxModel, types: frozenset[DType]) -> None:
    """Refuse a model that `make_fp32` would change around custom ops, whose types nobody knows.

    Raises:
        OnnxError: names the node.
    """
    for node in (node for graph in model.graphs for node in graph):
        if canonical_domain(node.domain) in ("", "ai.onnx.ml", "com.microsoft") or bodies(node):
            continue
        for value in (*node.inputs, *node.outputs):
            known = model.type_of(value).dtype if value is not None else None
            if value is not None and known is not None and known in types:
                raise OnnxError(
                    f"'{value.name}' is {known.short}, and what a custom op takes is not known",
                    where=f"node '{node.name}' ({node.domain}.{node.op_type})",
                    hint="leave that type out of as_fp32 (--as-fp32)",
                )


def make_fp32(
    model: OnnxModel, types: frozenset[DType], *, keep_io_types: KeptTypes = True, stored: Collection[ir.Value] = ()
) -> bool:
    """Let everything of certain types in a model be FP32, in place.

    Stored data are converted (16-bit ones exactly), and so are the types that nodes name. With `keep_io_types` a cast
    stands behind each such input of the graph and before each such output.

    Args:
        model: as `read_model` gives it.
        types: of FP64, FP16 and BF16.
        keep_io_types: which inputs and outputs of the graph keep their types.
        stored: initializers that stay as they are.

    Returns:
        Whether there was anything of these types.

    Raises:
        OnnxError: a number of FP64 data is none of FP32.
    """
    return _Writer(model, types, stored).run(keep_io_types)


class _Writer:
    def __init__(self, model: OnnxModel, types: frozenset[DType], stored: Collection[ir.Value]) -> None:
        self.model, self.types, self.stored = model, types, stored
        self.elements = frozenset(map(ir_type, types))
        self.main = model.ir.graph
        self.changed = False
        self.names = set.union(*names_of(self.model.graphs))
        self.nodes = set(self.names)

    def run(self, keep_io_types: KeptTypes) -> bool:
        """Change data, attributes and types, then the ends."""
        ends = ((value, self.model.type_of(value).dtype) for value in (*self.main.inputs, *self.main.outputs))
        own = {value: dtype for value, dtype in ends if dtype in self.types and keeps(keep_io_types, value)}
        for graph in self.model.graphs:
            stored = [value for value in graph.initializers.values() if value not in self.stored]
            for value in stored:
                self._initializer(value)
            for node in graph:
                self._node(node)
            for value in (*graph.inputs, *stored, *(out for node in graph for out in node.outputs)):
                self._value(value)
        for value, dtype in own.items():
            if value in self.main.inputs and not value.is_initializer():
                self._open_input(value, dtype)
        for value, dtype in own.items():
            if value in self.main.outputs and value not in self.main.inputs:
                self._close_output(value, dtype)
        return self.changed

    # ---- data and types

    def _initializer(self, value: ir.Value) -> None:
        tensor = value.const_value
        if tensor is not None and tensor.dtype in self.elements:
            value.const_value = self._converted(tensor)
            self.changed = True

    def _converted(self, tensor: ir.TensorProtocol) -> ir.TensorProtocol:
        if tensor.dtype is ir.DataType.DOUBLE and tensor.size:
            array = array_of(tensor)
            with np.errstate(over="ignore", under="ignore"):
                narrow = array.astype(np.float32)
            lost = int(np.count_nonzero((np.isfinite(array) & ~np.isfinite(narrow)) | ((array != 0) & (narrow == 0))))
            if lost:
                raise OnnxError(
                    f"{lost} of its numbers are none of FP32: they would become infinite or zero",
                    where=f"tensor '{tensor.name}'",
                    hint="leave 'fp64' out of as_fp32 (--as-fp32)",
                )
        return convert(tensor, DType.FLOAT32, name=tensor.name or "")

    def _node(self, node: ir.Node) -> None:
        for name, attribute in list(node.attributes.items()):
            if attribute.type == ir.AttributeType.INT and name in TYPE_ATTRIBUTES:
                if attribute.value in {one.value for one in self.elements}:
                    node.attributes[name] = ir.AttrInt64(name, ir.DataType.FLOAT.value)
                    self.changed = True
            elif attribute.type == ir.AttributeType.TENSOR and attribute.value.dtype in self.elements:
                result = self._converted(attribute.value)
                if name == "value" and node.op_type in ("Constant", "ConstantOfShape"):
                    set_data(node, result)
                else:
                    node.attributes[name] = ir.AttrTensor(name, result)
                self.changed = True
            elif attribute.type == ir.AttributeType.TYPE_PROTO:
                widened = self._type(attribute.value.type)
                if widened is not None:
                    shape = attribute.value.shape
                    node.attributes[name] = ir.AttrTypeProto(name, ir.TypeAndShape(widened, shape))
                    self.changed = True

    def _value(self, value: ir.Value) -> None:
        known = self.model.type_of(value)
        if known.dtype in self.types:
            self.model.types[value] = ValueType(DType.FLOAT32, known.shape, known.tensor)
            self.changed = True
        result = self._type(value.type)
        if result is not None:
            value.type = result
            self.changed = True

    def _type(self, kind: ir.TypeProtocol | None) -> ir.TypeProtocol | None:
        """The type with FP32 in place of those that go; `None` where it holds none of them."""
        if isinstance(kind, ir.TensorType | ir.SparseTensorType):
            return type(kind)(ir.DataType.FLOAT, denotation=kind.denotation) if kind.dtype in self.elements else None
        if isinstance(kind, ir.SequenceType | ir.OptionalType):
            inner = self._type(kind.elem_type)
            return None if inner is None else type(kind)(inner, denotation=kind.denotation)
        return None

    # ---- inputs and outputs of the graph

    def _open_input(self, value: ir.Value, own: DType) -> None:
        """A cast behind an input, which keeps its type."""
        readers = list(value.uses())
        self._set(value, own)
        if not readers:
            return
        cast = self._cast(value, DType.FLOAT32)
        result = cast.outputs[0]
        for node, index in readers:
            node.replace_input_with(index, result)
        for graph in self.model.graphs:
            if graph is not self.main:
                for index, out in enumerate(graph.outputs):
                    if out is value:
                        graph.outputs[index] = result
        self.main.insert_before(self.main[0], cast)

    def _close_output(self, value: ir.Value, own: DType) -> None:
        """A cast before an output, which keeps its name and type."""
        if value.is_initializer():
            raise OnnxError(
                f"the output '{value.name}' is stored data of {own.short}",
                hint="leave that type out of as_fp32 (--as-fp32)",
            )
        name = value.name or "output"
        cast = self._cast(value, own)
        result = cast.outputs[0]
        result.type, result.shape, result.doc_string = value.type, value.shape, value.doc_string
        self._set(result, own)
        self.model.types[result] = ValueType(own, self.model.type_of(value).shape)
        self.main.append(cast)
        for place, out in enumerate(self.main.outputs):
            if out is value:
                self.main.outputs[place] = result
        value.name = unique(f"{name}_fp32", self.names)
        result.name = name

    def _set(self, value: ir.Value, own: DType) -> None:
        set_type(value, own)
        self.model.types[value] = ValueType(own, self.model.type_of(value).shape)

    def _cast(self, source: ir.Value, dtype: DType) -> ir.Node:
        base = f"{source.name}_{dtype.short}"
        cast = cast_node(source, ir_type(dtype), unique(base, self.names), unique(f"{base}_end", self.nodes))
        result = cast.outputs[0]
        result.shape = source.shape
        self.model.types[result] = ValueType(dtype, self.model.type_of(source).shape)
        return cast
