"""What `verify` says of good and of broken conversions."""

import dataclasses
import json
import math

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx_models import make_model, value

from amp_compiler.errors import OnnxError
from amp_compiler.onnx.check.emulate import emulate
from amp_compiler.onnx.check.run import ORT
from amp_compiler.onnx.check.verify import verify
from amp_compiler.onnx.convert import convert_onnx

FP16, BF16 = TensorProto.FLOAT16, TensorProto.BFLOAT16
DTYPES = {FP16: np.dtype(np.float16), BF16: np.dtype(ml_dtypes.bfloat16)}
BOTH = pytest.mark.parametrize("kind", [FP16, BF16], ids=["fp16", "bf16"])


def naive(model: onnx.ModelProto, kind: int, keep_io: bool = True) -> onnx.ModelProto:
    """Every float value in the 16-bit type, whatever becomes of it."""
    kept = ("sizes", "angles", "running_sums", "powers", "differences")
    rules = {"version": 1, "keep": dict.fromkeys(kept, False), "rules": [{"match": {}, "precision": "low"}]}
    dtype = {FP16: "fp16", BF16: "bf16"}[kind]
    return convert_onnx(model, dtype=dtype, rules=rules, keep_io_types=keep_io, check=False).model


def square_and_root(scale: float = 1.0) -> onnx.ModelProto:
    """y = sqrt(x * x): harmless in FP32, infinite in FP16 from |x| = 256 on."""
    nodes = [
        helper.make_node("Mul", ["x", "x"], ["square"], name="square_node"),
        helper.make_node("Sqrt", ["square"], ["y"], name="root_node"),
    ]
    return make_model(nodes, [value("x", [4])], [value("y", [4])])


def test_an_overflow_is_named():
    original = square_and_root()
    batches = [{"x": np.array([1.1, 2.3, 3.7, 4.9], np.float32)}, {"x": np.array([1, -300, 3, 4], np.float32)}]
    batches.append({"x": np.full(4, np.inf, np.float32)})  # in which the original's values are not finite either
    report = verify(original, naive(original, FP16), batches)
    assert (report.first_bad.node, report.first_bad.op, report.first_bad.value) == ("square_node", "Mul", "square")
    assert report.first_bad.original == 90000.0
    assert report.largest_error == math.inf and not report.ok(1.0)
    assert report.batches == 3 and report.engine == ORT
    assert "square_node" in str(report) and "9e+04" in str(report) and "inf" in str(report)
    clean = verify(original, naive(original, FP16), batches[:1])
    assert clean.first_bad is None and clean.bad == 0 and clean.ok(1e-3)
    wide = verify(original, naive(original, BF16), batches)
    assert wide.first_bad is None and 1e-5 < wide.largest_error < 8e-3
    assert verify(original, original, batches).largest_error == 0.0


def test_an_overflow_in_a_cast_of_the_converter_is_named():
    original = square_and_root()
    report = verify(original, naive(original, FP16), [{"x": np.array([1, 1e5, 3, 4], np.float32)}])
    assert report.first_bad is not None and (report.first_bad.op, report.first_bad.value) == ("Cast", "x_fp16")
    assert report.first_bad.original == np.float32(1e5)


def test_infinities_of_the_original_are_no_fault():
    nodes = [helper.make_node("Log", ["x"], ["y"]), helper.make_node("Exp", ["y"], ["z"])]
    original = make_model(nodes, [value("x", [3])], [value("y", [3]), value("z", [3])])
    report = verify(original, naive(original, FP16), [{"x": np.array([0.0, 1.0, 2.0], np.float32)}])
    assert report.first_bad is None and report.ok(1e-3)


def test_the_errors_are_those_of_the_definition():
    original = square_and_root()
    batches = [{"x": np.array([[0.1, 0.7, 1.3, 2.9]], np.float32)[0]}, {"x": np.array([5, 0.3, 0, 1e-3], np.float32)}]
    report = verify(original, naive(original, FP16), batches)
    a = np.concatenate([np.sqrt(b["x"] * b["x"]) for b in batches]).astype(np.float64)
    low = [b["x"].astype(np.float16) for b in batches]
    b = np.concatenate([np.sqrt(x * x) for x in low]).astype(np.float64)
    output = report.outputs[0]
    assert output.name == "y" and output.elements == 8
    assert output.relative == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(a), rel=1e-9)
    assert output.largest == pytest.approx(np.abs(a - b).max(), rel=1e-9)


def test_integer_outputs_count_what_differs():
    nodes = [helper.make_node("Mul", ["x", "x"], ["s"]), helper.make_node("ArgMax", ["s"], ["y"], axis=1, keepdims=0)]
    original = make_model(nodes, [value("x", [2, 2])], [value("y", [2], TensorProto.INT64)])
    # 2048 and 2049 are one number in FP16, and the first of equals wins.
    x = np.array([[2.0, 1.0], [100.01, 100.02]], np.float32)
    report = verify(original, naive(original, FP16), [{"x": x}])
    assert report.outputs[0].relative == 0.5 and report.outputs[0].elements == 2


@BOTH
@pytest.mark.parametrize("keep_io", [True, False], ids=["fp32 inputs", "16-bit inputs"])
def test_weights_inputs_and_external_data(kind, keep_io, tmp_path):
    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal((64, 32)).astype(np.float32), "b": rng.standard_normal(32).astype(np.float32)}
    nodes = [helper.make_node("Gemm", ["x", "w", "b"], ["y"], name="gemm")]
    original = make_model(nodes, [value("x", ["n", 64])], [value("y", ["n", 32])], weights)
    low = naive(original, kind, keep_io)
    path = tmp_path / "low.onnx"
    onnx.save(onnx.ModelProto.FromString(low.SerializeToString()), path, save_as_external_data=True, size_threshold=0)
    batch = {"x": rng.standard_normal((4, 64)).astype(np.float32)}
    rounded = {name: array.astype(DTYPES[kind]).astype(np.float32) for name, array in (weights | batch).items()}
    exact = rounded["x"] @ rounded["w"] + rounded["b"]  # accumulated in FP32, rounded once
    expected = exact.astype(DTYPES[kind]).astype(np.float64)
    a = (batch["x"] @ weights["w"] + weights["b"]).astype(np.float64)
    for converted in (low, path):
        report = verify(original, converted, [batch])
        error = np.linalg.norm(a - expected) / np.linalg.norm(a)
        assert report.largest_error == pytest.approx(error, rel=0.02)  # the order of summation differs
        assert 0 < error < (1e-3 if kind == FP16 else 8e-3)


@BOTH
@pytest.mark.parametrize("external", [False, True])
def test_what_16_bit_weights_alone_make_of_an_error(kind, external, tmp_path):
    """Weights that nearly cancel lose their digits in the file, whatever computes with them."""
    weights = np.array([[1.003], [-1.0]], np.float32)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node("Tanh", ["a"], ["y"])]
    source = make_model(nodes, [value("x", [2, 2])], [value("y", [2, 1])], {"w": weights})
    onnx.save(source, tmp_path / "m.onnx", save_as_external_data=external, location="m.data", size_threshold=0)
    rules = {"version": 1, "keep": {"differences": False}, "rules": [{"match": {}, "precision": "low"}]}
    dtype = {FP16: "fp16", BF16: "bf16"}[kind]
    result = convert_onnx(tmp_path / "m.onnx", tmp_path / "made.onnx", dtype=dtype, rules=rules, check=False).path
    x = np.array([[3.3, 3.3], [0.7, 0.7]], np.float32)
    report = verify(tmp_path / "m.onnx", result, [{"x": x}])
    want, stored = (np.tanh(x @ one) for one in (weights, weights.astype(DTYPES[kind]).astype(np.float32)))
    error = np.linalg.norm(stored - want) / np.linalg.norm(want)
    assert report.worst.stored == pytest.approx(error, rel=1e-4) and error > 1e-2
    assert f"is off by {error:.3g}" in str(report).splitlines()[-1]


def test_an_original_with_16_bit_parts_rounds_too():
    nodes = [
        helper.make_node("Cast", ["x"], ["low"], to=FP16),
        helper.make_node("Mul", ["low", "low"], ["square"]),
        helper.make_node("Cast", ["square"], ["y"], to=TensorProto.FLOAT),
    ]
    model = make_model(nodes, [value("x", [2])], [value("y", [2])])
    assert verify(model, model, [{"x": np.array([300.0, 0.1], np.float32)}]).largest_error == 0.0


def test_errors_have_a_fix(tmp_path):
    model = square_and_root()
    other = make_model([helper.make_node("Neg", ["x"], ["z"])], [value("x", [4])], [value("z", [4])])
    with pytest.raises(OnnxError, match="the outputs are z, and the original's are y"):
        verify(model, other, [{"x": np.zeros(4, np.float32)}])
    with pytest.raises(OnnxError, match="'x' is missing"):
        verify(model, model, [{}])
    foreign = make_model(
        [helper.make_node("Cast", ["x"], ["l"], to=FP16),
         helper.make_node("Own", ["l"], ["y"], name="mine", domain="own")],
        [value("x", [4])], [helper.make_empty_tensor_value_info("y")], domains=["own"],
    )  # fmt: skip
    with pytest.raises(OnnxError, match=r"mine: the type of 'y' cannot be known .* value_info"):
        emulate(foreign)


def test_the_report_is_a_frozen_value_and_plain_data():
    model = square_and_root()
    report = verify(model, naive(model, FP16), [{"x": np.array([300, 1, 1, 1], np.float32)}], trace=False)
    assert report.first_bad is None  # nothing was traced
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.bad = 3
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert data["largest_error"] == "inf" and data["outputs"][0]["name"] == "y"


def test_old_ir_versions_and_duplicate_names_run_in_onnxruntime():
    """ONNX Runtime refuses two nodes of one name, and before IR version 4 an initializer that is no input."""
    model = make_model(
        [helper.make_node("Mul", ["x", "k"], ["m"], name="one"), helper.make_node("Relu", ["m"], ["y"], name="one")],
        [value("x", [2])], [value("y", [2])], {"k": np.array([0.1], np.float32)}, opset=9,
    )  # fmt: skip
    model.ir_version = 3
    report = verify(model, naive(model, FP16), [{"x": np.array([3.3, 7.7], np.float32)}])
    assert report.engine == ORT and 0 < report.largest_error < 1e-3


def test_neither_model_is_changed():
    model = square_and_root()
    low = naive(model, FP16)
    before = model.SerializeToString(), low.SerializeToString()
    verify(model, low, [{"x": np.ones(4, np.float32)}])
    assert (model.SerializeToString(), low.SerializeToString()) == before
