"""`amp.find_nonfinite` on ONNX models: planted faults are named, and the rule fixes the file."""

import numpy as np
import onnx
import onnx_models
import pytest
from onnx import TensorProto, numpy_helper
from onnx_models import scalar
from test_find_nonfinite import rule_file

import amp_compiler as amp
from amp_compiler.errors import AmpError, OnnxError
from amp_compiler.onnx.check.verify import verify

X = np.linspace(0.5, 1.0, 24, dtype=np.float32).reshape(2, 3, 4)


def weights(name: str, rows: int, columns: int, gain: float) -> TensorProto:
    """Between `gain` and twice that, in order, the sign of each column in turns."""
    result = np.linspace(gain, 2 * gain, rows * columns, dtype=np.float32).reshape(rows, columns)
    return scalar(name, result * (1 - 2 * (np.arange(columns) % 2)))


def model(nodes, stored, kind=TensorProto.FLOAT):
    ends = (onnx_models.info(name, *shape, kind=kind) for name, shape in (("x", X.shape), ("y", (None, None, None))))
    inputs, outputs = ([one] for one in ends)
    return onnx.shape_inference.infer_shapes(onnx_models.model(nodes, inputs, outputs, stored))


def node(op, inputs, output, **attributes):
    return onnx_models.node(op, inputs, [output], f"the_{output}", **attributes)


def logits():
    mask = np.triu(np.full((3, 3), -np.inf, np.float32), 1)  # infinities that are put in on purpose
    return model(
        [
            node("MatMul", ["x", "wq"], "q"),
            node("MatMul", ["x", "wk"], "k"),
            node("Transpose", ["k"], "kt", perm=[0, 2, 1]),
            node("MatMul", ["q", "kt"], "scores"),
            node("Add", ["scores", "mask"], "masked"),
            node("Softmax", ["masked"], "weights", axis=-1),
            node("MatMul", ["weights", "x"], "y"),
        ],
        [weights("wq", 4, 4, 80.0), weights("wk", 4, 4, 80.0), scalar("mask", mask)],
    )


def channel():
    up = numpy_helper.to_array(weights("w", 4, 8, 1.0)).copy()
    up[:, 3] = 4e4  # one channel of eight
    return model(
        [node("MatMul", ["x", "w"], "h"), node("Mul", ["h", "small"], "y")],
        [scalar("w", up), scalar("small", 1e-3)],
    )


def log_softmax():
    return model(
        [
            node("MatMul", ["x", "w"], "h"),
            node("Softmax", ["h"], "p", axis=-1),
            node("Log", ["p"], "y"),
        ],
        [weights("w", 4, 4, 3.0)],
    )


# Model, batch, what `default` is extended by, and the node that breaks.
FAULTS = {
    "attention logits": (logits, X, {}, "the_scores"),
    "outlier channel": (channel, X, {}, "the_h"),
    "log of an underflowed softmax": (log_softmax, X, {"allow": ["onnx.Softmax", "onnx.Log"]}, "the_y"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named_and_its_rule_fixes_the_file(fault, tmp_path):
    make, x, more, name = FAULTS[fault]
    rules = rule_file(tmp_path, more) if more else "default"
    original = make()
    report = amp.find_nonfinite(original, {"x": x}, rules=rules, dtype="fp16")
    first = report.nodes[0]
    assert first.planned == name and first.output.infinite and report.results == ("the output y",)
    planned = {one.name: one for one in amp.explain(original, rules=rules, dtype="fp16").nodes}
    assert first.decision == planned[name].decision and planned[name].precision == "low"

    (tmp_path / "cured.yaml").write_text(report.rule)
    done = amp.convert_onnx(original, rules=str(tmp_path / "cured.yaml"), dtype="fp16", check=False)
    result = verify(original, done.model, [{"x": x}])
    assert result.bad == 0 and np.isfinite(result.largest_error)
    decided = {one.name for one in done.plan.nodes if "cured.yaml" in one.rule}
    assert name in decided and len(decided) <= 4
    assert not amp.find_nonfinite(original, {"x": x}, rules=str(tmp_path / "cured.yaml"))


def test_a_file_is_read_and_not_changed(tmp_path):
    path = tmp_path / "m.onnx"
    onnx.save(logits(), path)
    before = path.read_bytes()
    assert amp.find_nonfinite(str(path), {"x": X}).nodes[0].planned == "the_scores"
    assert path.read_bytes() == before and sorted(one.name for one in tmp_path.iterdir()) == ["m.onnx"]


def test_data_that_are_not_finite_are_named():
    x = X.copy()
    x[0, 0, 0] = np.nan
    report = amp.find_nonfinite(channel(), {"x": x})
    assert report.rule == "" and "the batch itself (input x) holds 1 NaN" in report.cure
    assert [(one.name, one.op, one.output.nan) for one in report.nodes] == [("x", "input", 1)]


def test_what_fp32_makes_too_gets_no_rule():
    report = amp.find_nonfinite(log_softmax(), {"x": X * 100}, dtype="fp16")
    assert report.nodes[0].op == "onnx.Log" and report.rule == "" and "FP32 makes it too" in report.cure


@pytest.mark.parametrize("stored", ["casts", "whole"])
def test_a_file_that_is_in_16_bits_already_gets_a_rule_too(stored, tmp_path):
    """It is run as it is; the rule is for its conversion, which widens the nodes."""
    low = amp.convert_onnx(channel(), dtype="fp16").model
    if stored == "whole":  # 16 bits from input to output
        low = model(
            [node("MatMul", ["x", "w"], "h"), node("Mul", ["h", "small"], "s"), node("Relu", ["s"], "y")],
            [scalar("w", np.full((4, 4), 4e4), np.float16), scalar("small", 1e-5, np.float16)],
            kind=TensorProto.FLOAT16,
        )
    batch = {"x": X.astype(np.float16 if stored == "whole" else np.float32)}
    report = amp.find_nonfinite(low, batch)
    assert report.nodes[0].planned == "the_h" and report.results and "convert it with them" in report.cure
    (tmp_path / "cured.yaml").write_text(report.rule)
    assert not amp.find_nonfinite(low, batch, rules=str(tmp_path / "cured.yaml")).rule
    done = amp.convert_onnx(low, rules=str(tmp_path / "cured.yaml"), dtype="fp16").model
    assert not amp.find_nonfinite(done, batch)
    widened = amp.find_nonfinite(low, batch, rules=str(tmp_path / "cured.yaml"))
    assert widened.results and "converted with these rules it is finite" in widened.cure


def test_a_node_without_a_name_is_told_by_its_own_node_of_the_plan():
    """Its value has another name where a cast stands behind it."""
    nodes = [node("MatMul", ["x", "w"], "h"), node("Softmax", ["h"], "p", axis=-1), node("Log", ["p"], "y")]
    for one in nodes:
        one.ClearField("name")
    result = model(nodes, [weights("w", 4, 4, 6.0)])
    report = amp.find_nonfinite(result, {"x": X}, rules={"version": 1, "extends": "apex-o3"}, dtype="fp16")
    assert report.nodes[0].op == "onnx.Log" and report.nodes[0].planned == "Log_0"


def test_wrong_batches_are_refused():
    with pytest.raises(AmpError, match="the batch of an ONNX model is a ndarray; pass a dict"):
        amp.find_nonfinite(channel(), X)
    with pytest.raises(OnnxError, match="the input 'x' is missing"):
        amp.find_nonfinite(channel(), {})
    with pytest.raises(AmpError, match="an ONNX model has no backward"):
        amp.find_nonfinite(channel(), {"x": X}, backward=True)
