"""An FP32 twin of a 16-bit ONNX model that rounds as 16-bit hardware does.

ONNX Runtime's CPU provider computes FP16 nodes in FP32, often without rounding in between, and has hardly any
bfloat16 kernels, so running the converted model itself hides overflow. In the twin every 16-bit value is an FP32 value,
and behind each node stands a pair of casts (to the 16-bit type and back) that rounds to the nearest even number of that
type, gives infinities on overflow and keeps subnormals. Inside a node the arithmetic is FP32, as the accumulators of
tensor cores are; a node such as `Softmax`, `LayerNormalization` or `LSTM` is rounded once, at its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir

from amp_compiler.errors import OnnxError
from amp_compiler.ir.dtypes import DType
from amp_compiler.onnx.check.run import FREE_INITIALIZERS
from amp_compiler.onnx.model.edit import cast_node, names_of, take_place, unique
from amp_compiler.onnx.model.model import OnnxFile, OnnxModel, bodies, read_model
from amp_compiler.onnx.model.retype import make_fp32
from amp_compiler.onnx.model.save import serialized
from amp_compiler.onnx.model.types import ir_type

LOW_TYPES = frozenset({DType.FLOAT16, DType.BFLOAT16})


@dataclass(frozen=True)
class Twin:
    """A model's FP32 twin.

    Args:
        proto: the twin; names of its inputs, outputs and values are the model's own, with a few more between.
        low_inputs: the 16-bit type of each input that has one in the model; the twin takes it as FP32.
    """

    proto: onnx.ModelProto
    low_inputs: Mapping[str, np.dtype]

    def feeds(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """A batch as the twin takes it: what is 16-bit in the model is rounded to it, and given as FP32."""
        with np.errstate(over="ignore"):
            low = {name: batch[name].astype(kind) for name, kind in self.low_inputs.items() if name in batch}
        return {**batch, **{name: value.astype(np.float32) for name, value in low.items()}}


def has_low_types(model: OnnxFile) -> bool:
    """True where a value of the model, bodies and functions included, is FP16 or bfloat16."""
    return any(known.dtype in LOW_TYPES for known in read_model(model, check=False).types.values())


def emulate(model: OnnxFile | onnx.ModelProto, *, rounds: bool = True) -> Twin:
    """Rewrite a model into its FP32 twin.

    Args:
        model: a valid model; it is not changed. External weights stay where they are.
        rounds: round inputs and results of nodes. Without, only stored data are in 16 bits.

    Returns:
        The twin. Model-local functions are inlined in it.

    Raises:
        OnnxError: a 16-bit value reaches a node whose result's type cannot be known.

    Example:
        >>> twin = emulate(onnx.load("m.fp16.onnx"))
        >>> session = onnxruntime.InferenceSession(twin.proto.SerializeToString())
    """
    read = read_model(model if isinstance(model, OnnxFile) else OnnxFile(model), check=False)
    low = {value: ir_type(known.dtype) for value, known in read.types.items() if known.dtype in LOW_TYPES}
    graphs = read.graphs
    nodes = [node for graph in graphs for node in graph]
    for node in nodes:
        _refuse_unknown(node, read, low)
    initializers = (value for graph in graphs for value in graph.initializers.values() if value in low)
    stored = [value for value in initializers if not value.is_graph_input() and not value.is_graph_output()]
    make_fp32(read, LOW_TYPES, keep_io_types=False, stored=set(stored))
    names, _ = names_of(graphs)
    if rounds:
        for node in nodes:
            for value in node.outputs:
                if value in low:
                    _round(value, node, low[value], names)
    _widen_stored(stored, graphs, names)
    read.restore_text()
    read.ir.ir_version = max(read.ir.ir_version or 0, FREE_INITIALIZERS)
    inputs = {value.name or "": low[value].numpy() for value in read.ir.graph.inputs if value in low and rounds}
    return Twin(serialized(read), inputs)


def _refuse_unknown(node: ir.Node, model: OnnxModel, low: Mapping[ir.Value, ir.DataType]) -> None:
    unknown = next((one for one in node.outputs if one.name and model.type_of(one).dtype is None), None)
    if unknown is not None and any(value in low for value in node.inputs if value is not None):
        raise OnnxError(
            f"the type of '{unknown.name}' cannot be known ({node.op_type} of domain '{node.domain}')",
            where="" if node in model.unnamed else node.name or "",
            hint="give the model a value_info for it",
        )


def _round(value: ir.Value, node: ir.Node, kind: ir.DataType, names: set[str]) -> None:
    """Let the readers of a result read it rounded, under the name that it had."""
    name, rounding = value.name or "value", value
    casts = []
    if node.op_type in ("Cast", "CastLike") and not node.domain:
        # Straight to the 16-bit type: from FP64 by way of FP32 it would be rounded twice.
        node.op_type = "Cast"
        node.resize_inputs(1)
        node.attributes.clear()
        node.attributes["to"] = ir.AttrInt64("to", kind.value)
    else:
        casts = [cast_node(value, kind, unique(f"{name}/low", names), "")]
        rounding = casts[0].outputs[0]
    result = cast_node(rounding, ir.DataType.FLOAT, name, "")
    take_place(value, result.outputs[0], (*casts, result)[0], unique(f"{name}/raw", names))
    if not casts:
        value.type = value.shape = None
    node.append([*casts, result])


def _widen_stored(stored: list[ir.Value], graphs: list[ir.Graph], names: set[str]) -> None:
    """Make 16-bit initializers FP32 by casts at run time, which works for external data too.

    Each stands before its first reader, so that not all of the weights are FP32 at once.
    """
    homes = {value: graph for graph in graphs for value in graph.initializers.values()}
    casts = {value: cast_node(value, ir.DataType.FLOAT, unique(f"{value.name}/wide", names), "") for value in stored}
    for graph in graphs:
        here = {value: cast for value, cast in casts.items() if homes[value] is graph}
        for node in list(graph) if here else ():
            for value in _read(node):
                if value in here:
                    node.prepend(here.pop(value))
        graph.extend(here.values())
    for value, cast in casts.items():
        value.replace_all_uses_with(cast.outputs[0])
        cast.replace_input_with(0, value)


def _read(node: ir.Node) -> Iterator[ir.Value]:
    """What a node reads, itself and in its bodies."""
    yield from (value for value in node.inputs if value is not None)
    for body in bodies(node).values():
        yield from body.outputs
        for inner in body:
            yield from _read(inner)
