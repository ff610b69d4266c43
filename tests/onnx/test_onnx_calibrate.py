"""Calibration: ranges against NumPy, batches in every form, errors with their hint, bounded memory."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx_models import make_model, run_program, value

from amp_compiler.errors import OnnxError
from amp_compiler.onnx.check.calibrate import calibrate
from amp_compiler.onnx.check.verify import verify
from amp_compiler.onnx.convert import convert_onnx

RNG = np.random.default_rng(0)
WEIGHT = RNG.standard_normal((8, 4)).astype(np.float32)


def chain(opset: int = 17) -> onnx.ModelProto:
    """y = relu(x @ w) ** 2, with an integer side branch."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="matmul"),
        helper.make_node("Relu", ["h"], ["r"], name="relu"),
        helper.make_node("Mul", ["r", "r"], ["y"], name="square"),
        helper.make_node("Shape", ["y"], ["shape"], name="shape"),
    ]
    outputs = [value("y", ["n", 4]), value("shape", [2], TensorProto.INT64)]
    return make_model(nodes, [value("x", ["n", 8])], outputs, {"w": WEIGHT}, opset)


def batch(rows: int = 3, scale: float = 1.0) -> dict[str, np.ndarray]:
    return {"x": (scale * RNG.standard_normal((rows, 8))).astype(np.float32)}


@pytest.mark.parametrize("opset", [9, 13, 17, 20])
def test_ranges_are_those_of_numpy_over_all_batches(opset):
    batches = [batch(3), batch(5, 10.0), batch(1, 0.1)]
    result = calibrate(chain(opset), batches)
    hidden = [one["x"] @ WEIGHT for one in batches]
    expected = {
        "x": max(np.abs(one["x"]).max() for one in batches),
        "h": max(np.abs(one).max() for one in hidden),
        "r": max(one.max() for one in hidden),
        "y": max(one.clip(0).max() ** 2 for one in hidden),
    }
    assert list(result) == ["x", "h", "r", "y"]
    assert result == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_counted(bad):
    poisoned = batch()
    poisoned["x"][1, 3] = bad
    result = calibrate(chain(), [batch(), poisoned, batch()])
    assert result["x"] == result["h"] == np.inf
    assert np.isfinite(list(calibrate(chain(), [batch()]).values())).all()


def test_an_overflow_of_fp32_is_counted_and_nothing_has_the_range_zero():
    result = calibrate(chain(), [batch(scale=1e25)])
    assert np.isfinite(result["r"]) and result["y"] == np.inf
    assert calibrate(chain(), [batch(0)]) == {"x": 0.0, "h": 0.0, "r": 0.0, "y": 0.0}


def test_scalars_and_other_float_types():
    nodes = [
        helper.make_node("Cast", ["x"], ["d"], to=TensorProto.DOUBLE),
        helper.make_node("Mul", ["d", "big"], ["e"]),
        helper.make_node("Cast", ["x"], ["half"], to=TensorProto.FLOAT16),
        helper.make_node("ReduceSum", ["e"], ["s"], keepdims=0),
        helper.make_node("Cast", ["half"], ["b"], to=TensorProto.BFLOAT16),
    ]
    outputs = [value("s", [], TensorProto.DOUBLE), value("b", [2], TensorProto.BFLOAT16)]
    model = make_model(nodes, [value("x", [2])], outputs, {"big": np.array([1e60])})
    result = calibrate(model, [{"x": np.array([1.0, -3.0], np.float32)}])
    assert result == pytest.approx({"x": 3.0, "d": 3.0, "e": 3e60, "half": 3.0, "s": 2e60, "b": 3.0})


def test_bodies_are_left_out_and_their_results_are_not():
    then = helper.make_graph([helper.make_node("Mul", ["x", "x"], ["inner"])], "then", [], [value("inner", [2])])
    other = helper.make_graph([helper.make_node("Neg", ["x"], ["other"])], "else", [], [value("other", [2])])
    node = helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=other)
    model = make_model([node], [value("c", [], TensorProto.BOOL), value("x", [2])], [value("y", [2])])
    result = calibrate(model, [{"c": np.array(True), "x": np.array([2.0, 3.0], np.float32)}])
    assert result == {"x": 3.0, "y": 9.0}


def test_every_form_of_batches(tmp_path):
    batches = [batch(), batch(2, 5.0)]
    expected = calibrate(chain(), batches)
    for index, one in enumerate(batches):
        np.savez(tmp_path / f"{index}.npz", **one)
    assert calibrate(chain(), (one for one in batches)) == expected
    assert calibrate(chain(), tmp_path) == expected
    assert calibrate(chain(), str(tmp_path / "0.npz")) == calibrate(chain(), batches[:1])


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        ([{}], "'x' is missing"),
        ([batch(), {"y": np.zeros(2)}], "batch 1: the input 'x' is missing"),
        ([{**batch(), "xx": np.zeros(2)}], "no input 'xx'; did you mean 'x'"),
        ([{"x": np.zeros((2, 8))}], r"float64, and the model takes float32; convert it: array.astype\('float32'\)"),
        ([{"x": np.zeros((2, 7), np.float32)}], r"shape \[2, 7\], and the model takes \[n, 8\]"),
        ([{"x": np.zeros(8, np.float32)}], r"shape \[8\]"),
        ([{"x": [1.0]}], "is a list; give a numpy.ndarray"),
        ([], "there is no batch"),
        (batch(), "batches: it is a dict; give a list of dicts"),
        ([7], "a int, not a dict"),
        ("nowhere.npz", "no such file or folder"),
    ],
)
def test_bad_batches_are_errors_with_a_fix(batches, words):
    with pytest.raises(OnnxError, match=words):
        calibrate(chain(), batches)


def test_bad_files_are_errors(tmp_path):
    broken = tmp_path / "broken.npz"
    broken.write_bytes(b"no zip")
    with pytest.raises(OnnxError, match=r"cannot be read as an npz file"):
        calibrate(chain(), broken)
    with pytest.raises(OnnxError, match="there is no batch"):
        (tmp_path / "empty").mkdir()
        calibrate(chain(), tmp_path / "empty")
    with pytest.raises(OnnxError, match="no such file"):
        calibrate(tmp_path / "nowhere.onnx", [batch()])
    with pytest.raises(OnnxError, match="no ONNX model"):
        calibrate(broken, [batch()])
    onnx.save(chain(), tmp_path / "m.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    with pytest.raises(OnnxError, match="refers to external data"):
        calibrate(onnx.load(tmp_path / "m.onnx", load_external_data=False), [batch()])
    # A batch on which the model fails: the multiplication of [n, 8] by [8, 4] is right, its reshape is not.
    nodes = [helper.make_node("Reshape", ["x", "to"], ["y"])]
    model = make_model(nodes, [value("x", ["n"])], [value("y", [3, 2])], {"to": np.array([3, 2])})
    with pytest.raises(OnnxError, match="cannot be run on this batch"):
        calibrate(model, [{"x": np.zeros(5, np.float32)}])


def test_names_of_taps_do_not_collide_with_the_models_own():
    nodes = [helper.make_node("Relu", ["amp_tap_0_flat"], ["amp_tap_zero"])]
    model = make_model(nodes, [value("amp_tap_0_flat", [2])], [value("amp_tap_zero", [2])])
    result = calibrate(model, [{"amp_tap_0_flat": np.array([-4.0, 2.0], np.float32)}])
    assert result == {"amp_tap_0_flat": 4.0, "amp_tap_zero": 2.0}


MEMORY = """
import numpy as np
from onnx import helper
from onnx_models import make_model, value
from own_memory import peak
from amp_compiler.onnx.check.calibrate import calibrate
size, depth = 1_000_000, 40
names = ["x", *(f"v{i}" for i in range(depth))]
nodes = [helper.make_node("Cos", [one], [two]) for one, two in zip(names, names[1:])]
model = make_model(nodes, [value("x", ["n"])], [value(names[-1], ["n"])])
calibrate(model, [{"x": np.ones(8, np.float32)}])
before = peak()
found = calibrate(model, [{"x": np.ones(size, np.float32)}])
assert len(found) == depth + 1
print((peak() - before) / 2**20)
"""


@pytest.mark.long
def test_memory_does_not_grow_with_the_number_of_values():
    """40 values of 4 MB, of which a plain run holds two or three at once."""
    assert float(run_program(MEMORY)) < 60


def tiny() -> onnx.ModelProto:
    """A product that is made small, and large again."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="first"),
        helper.make_node("Mul", ["h", "gate"], ["t"], name="gate"),
        helper.make_node("Relu", ["t"], ["r"], name="relu"),
        helper.make_node("Div", ["r", "gate"], ["y"], name="last"),
    ]
    return make_model(nodes, [value("x", ["n", 8]), value("gate", [])], [value("y", ["n", 4])], {"w": WEIGHT}, 17)


@pytest.mark.parametrize("size", [1e-6, 1e-9])
def test_what_becomes_subnormal_or_zero_stays_fp32_and_a_note_tells_it(size):
    feeds = {**batch(), "gate": np.array(size, np.float32)}
    source = tiny()
    done = convert_onnx(source, dtype="fp16", calibration=[feeds])
    assert {node.name for node in done.plan.nodes if node.precision == "low"} == {"first"}
    assert verify(source, done.model, [feeds]).ok(2e-3)
    assert done.notes[0] == "by calibration 3 of 4 nodes in FP32: 3 beside values that become subnormal or zero"
    plain = {**feeds, "gate": np.array(1e-3, np.float32)}
    assert not convert_onnx(source, dtype="fp16", calibration=[plain]).notes
    assert not convert_onnx(source, dtype="bf16", calibration=[feeds]).notes
