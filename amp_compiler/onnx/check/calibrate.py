"""Calibration: the largest magnitude of every float value of an ONNX model over a user's batches."""

from __future__ import annotations

from collections.abc import Collection

import onnx
from onnx import TensorProto, helper

from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.facts import Magnitudes
from amp_compiler.onnx.check.batches import Batches, iterate_batches
from amp_compiler.onnx.check.run import Engine, Runner, open_to_run
from amp_compiler.onnx.check.taps import MEASURED, add_taps
from amp_compiler.onnx.model.model import Source, value_types
from amp_compiler.onnx.model.order import in_order
from amp_compiler.onnx.model.walk import DEFAULT, opset_of
from amp_compiler.passes.onnx_plan.pin_calibrated import PRODUCTS, STEEP
from amp_compiler.passes.onnx_plan.pin_differences import CENTRING
from amp_compiler.policy.op_table import op_table

_FIRST_NEGATIVE, _FIRST_AXES = 11, 18  # opsets: of negative axes, and of those of a `ReduceMean` as an operand


def calibrate(
    model: Source,
    batches: Batches,
    *,
    engine: Engine | None = None,
) -> dict[str, Magnitudes]:
    """Run the FP32 model over all batches and measure its float values.

    All float inputs and float results of nodes are measured inside the run, each given out as one number, so that
    memory stays that of a plain run however many values there are, and the batches are read once. Values inside the
    bodies of `If`, `Loop` and `Scan` and of model-local functions cannot be outputs of a model and are not measured.

    Args:
        model: the model, its path, or what `open_model` gave; external weights are read by ONNX Runtime alone.
        batches: an iterable of {input name: array}, an npz file (one batch), or a folder of npz files.
        engine: execution providers and libraries of ops; the CPU alone by default.

    Returns:
        Value name to largest magnitude, in the order of the graph; infinite where an element was not finite in any
        batch, 0 for an empty tensor. What ops work on that are steep at zero, or whose product that is, has its least
        magnitude but zero too, and what norms and softmaxes read in FP32 has its spread, from opset 11 on.

    Raises:
        OnnxError: the model or a batch cannot be read or run.

    Example:
        >>> ranges = calibrate("model.onnx", [{"x": numpy.ones((2, 8), numpy.float32)}])
        >>> ranges["x"]
        1.0
    """
    loaded = open_to_run(model)
    graph = loaded.proto.graph
    types = value_types(loaded)
    values = [value.name for value in graph.input] + [name for node in graph.node for name in node.output if name]
    weights = {tensor.name for tensor in graph.initializer}
    chosen = [name for name in dict.fromkeys(values) if types.get(name) in MEASURED and name not in weights]
    more = _distances(loaded.proto, [name for name in chosen if types[name] is DType.FLOAT32])
    rests = {name: nodes[-1].output[0] for name, nodes in more.items()}
    types.update(dict.fromkeys(rests.values(), DType.FLOAT32))
    tapped, taps = add_taps(loaded.proto, [*chosen, *rests.values()], types, _before_steep(loaded.proto), more)
    del tapped.graph.output[: len(graph.output)]  # only the numbers are wanted
    runner = Runner(tapped, loaded.folder, loaded.name, engine) if taps else None
    ranges = {tap.value: Magnitudes(0.0) for tap in taps}
    for batch in iterate_batches(batches, loaded):
        outputs = runner.run(batch) if runner is not None else {}
        for tap in taps:
            ranges[tap.value] = ranges[tap.value].joined(tap.magnitudes(outputs))
    for name, rest in rests.items():
        ranges[name] = Magnitudes(ranges[name], ranges[name].least, ranges.pop(rest))
    return ranges


def _before_steep(proto: onnx.ModelProto) -> set[str]:
    """The values that ops read which are steep at zero, and what these are made of by products and moves."""
    ops, seen = op_table(), set[str]()
    for node in (one for one in reversed(in_order(proto).graph.node) if one.domain in DEFAULT):
        op = f"onnx.{node.op_type}"
        to = next((entry.i for entry in node.attribute if entry.name == "to"), TensorProto.BOOL)
        carries = (op in PRODUCTS or ops.info(op).moves) and seen.intersection(node.output)
        if (op in STEEP and to == TensorProto.BOOL) or carries:
            seen.update(node.input)
    return seen


def _distances(proto: onnx.ModelProto, values: Collection[str]) -> dict[str, list[onnx.NodeProto]]:
    """By value that a norm or softmax reads, nodes that take the mean away from it, over all axes from its first on."""
    version, result = opset_of(proto), dict[str, list[onnx.NodeProto]]()
    for node in proto.graph.node if version >= _FIRST_NEGATIVE else ():
        usual = CENTRING.get(f"onnx.{node.op_type}") if node.domain in DEFAULT else None
        if usual is not None and (name := node.input[0]) in values:
            axis = next((entry.i for entry in node.attribute if entry.name == "axis"), usual)
            rows, one, mean, rest = (f"{name}/amp_{what}" for what in ("rows", "one", "mean", "distances"))
            in_attribute = version < _FIRST_AXES
            nodes = [
                helper.make_node("Constant", [], [one], value_ints=[1]),
                helper.make_node("Flatten", [name], [rows], axis=axis),
                helper.make_node(
                    "ReduceMean", [rows] if in_attribute else [rows, one], [mean], axes=[1] if in_attribute else None
                ),
                helper.make_node("Sub", [rows, mean], [rest]),
            ]
            result[name] = nodes[in_attribute:]
    return result
