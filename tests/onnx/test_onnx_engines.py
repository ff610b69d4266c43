"""Execution providers and libraries of custom ops for calibration and verification; sizes that the data tell."""

import numpy as np
import onnx
import onnxruntime as ort
import onnxruntime_extensions
import pytest
from onnx import helper as h
from onnx_models import check, info, low_nodes, mlp, model, node, precisions, weight

from amp_compiler.errors import OnnxError
from amp_compiler.onnx.check.calibrate import calibrate
from amp_compiler.onnx.check.run import Engine, make_engine, session_options
from amp_compiler.onnx.check.verify import verify
from amp_compiler.onnx.convert import convert_onnx
from amp_compiler.onnx.plan import explain_onnx

LIBRARY = onnxruntime_extensions.get_library_path()
BATCH = {"x": np.full((4, 8), 2.0, np.float32)}


def with_custom_op() -> onnx.ModelProto:
    """A product, and behind it an op that only the library knows: the positive and the negative part."""
    return model(
        [
            node("MatMul", ["x", "w"], ["a"], "mm"),
            h.make_node("NegPos", ["a"], ["low", "high"], domain="ai.onnx.contrib", name="parts"),
            node("MatMul", ["high", "w"], ["y"], "last"),
        ],
        [info("x", 4, 8)],
        [info("y", 4, 8)],
        [weight("w", 8, 8)],
        extra=[h.make_opsetid("ai.onnx.contrib", 1)],
        value_info=[info("low", 4, 8), info("high", 4, 8)],
    )


def test_a_library_of_custom_ops_is_used_for_all_that_runs():
    source = with_custom_op()
    with pytest.raises(OnnxError, match="NegPos"):
        calibrate(source, [BATCH])
    ranges = calibrate(source, [BATCH], engine=make_engine(custom_ops=[LIBRARY]))
    assert ranges["high"] > 0
    done = convert_onnx(source, calibration=[BATCH], verify=[BATCH], custom_ops=[LIBRARY])
    assert done.report.ok(5e-3) and done.report.engine == "onnxruntime" and done.refusal is None
    assert precisions(done) == {"mm": "low", "parts": "keep", "last": "low"}
    assert convert_onnx(source).refusal.before
    assert verify(source, done.model, [BATCH], engine=make_engine(custom_ops=LIBRARY)).ok(5e-3)


@pytest.mark.parametrize(("inputs", "threads"), [("3", 3), ("4,2", 4), ("", 0), ("many", 0)])
def test_as_many_threads_run_as_the_environment_says(inputs, threads, monkeypatch):
    """0 leaves it to ONNX Runtime, whose threads wait by spinning."""
    monkeypatch.setenv("OMP_NUM_THREADS", inputs)
    assert session_options(Engine(), None).intra_op_num_threads == threads


def test_a_library_that_is_none_is_refused(tmp_path):
    with pytest.raises(OnnxError, match="there is no such library"):
        convert_onnx(mlp(), custom_ops=[tmp_path / "ops.so"])
    (tmp_path / "ops.so").write_bytes(b"no library")
    with pytest.raises(OnnxError, match="onnxruntime cannot load the ops in it"):
        convert_onnx(mlp(), custom_ops=[tmp_path / "ops.so"])


def test_a_provider_that_there_is_not_is_refused():
    with pytest.raises(OnnxError, match=r"has no execution provider 'NoExecutionProvider'.*CPUExecutionProvider"):
        convert_onnx(mlp(), providers=["NoExecutionProvider"])
    done = convert_onnx(mlp(), calibration=[BATCH], providers=["CPUExecutionProvider"])
    assert done.plan == convert_onnx(mlp(), calibration=[BATCH]).plan


@pytest.mark.skipif("CUDAExecutionProvider" not in ort.get_available_providers(), reason="an onnxruntime for the CPU")
def test_a_provider_that_does_not_start_is_no_silent_cpu():
    """Where there is no GPU, ONNX Runtime would run on the CPU and say so on the standard error alone."""
    session = ort.InferenceSession(
        mlp().SerializeToString(), providers=["CUDAExecutionProvider", "CPUExecutionProvider"]
    )
    if "CUDAExecutionProvider" in session.get_providers():
        assert convert_onnx(mlp(), calibration=[BATCH], providers=["CUDAExecutionProvider"]).plan.low_nodes == 3
        return
    with pytest.raises(OnnxError, match="'CUDAExecutionProvider' does not start on this machine"):
        convert_onnx(mlp(), calibration=[BATCH], providers=["CUDAExecutionProvider"])


def test_the_shell_takes_both(tmp_path, shell):
    onnx.save(with_custom_op(), tmp_path / "m.onnx")
    np.savez(tmp_path / "data.npz", **BATCH)
    convert = ("convert", tmp_path / "m.onnx", tmp_path / "o.onnx")
    both = (*convert, "--calibrate", tmp_path / "data.npz", "--verify")
    assert shell(*both)[0] == 1
    code, out = shell(*both, "--custom-ops", LIBRARY, "--provider", "CPUExecutionProvider")
    assert code == 0 and "passed" in out
    code, out = shell(*convert, "--provider", "CPUExecutionProvidr")
    assert code == 1 and "has no execution provider" in out


# ---- sizes


def open_product() -> onnx.ModelProto:
    """Sums over an open length: x of [batch, length] times its own transpose, and a softmax over the length."""
    return model(
        [
            node("Transpose", ["x"], ["t"], "turn", perm=[1, 0]),
            node("MatMul", ["x", "t"], ["s"], "scores"),
            node("MatMul", ["s", "x"], ["y"], "mix"),
        ],
        [info("x", "batch", None)],
        [info("y", "batch", None)],
    )


LONG = {"version": 1, "extends": "default", "rules": [
    {"match": {"family": "matmul", "reduction_size": "> 1000"}, "precision": "fp32", "why": "long sums"}]}  # fmt: skip


def test_open_dimensions_are_as_large_as_the_data_have_them():
    source = open_product()
    batches = [{"x": np.ones(shape, np.float32)} for shape in ((2, 30), (3, 2000), (4, 8))]
    assert low_nodes(convert_onnx(source, rules=LONG)) >= {"scores", "mix"}
    done = check(source, "fp16", LONG, calibration=batches)
    assert precisions(done).items() >= {"scores": "fp32", "mix": "low"}.items()
    batch, length = done.model.graph.input[0].type.tensor_type.shape.dim
    assert batch.dim_param == "batch" and not length.HasField("dim_value"), "the file stays as open as it was"
    moved = sum(cast.bytes for cast in done.plan.casts if cast.value == "x" and cast.dst == "fp16")
    assert moved == 4 * 2000 * 6, "the largest batch, and the longest length"


def test_sizes_may_be_given_to_explain():
    plan = explain_onnx(open_product(), rules=LONG, sizes={"batch": 1500, ("x", 1): 7})
    assert {entry.name: entry.precision for entry in plan.nodes if entry.op == "onnx.MatMul"} == {
        "scores": "low", "mix": "fp32",
    }  # fmt: skip


def test_sizes_that_do_not_fit_change_nothing():
    """A model whose declared shapes say otherwise than the data is planned as without them."""
    source = open_product()
    source.graph.value_info.append(info("s", 5, 5))
    plain = explain_onnx(source, rules=LONG, check=False)
    assert explain_onnx(source, rules=LONG, check=False, sizes={"batch": 4}).nodes == plain.nodes
