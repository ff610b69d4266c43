"""Lowering ONNX to the neutral graph, and ONNX's own node tests as models."""

from __future__ import annotations

import numpy as np
import pytest
from graph_reading import parse_graph
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper as nh

from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.graph import ValueKind
from amp_compiler.ir.graph_text import format_graph
from amp_compiler.onnx.lowering.lower import lower
from amp_compiler.onnx.model.data import convert, examine
from amp_compiler.onnx.model.model import open_model, read_model
from amp_compiler.onnx.model.types import first_version, signature_of


def info(name, *shape, kind=T.FLOAT):
    return h.make_tensor_value_info(name, kind, list(shape))


def lowered(nodes, inputs, outputs, data=(), opset=18, low=DType.FLOAT16, **facts):
    graph = h.make_graph(list(nodes), "g", list(inputs), list(outputs), initializer=list(data), **facts)
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", opset)], ir_version=9)
    return lower(read_model(open_model(model)), low)


def ones(name, *shape):
    return nh.from_array(np.ones(shape, np.float32), name)


def norm(opset):
    names = ["x", "scale", "bias", "mean", "var"]
    return lowered(
        [h.make_node("BatchNormalization", names, ["y"], name="norm")],
        [info("x", 2, 3, 4)],
        [info("y", 2, 3, 4)],
        [ones(name, 3) for name in names[1:]],
        opset=opset,
    )


def test_what_is_tied_to_the_data_follows_from_the_opset():
    operands = {opset: norm(opset).graph.nodes["norm"].inputs for opset in (9, 14, 15)}
    assert [operand.slot for operand in operands[9]] == ["X", "scale", "B", "mean", "var"]
    assert [operand.slot for operand in operands[15]] == ["X", "scale", "B", "input_mean", "input_var"]
    assert [operand.tied for operand in operands[9]] == [True] * 5
    assert [operand.tied for operand in operands[14]] == [True, True, True, False, False]
    assert [operand.tied for operand in operands[15]] == [True, False, False, False, False]


def test_types_come_from_the_schema_of_the_opset():
    conv = signature_of("", "Conv", 11)
    assert DType.FLOAT16 in conv.input(0).allowed and DType.BFLOAT16 not in conv.input(0).allowed
    assert first_version("", "Conv", 11, 0, DType.BFLOAT16) == 22
    assert first_version("", "MatMul", 9, 0, DType.BFLOAT16) == 13
    assert first_version("", "NonMaxSuppression", 11, 0, DType.FLOAT16) is None
    resize = signature_of("", "Resize", 18)
    assert resize.input(2).allowed == {DType.FLOAT32} and resize.input(9) is None
    concat = signature_of("", "Concat", 13)
    assert [concat.input(index).name for index in range(3)] == ["inputs.0", "inputs.1", "inputs.2"]
    assert signature_of("", "NoSuchOp", 18) is None


@pytest.mark.parametrize("opset", [9, 15])
def test_a_lowered_graph_can_be_written_and_read(opset):
    graph = norm(opset).graph
    text = format_graph(graph)
    assert text.startswith("graph onnx stored_casts_free cast_overhead=4096 widest_is_open ")
    again = parse_graph(text)
    assert format_graph(again) == text and again.execution == graph.execution and again.nodes == graph.nodes


def test_kinds_of_values():
    nodes = [
        h.make_node("Constant", [], ["c"], value=ones("", 2)),
        h.make_node("ConstantOfShape", ["s"], ["f"], value=ones("", 1)),
        h.make_node("Sum", ["x", "w", "c", "f", "v"], ["y"]),
    ]
    found = lowered(
        nodes,
        [info("x", 2), info("v", 2)],
        [info("y", 2)],
        [ones("w", 2), ones("v", 2), nh.from_array(np.array([2]), "s")],
    ).graph
    kinds = {name: value.kind for name, value in found.values.items()}
    assert kinds["x"] is ValueKind.INPUT and kinds["v"] is ValueKind.BUFFER and kinds["w"] is ValueKind.PARAMETER
    assert kinds["c"] is kinds["f"] is ValueKind.CONSTANT and kinds["y"] is ValueKind.RESULT
    assert list(found.nodes) == ["Sum_0"]


def test_bodies_stand_before_their_node_and_border_values_are_fixed():
    def branch(name):
        return h.make_graph([h.make_node("Relu", ["x"], ["o"])], name, [], [info("o", 2)])

    found = lowered(
        [h.make_node("If", ["c"], ["y"], name="if", then_branch=branch("a"), else_branch=branch("b"))],
        [info("x", 2), info("c", kind=T.BOOL)],
        [info("y", 2)],
    ).graph
    assert [(node.op, node.region) for node in found.nodes.values()] == [
        ("onnx.Relu", "if.else_branch"),
        ("onnx.Relu", "if.then_branch"),
        ("onnx.If", ""),
    ]
    reads = found.nodes["if"].inputs[1:]
    assert {operand.slot for operand in reads} == {"then_branch.0", "else_branch.0"}
    assert all(operand.allowed == {DType.FLOAT32} for operand in reads)
    assert {operand.value for operand in reads} == {"o", "o.1"}


@pytest.mark.parametrize(("low", "numpy"), [(DType.FLOAT16, np.float16), (DType.BFLOAT16, None)], ids=["fp16", "bf16"])
def test_data_are_examined_and_rounded(low, numpy):
    import ml_dtypes
    import onnx_ir as ir

    fmt = low.format
    rng = np.random.default_rng(1)
    data = (rng.standard_normal(3_000_000) * 10.0 ** rng.integers(-9, 5, 3_000_000)).astype(np.float32)
    data[:4] = [0.0, -0.0, np.inf, fmt.smallest_subnormal / 2]
    held = examine(ir.tensor(data), low)
    finite = data[np.isfinite(data)]
    want = data.astype(numpy or ml_dtypes.bfloat16)
    assert held.largest == np.abs(finite).max() and held.infinite
    assert (held.largest > fmt.max) == bool((np.abs(finite) > fmt.max).any())
    assert held.lost == int(((want.astype(np.float32) == 0) & (data != 0)).sum())
    made = convert(ir.tensor(data), low, name="w")
    assert made.tobytes() == want.tobytes()
