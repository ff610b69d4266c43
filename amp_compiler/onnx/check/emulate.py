"""An FP32 twin of a 16-bit ONNX model that rounds as 16-bit hardware does.

ONNX Runtime's CPU provider computes FP16 nodes in FP32, often without rounding in between, and has hardly any
bfloat16 kernels, so running the converted model itself hides overflow. In the twin every 16-bit value is an FP32 value,
and behind each node stands a pair of casts (to the 16-bit type and back) that rounds to the nearest even number of that
type, gives infinities on overflow and keeps subnormals. Inside a node the arithmetic is FP32, as the accumulators of
tensor cores are; a node such as `Softmax`, `LayerNormalization` or `LSTM` is rounded once, at its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, inliner, numpy_helper

from amp_compiler.errors import OnnxError
from amp_compiler.onnx.check.run import FREE_INITIALIZERS, LOW_TYPES
from amp_compiler.onnx.check.types import Types, graph_types, infer_types, opset_versions
from amp_compiler.onnx.model.external import is_external, with_data
from amp_compiler.onnx.model.infer import with_small_data
from amp_compiler.onnx.model.model import proto_bodies
from amp_compiler.onnx.model.retype import TYPE_ATTRIBUTES

FLOAT = TensorProto.FLOAT
SOURCES = frozenset({"Cast", "CastLike"})


@dataclass(frozen=True)
class Twin:
    """A model's FP32 twin.

    Args:
        proto: the twin; names of its inputs, outputs and values are the model's own, with a few more between.
        low_inputs: the 16-bit type of each input that has one in the model; the twin takes it as FP32.
    """

    proto: onnx.ModelProto
    low_inputs: dict[str, int]

    def feeds(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """A batch as the twin takes it: what is 16-bit in the model is rounded to it, and given as FP32."""
        return {name: self._feed(name, value) for name, value in batch.items()}

    def _feed(self, name: str, value: np.ndarray) -> np.ndarray:
        if name not in self.low_inputs:
            return value
        with np.errstate(over="ignore"):
            return value.astype(helper.tensor_dtype_to_np_dtype(self.low_inputs[name])).astype(np.float32)


def has_low_types(model: onnx.ModelProto) -> bool:
    """True where a value of the model, bodies included, is FP16 or bfloat16."""
    inferred = infer_types(model)
    pending, opsets = [(inferred.graph, Types())], opset_versions(model)
    while pending:
        graph, outer = pending.pop()
        types = graph_types(graph, outer, opsets)
        if any(kind in LOW_TYPES for kind in types.values()):
            return True
        pending += [(body, types) for node in graph.node for body in proto_bodies(node).values()]
    return any(_mentions_low(function) for function in model.functions)


def _mentions_low(function: onnx.FunctionProto) -> bool:
    return any(
        (attribute.name in TYPE_ATTRIBUTES and attribute.i in LOW_TYPES) or attribute.t.data_type in LOW_TYPES
        for node in function.node
        for attribute in node.attribute
    )


def emulate(model: onnx.ModelProto, folder: Path | None = None, *, rounds: bool = True) -> Twin:
    """Rewrite a model into its FP32 twin.

    Args:
        model: a valid model; it is not changed. External weights stay where they are.
        folder: where it is, for weights that are inputs too, and for small data.
        rounds: round inputs and results of nodes. Without, only stored data are in 16 bits.

    Returns:
        The twin. Model-local functions are inlined in it.

    Raises:
        OnnxError: a 16-bit value reaches a node whose result's type cannot be known.

    Example:
        >>> twin = emulate(onnx.load("m.fp16.onnx"))
        >>> session = onnxruntime.InferenceSession(twin.proto.SerializeToString())
    """
    model = with_small_data(model, folder)
    twin = onnx.ModelProto()
    if model.functions:
        twin.CopyFrom(inliner.inline_local_functions(model))
    else:
        twin.CopyFrom(model)
    twin.ir_version = max(twin.ir_version, FREE_INITIALIZERS)
    inferred = infer_types(twin)
    opsets = opset_versions(twin)
    low_inputs = {
        value.name: value.type.tensor_type.elem_type
        for value in twin.graph.input
        if value.type.tensor_type.elem_type in LOW_TYPES and rounds
    }
    _Writer(opsets, _all_names(twin.graph), folder, rounds).rewrite(twin.graph, inferred.graph, {})
    return Twin(twin, low_inputs)


def _all_names(graph: onnx.GraphProto) -> set[str]:
    names = {tensor.name for tensor in graph.initializer} | {value.name for value in graph.input}
    for node in graph.node:
        names.update(node.input, node.output)
        for body in proto_bodies(node).values():
            names |= _all_names(body)
    return names


class _Writer:
    """Rewrites graphs in place.

    Args:
        opsets: version by domain.
        names: every value name of the model, so that new ones are new.
        folder: where external data lie.
        rounds: round results of nodes.
    """

    def __init__(self, opsets: dict[str, int], names: set[str], folder: Path | None, rounds: bool) -> None:
        self.opsets, self.names, self.folder, self.rounds = opsets, names, folder, rounds

    def rewrite(self, graph: onnx.GraphProto, inferred: onnx.GraphProto, outer: Types) -> None:
        """Rewrite one graph and its bodies; `inferred` is the same graph with its values' types."""
        types = graph_types(inferred, outer, self.opsets)
        nodes: list[onnx.NodeProto] = []
        stored = self._initializers(graph)
        for node, typed in zip(graph.node, inferred.node, strict=True):
            within = [name for body in proto_bodies(node).values() for name in sorted(_all_names(body))]
            nodes += [stored.pop(name) for name in dict.fromkeys((*node.input, *within)) if name in stored]
            for body, typed_body in zip(proto_bodies(node).values(), proto_bodies(typed).values(), strict=True):
                self.rewrite(body, typed_body, types)
            nodes += self._node(node, types)
        nodes += stored.values()
        copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
        del graph.node[:]
        graph.node.extend(copies)
        del graph.value_info[:]
        for value in (*graph.input, *graph.output):
            _widen_type(value.type)

    def _initializers(self, graph: onnx.GraphProto) -> dict[str, onnx.NodeProto]:
        """Make 16-bit initializers FP32: by a cast at run time, which works for external data too.

        Each is to stand before its first reader, so that not all of the weights are FP32 at once.
        """
        inputs = {value.name for value in graph.input}
        casts = {}
        for tensor in graph.initializer:
            if tensor.data_type not in LOW_TYPES:
                continue
            if tensor.name in inputs:  # it must keep its name, to be the input's default
                _widen_tensor(with_data(tensor, self.folder) if is_external(tensor) else tensor, tensor)
                continue
            stored = self._fresh(f"{tensor.name}/stored")
            casts[tensor.name] = helper.make_node("Cast", [stored], [tensor.name], to=FLOAT)
            tensor.name = stored
        return casts

    def _node(self, node: onnx.NodeProto, types: Types) -> list[onnx.NodeProto]:
        low = [types.get(name, 0) if types.get(name) in LOW_TYPES else 0 for name in node.output]
        unknown = [name for name in node.output if name and name not in types]
        if unknown and self._may_make_low(node, types):
            raise OnnxError(
                f"the type of '{unknown[0]}' cannot be known ({node.op_type} of domain '{node.domain}')",
                where=node.name,
                hint="give the model a value_info for it",
            )
        if not self.rounds:
            low = []
        elif node.op_type in SOURCES and not node.domain and low[0]:
            # Straight to the 16-bit type: from FP64 by way of FP32 it would be rounded twice.
            stored = self._fresh(f"{node.output[0]}/low")
            cast = helper.make_node("Cast", [node.input[0]], [stored], name=node.name, to=low[0])
            return [cast, helper.make_node("Cast", [stored], [node.output[0]], to=FLOAT)]
        for attribute in node.attribute:
            _widen_attribute(attribute)
        results = [node]
        for index, kind in enumerate(low):
            if kind:
                name = node.output[index]
                raw, stored = self._fresh(f"{name}/raw"), self._fresh(f"{name}/low")
                node.output[index] = raw
                results.append(helper.make_node("Cast", [raw], [stored], to=kind))
                results.append(helper.make_node("Cast", [stored], [name], to=FLOAT))
        return results

    def _may_make_low(self, node: onnx.NodeProto, types: Types) -> bool:
        """Whether a node of unknown result is one of a foreign domain that reads 16-bit values."""
        foreign = not onnx.defs.has(node.op_type, node.domain)
        return foreign and any(types.get(name) in LOW_TYPES for name in node.input)

    def _fresh(self, name: str) -> str:
        while name in self.names:
            name += "_"
        self.names.add(name)
        return name


def _widen_attribute(attribute: AttributeProto) -> None:
    if attribute.type == AttributeProto.INT and attribute.name in TYPE_ATTRIBUTES and attribute.i in LOW_TYPES:
        attribute.i = FLOAT
    elif attribute.type == AttributeProto.TENSOR and attribute.t.data_type in LOW_TYPES:
        _widen_tensor(attribute.t, attribute.t)
    elif attribute.type == AttributeProto.TYPE_PROTO:
        _widen_type(attribute.tp)


def _widen_tensor(source: TensorProto, tensor: TensorProto) -> None:
    wide = numpy_helper.to_array(source).astype(np.float32)
    tensor.CopyFrom(numpy_helper.from_array(wide, tensor.name))


def _widen_type(kind: onnx.TypeProto) -> None:
    """FP32 in place of a 16-bit element type, in a sequence, optional or map too."""
    which = kind.WhichOneof("value")
    if which in ("tensor_type", "sparse_tensor_type"):
        tensor = getattr(kind, which)
        if tensor.elem_type in LOW_TYPES:
            tensor.elem_type = FLOAT
    elif which in ("sequence_type", "optional_type"):
        _widen_type(getattr(kind, which).elem_type)
    elif which == "map_type":
        _widen_type(kind.map_type.value_type)
