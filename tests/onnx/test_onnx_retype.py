"""FP64 and 16-bit models made FP32 first (`as_fp32`), and then converted as any other."""

from __future__ import annotations

import sys

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper as nh
from onnx_models import LOW, info, model, node, scalar

from amp_compiler.cli import main as cli
from amp_compiler.errors import OnnxError
from amp_compiler.onnx.check.verify import verify
from amp_compiler.onnx.convert import convert_onnx
from amp_compiler.onnx.plan import explain_onnx

RNG = np.random.default_rng(3)
X = RNG.standard_normal((4, 8))
TYPES = {"fp64": (T.DOUBLE, np.float64), "fp16": (T.FLOAT16, np.float16), "bf16": (T.BFLOAT16, ml_dtypes.bfloat16)}


def whole(kind: str, *, scale: float = 0.5) -> onnx.ModelProto:
    """A model of one type: products, a constant, a cast to that type, and a Loop."""
    number, numpy_type = TYPES[kind]

    def data(name: str, *shape: int) -> onnx.TensorProto:
        return nh.from_array((np.random.default_rng(len(name)).standard_normal(shape) * scale).astype(numpy_type), name)

    body = h.make_graph(
        [node("MatMul", ["s", "w"], ["t"], "inner"), node("Tanh", ["t"], ["o"]), node("Identity", ["c"], ["more"])],
        "body",
        [info("i", kind=T.INT64), info("c", kind=T.BOOL), info("s", 4, 8, kind=number)],
        [info("more", kind=T.BOOL), info("o", 4, 8, kind=number)],
    )
    nodes = [
        node("MatMul", ["x", "w"], ["a"], "first"),
        h.make_node("Constant", [], ["half"], value=nh.from_array(np.asarray(0.5, numpy_type), "half")),
        node("Mul", ["a", "half"], ["b"], "mul"),
        node("Shape", ["b"], ["sizes"]),
        h.make_node("Cast", ["sizes"], ["floats"], to=number, name="cast"),
        node("ReduceMax", ["floats"], ["m"], "largest", keepdims=0),
        node("Div", ["b", "m"], ["d"], "div"),
        h.make_node("Loop", ["n", "", "d"], ["e"], body=body, name="loop"),
        node("MatMul", ["e", "w"], ["y"], "last"),
    ]
    return model(
        nodes, [info("x", 4, 8, kind=number)], [info("y", 4, 8, kind=number), info("e", 4, 8, kind=number)],
        [data("w", 8, 8), scalar("n", 2, np.int64)], opset=22, ir_version=10,
        value_info=[info("a", 4, 8, kind=number)],
    )  # fmt: skip


def run(proto: onnx.ModelProto, x: np.ndarray) -> list[np.ndarray]:
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})


@pytest.mark.parametrize("keep", [True, False], ids=["own ends", "open ends"])
@pytest.mark.parametrize(("kind", "dtype"), [("fp64", "fp16"), ("fp64", "bf16"), ("fp16", "bf16"), ("bf16", "fp16")])
def test_all_of_it_is_converted(kind, dtype, keep):
    source = whole(kind)
    before = source.SerializeToString()
    done = convert_onnx(source, dtype=dtype, as_fp32=kind, keep_io_types=keep)
    assert source.SerializeToString() == before
    onnx.checker.check_model(done.model, full_check=True)
    precisions = {entry.name: entry.precision for entry in done.plan.nodes}
    assert {precisions[name] for name in ("first", "mul", "inner", "last")} == {"low"}
    stored = {tensor.name: tensor.data_type for tensor in done.model.graph.initializer}
    assert stored["w"] == LOW[dtype]
    kinds = {
        value.name: value.type.tensor_type.elem_type for value in (*done.model.graph.input, *done.model.graph.output)
    }
    assert list(kinds) == ["x", "y", "e"]
    assert set(kinds.values()) == {TYPES[kind][0]} if keep else TYPES[kind][0] not in kinds.values()
    again = convert_onnx(done.model, dtype=dtype, as_fp32=kind if keep and kind == "fp64" else (), keep_io_types=keep)
    assert again.plan.low_nodes >= 4


@pytest.mark.parametrize("keep", [True, False], ids=["own ends", "open ends"])
def test_the_numbers_of_an_fp64_model(keep):
    source = whole("fp64")
    done = convert_onnx(source, as_fp32=["fp64"], keep_io_types=keep)
    report = verify(source, done.model, [{"x": X}])
    assert report.largest_error < 3e-3 and report.first_bad is None
    got = run(done.model, X if keep else X.astype(np.float16))
    for want, one in zip(run(source, X), got, strict=True):
        assert np.linalg.norm(want - one) < 3e-3 * np.linalg.norm(want)


def test_an_fp16_model_becomes_a_bf16_one():
    source = whole("fp16")
    assert not convert_onnx(source, dtype="bf16").plan.low_nodes
    done = convert_onnx(source, dtype="bf16", as_fp32="fp16", verify=[{"x": X.astype(np.float16)}])
    assert done.report.largest_error < 2e-2
    weight = nh.to_array(next(tensor for tensor in done.model.graph.initializer if tensor.name == "w"))
    want = nh.to_array(source.graph.initializer[0]).astype(np.float32).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(weight.astype(np.float32), want.astype(np.float32))


def test_without_it_they_stay_and_explain_knows_it():
    assert not convert_onnx(whole("fp64")).changed
    plan = explain_onnx(whole("fp64"), as_fp32=("fp64",))
    assert plan == convert_onnx(whole("fp64"), as_fp32="fp64").plan and plan.low_nodes >= 4


@pytest.mark.parametrize("number", [1e300, 1e-300])
def test_a_number_that_fp32_does_not_hold_is_an_error(number):
    source = whole("fp64")
    data = nh.to_array(source.graph.initializer[0]).copy()
    data[0, 0] = number
    source.graph.initializer[0].CopyFrom(nh.from_array(data, "w"))
    with pytest.raises(OnnxError, match=r"tensor 'w': 1 of its numbers are none of FP32.*leave 'fp64' out"):
        convert_onnx(source, as_fp32="fp64")


def test_a_custom_op_is_an_error():
    source = model(
        [h.make_node("Odd", ["x"], ["a"], domain="my.ops", name="odd"), node("Relu", ["a"], ["y"])],
        [info("x", 4, kind=T.DOUBLE)], [info("y", 4, kind=T.DOUBLE)], extra=[h.make_opsetid("my.ops", 1)],
        value_info=[info("a", 4, kind=T.DOUBLE)],
    )  # fmt: skip
    with pytest.raises(OnnxError, match=r"node 'odd' \(my.ops.Odd\): 'x' is fp64.*leave that type out"):
        convert_onnx(source, as_fp32="fp64")


def test_a_type_that_is_none_is_an_error():
    with pytest.raises(OnnxError, match="'fp46' is no type that can be made FP32; did you mean 'fp64'"):
        convert_onnx(whole("fp64"), as_fp32=["fp46"])


def test_data_in_a_file_of_their_own(tmp_path):
    onnx.save(whole("fp16"), tmp_path / "m.onnx", save_as_external_data=True, location="m.bin", size_threshold=0)
    convert_onnx(tmp_path / "m.onnx", tmp_path / "o.onnx", dtype="bf16", as_fp32="fp16")
    onnx.checker.check_model(str(tmp_path / "o.onnx"), full_check=True)
    assert {tensor.data_type for tensor in onnx.load(tmp_path / "o.onnx").graph.initializer} == {T.BFLOAT16, T.INT64}


def test_inputs_that_are_outputs_and_read_in_a_body():
    """An output that is an input keeps its type; a body reads the cast one."""
    branch = h.make_graph([node("Identity", ["x"], ["o"])], "b", [], [info("o", 4, kind=T.DOUBLE)])
    nodes = [h.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch, name="if")]
    source = model(nodes, [info("c", kind=T.BOOL), info("x", 4, kind=T.DOUBLE)],
                   [info("y", 4, kind=T.DOUBLE), info("x", 4, kind=T.DOUBLE)])  # fmt: skip
    made = convert_onnx(source, as_fp32="fp64").model
    onnx.checker.check_model(made, full_check=True)
    session = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.arange(4.0)
    for got in session.run(None, {"c": np.array(True), "x": x}):
        np.testing.assert_array_equal(got, x)


def test_the_shell(tmp_path, monkeypatch, capsys):
    onnx.save(whole("fp64"), tmp_path / "m.onnx")
    arguments = ["amp-compiler", "convert", tmp_path / "m.onnx", tmp_path / "o.onnx", "--as-fp32", "fp64", "--verify"]
    monkeypatch.setattr(sys, "argv", list(map(str, arguments)))
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code and "passed" in capsys.readouterr().out
