"""`math: fp8` in ONNX files: pairs of QuantizeLinear and DequantizeLinear with scales from calibration."""

from collections import Counter
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto as T
from onnx import numpy_helper as nh
from onnx import parser
from onnx_corpus import built

import amp_compiler as amp
from amp_compiler.errors import OnnxError
from amp_compiler.onnx.check.verify import Side, verify
from amp_compiler.onnx.model.model import open_model

RNG = np.random.default_rng(0)
E4M3 = ml_dtypes.float8_e4m3fn
Batch = dict[str, np.ndarray]


def numbers(*shape: int, scale: float = 1.0) -> np.ndarray:
    return (RNG.normal(size=shape) * scale).astype(np.float32)


def model(text: str, opset: int = 21, **stored: np.ndarray) -> onnx.ModelProto:
    result = parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}]>\ng {text}')
    result.graph.initializer.extend(nh.from_array(data, name) for name, data in stored.items())
    return result


LAYERS = """(float[n,16,8,8] x) => (float[n,32] y) {
  c = Conv<pads=[1,1,1,1]>(x, k, kb)
  r = Relu(c)
  p = GlobalAveragePool(r)
  f = Flatten(p)
  d = MatMul(f, w)
  e = Add(d, b)
  y = Gemm<transB=1>(e, v, vb)
}"""


STORED = {
    "k": numbers(16, 16, 3, 3), "kb": numbers(16), "w": numbers(16, 64), "b": numbers(64), "v": numbers(32, 64),
    "vb": numbers(32),
}  # fmt: skip


def layers(opset: int = 21) -> onnx.ModelProto:
    return model(LAYERS, opset, **STORED)


X = {"x": numbers(2, 16, 8, 8)}
GOLDEN = (Path(__file__).parent / "fp8_layers.txt").read_text(encoding="utf-8")


def text(result: onnx.ModelProto) -> str:
    return "".join(f"{', '.join(one.output)} = {one.op_type}({', '.join(one.input)})\n" for one in result.graph.node)


def stored(result: onnx.ModelProto) -> dict[str, tuple[int, list[int]]]:
    return {one.name: (one.data_type, list(one.dims)) for one in result.graph.initializer}


@pytest.mark.parametrize(("dtype", "kind"), [("fp16", T.FLOAT16), ("bf16", T.BFLOAT16)])
@pytest.mark.parametrize("rules", ["fp8", "fp8-rowwise"])
def test_operands_stand_between_pairs_and_weights_are_stored_in_fp8(rules: str, dtype: str, kind: int) -> None:
    done = amp.convert_onnx(layers(), rules=rules, dtype=dtype, calibration=[X])
    assert done.model is not None
    onnx.checker.check_model(done.model, full_check=True)
    assert text(done.model).replace("bf16", "fp16") == GOLDEN
    held = stored(done.model)
    rows = rules == "fp8-rowwise"
    assert [held[f"{name}_fp8"] for name in "kwv"] == [
        (T.FLOAT8E4M3FN, [16, 16, 3, 3]), (T.FLOAT8E4M3FN, [16, 64]), (T.FLOAT8E4M3FN, [32, 64])
    ]  # fmt: skip
    assert [held[f"{name}_scale"] for name in "kwv"] == [(kind, [size] if rows else []) for size in (16, 64, 32)]
    assert held[f"x_{dtype}_scale"] == held["e_scale"] == (kind, []) and not held.keys() & set("kwv")
    axes = [one.attribute[0].i for one in done.model.graph.node if one.op_type == "DequantizeLinear" and one.attribute]
    assert axes == ([0, 1, 0] if rows else []), "the output channels"
    assert done.notes == ("products of FP8 operands: 3",)


def rounded(x: np.ndarray, largest: float) -> np.ndarray:
    """What stands for FP16 numbers in E4M3, by the definition of the two ops."""
    scale = np.float16(largest / 448)
    scale = np.nextafter(scale, np.float16(np.inf)) if float(scale) < largest / 448 else scale
    eighth = np.clip(x.astype(np.float32) / np.float32(scale), -448, 448).astype(E4M3)
    return (eighth.astype(np.float32) * np.float32(scale)).astype(np.float16).astype(np.float32)


def test_numbers_and_their_error_are_those_of_the_format() -> None:
    """Calibration saw half of what comes, which saturates. No weight does, whose scale is 2.4 times the least one."""
    drawn = WEIGHT * 2.4 * 2**-24 * 448 / np.abs(WEIGHT).max()
    source = model("(float[16,32] x) => (float[16,32] y) { y = MatMul(x, w) }", w=drawn)
    x = SQUARE["x"]
    done = amp.convert_onnx(source, rules="fp8", calibration=[{"x": x / 2}])
    assert done.model is not None
    weight = nh.to_array(source.graph.initializer[0])
    half, half_weight = x.astype(np.float16), weight.astype(np.float16)
    exact = rounded(half, np.abs(x / 2).max()) @ rounded(half_weight, np.abs(half_weight.astype(np.float32)).max())
    want = exact.astype(np.float16).astype(np.float32)
    emulated = Side(open_model(done.model), False, None, as_twin=True).run({"x": x})["y"]
    np.testing.assert_allclose(emulated, want, rtol=2**-10, atol=2**-24)  # the order of FP32 sums may turn a rounding
    for (result,) in levels(done.model, {"x": x}):  # it leaves out what rounds to FP16 in front of the products
        assert np.all(np.abs(result - want) <= 2**-10 * (np.abs(x) @ np.abs(weight)))
    error = np.linalg.norm(want - x @ weight) / np.linalg.norm(x @ weight)
    assert verify(source, done.model, [{"x": x}]).largest_error == pytest.approx(error, rel=1e-3)


def levels(result: onnx.ModelProto, batch: Batch) -> list[list[Any]]:
    """Outputs with each level of ONNX Runtime's optimizations, the lowest first."""
    kinds = onnxruntime.GraphOptimizationLevel
    results = []
    for level in (kinds.ORT_DISABLE_ALL, kinds.ORT_ENABLE_BASIC, kinds.ORT_ENABLE_EXTENDED, kinds.ORT_ENABLE_ALL):
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level, options.log_severity_level = level, 4
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(result.SerializeToString(), options, providers=["CPUExecutionProvider"])
        results.append(session.run(None, batch))
    return results


def converted(source: onnx.ModelProto, batches: list[Batch], rules: str = "fp8", **options: Any) -> Any:
    """The conversion, whose file ONNX Runtime runs alike with and without its optimizations."""
    done = amp.convert_onnx(source, rules=rules, calibration=batches, verify=batches, **options)
    onnx.checker.check_model(done.model, full_check=True)
    plain, *optimized = levels(done.model, batches[0])
    for results in optimized:
        for one, two in zip(plain, results, strict=True):
            np.testing.assert_allclose(two, one, rtol=1e-2, atol=2e-3 * np.abs(one).max())  # FP16, in another order
    return done


SQUARE = {"x": numbers(16, 32)}
IMAGES = {"x": numbers(2, 16, 8, 8, scale=1e-2)}
BIAS = numbers(16, scale=100)  # far beyond 65504 times the product of the scales
WEIGHT = numbers(32, 32)
UNEVEN = numbers(32, 48)
UNEVEN[:, 5], UNEVEN[:, 7], UNEVEN[3, 9] = 0, UNEVEN[:, 7] * 1e-4, 200
CASES: dict[str, tuple[str, dict[str, np.ndarray], Batch, int]] = {
    "one weight, straight, transposed and gathered": (
        """(float[16,32] x, int64[4] i) => (float[16,32] z, float[4,32] e) { a = MatMul(x, w)
        b = Relu(a)
        c = MatMul(b, w)
        t = Transpose<perm=[1,0]>(w)
        t2 = Transpose(w)
        d = MatMul(c, t)
        y = MatMul(x, t2)
        z = Add(d, y)
        e = Gather(w, i) }""",
        {"w": WEIGHT}, {**SQUARE, "i": np.arange(4)}, 4,
    ),
    "forms of Gemm": (
        """(float[16,32] x) => (float[16,48] y) { a = Gemm<transA=1,transB=1,alpha=0.5,beta=2.0>(x, w, b)
        r = Relu(a)
        c = Gemm(x, v, c0)
        d = Gemm(c, u)
        q = Gemm<alpha=2.0>(d, t, m)
        y = Relu(q)
        s = Gemm(r, p) }""",
        {"w": numbers(64, 16), "b": numbers(64), "v": numbers(32, 48), "c0": numbers(48), "u": numbers(48, 64),
         "t": numbers(64, 48), "m": numbers(16, 48), "p": numbers(64, 16)},
        SQUARE, 5,
    ),
    "convolutions with groups, a bias and what follows it": (
        """(float[n,16,8,8] x) => (float[n,16,8,8] y) { a = Conv<group=4,pads=[1,1,1,1]>(x, w, b)
        c = Clip(a, lo, hi)
        d = Conv<group=16>(c, v, b)
        e = Conv(d, k)
        r = Relu(e)
        y = Conv(r, k, b) }""",
        {"w": numbers(16, 4, 3, 3, scale=0.01), "v": numbers(16, 1, 1, 1, scale=0.01), "k": numbers(16, 16, 1, 1),
         "b": BIAS, "lo": np.array(0, np.float32), "hi": np.array(6, np.float32)},
        IMAGES, 4,
    ),
    "a sum behind a product, which becomes its bias": (
        """(float[16,16] x) => (float[16,16] y) { a = MatMul(x, w)
        c = Add(b, a)
        r = Relu(c)
        d = MatMul(r, w)
        e = Add(d, b)
        y = MatMul(e, w) }""",
        {"w": numbers(16, 16, scale=1e-2), "b": numbers(16)}, {"x": numbers(16, 16, scale=1e-2)}, 3,
    ),
    "moves without a kernel for FP8": (
        """(float[n,16,8,8] x) => (float[n,16,4] y) { a = Conv(x, k)
        p = MaxPool<kernel_shape=[2,2],strides=[2,2]>(a)
        c = Conv(p, k)
        s = Slice(c, zero, one, two)
        u = Squeeze(s, two)
        d = Conv(u, v)
        z = Unsqueeze(d, two)
        r = Reshape(z, sizes)
        y = Conv(r, v) }""",
        {"k": numbers(16, 16, 1, 1), "v": numbers(16, 16, 1), "zero": np.array([0]), "one": np.array([1]),
         "two": np.array([2]), "sizes": np.array([0, 16, -1])},
        IMAGES, 4,
    ),
    "channels of zeros, tiny ones and an outlier": (
        "(float[16,32] x) => (float[16,48] y) { y = MatMul(x, w) }", {"w": UNEVEN}, SQUARE, 1
    ),
    "a weight on the left, of a size that varies": (
        "(float[32,n] x) => (float[48,n] y) { y = MatMul(w, x) }", {"w": numbers(48, 32)}, {"x": numbers(32, 16)}, 1
    ),
    "constants as nodes": (
        """(float[16,32] x) => (float[16,16] y, float[16,16] u) { z = ConstantOfShape<value=float[1]{0.3}>(s)
        i = Identity(w)
        y = MatMul(x, i)
        u = MatMul(x, z) }""",
        {"s": np.array([32, 16]), "w": numbers(32, 16)}, SQUARE, 2,
    ),
    "a weight that is an output": (
        "(float[16,32] x) => (float[16,32] y, float[32,32] w) { y = MatMul(x, w) }", {"w": WEIGHT}, SQUARE, 1
    ),
    "a branch, whose own values are not measured": (
        """(float[16,32] x, bool c) => (float[16,32] y) { h = Relu(x)
        y = If(c)<then_branch = t () => (float[16,32] p) { q = MatMul(h, w)
        p = MatMul(q, w) }, else_branch = e () => (float[16,32] s) { s = Gemm(h, w, b) }> }""",
        {"w": WEIGHT, "b": numbers(32)}, {**SQUARE, "c": np.array(True)}, 2,
    ),
    "a loop": (
        """(float[16,32] x) => (float[16,32] y) { t = Constant<value_int=3>()
        k = Constant<value = bool {1}>()
        y = Loop(t, k, x)<body = b (int64 i, bool l, float[16,32] s) => (bool m, float[16,32] e) { m = Identity(l)
        u = MatMul(x, w)
        e = Add(s, u) }> }""",
        {"w": WEIGHT}, SQUARE, 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("rules", ["fp8", "fp8-rowwise"])
@pytest.mark.parametrize("name", CASES)
def test_onnx_runtime_gives_the_numbers_of_the_file(name: str, rules: str) -> None:
    source, weights, batch, count = CASES[name]
    done = converted(model(source, **weights), [batch], rules)
    assert done.notes[-1].startswith(f"products of FP8 operands: {count}")
    assert done.refusal is None
    assert 1e-4 < done.report.largest_error < count / 16, "an operand is off by 1/16 at most, and by 1/40 on average"


STAYS: dict[str, tuple[str, dict[str, np.ndarray], Batch, str]] = {
    "two operands of the run": (
        "(float[16,32] x, float[32,16] v) => (float[16,16] y) { y = MatMul(x, v) }", {},
        {**SQUARE, "v": numbers(32, 16)}, "it has no stored operand",
    ),
    "stacks": (
        "(float[16,32] x) => (float[2,16,16] y) { y = MatMul(x, w) }", {"w": numbers(2, 32, 16)}, SQUARE, "no matrices"
    ),
    "an odd size": (
        "(float[16,32] x) => (float[16,30] y) { y = MatMul(x, w) }", {"w": numbers(32, 30)}, SQUARE,
        "30 is no multiple of 16",
    ),
    "nothing but zeros": (
        "(float[16,32] x) => (float[16,32] y) { y = MatMul(x, w) }", {"w": WEIGHT}, {"x": SQUARE["x"] * 0},
        "'x' has no scale: calibration measured 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STAYS)
def test_what_has_no_such_product_stays_in_16_bits_with_the_reason(name: str) -> None:
    source, weights, batch, why = STAYS[name]
    done = converted(model(source, **weights), [batch])
    assert why in done.plan.nodes[0].reason and "products of FP8 operands: 0; 1 stay in 16 bits" in done.notes[-1]
    assert "QuantizeLinear" not in text(done.model)


def test_scales_for_blocks_are_in_no_file() -> None:
    done = amp.convert_onnx(layers(), rules="mxfp8", calibration=[X])
    assert done.notes[0].endswith("those of blocks follow from what they are")
    assert not {"QuantizeLinear", "DequantizeLinear"} & {node.op_type for node in done.model.graph.node}
    rule = {"match": {"op": "onnx.Conv"}, "precision": "low", "math": {"scaling": "mx", "unfit": "refuse"}}
    strict = {"version": 1, "extends": "default", "rules": [rule]}
    with pytest.raises(amp.AmpError, match=r"cannot be carried out on 'Conv_0'.*scales in an ONNX file are measured"):
        amp.convert_onnx(layers(), rules=strict, calibration=[X])


def test_data_overflows_stay_in_fp32() -> None:
    source = model("(float[16,32] x) => (float[16,32] y) { a = MatMul(x, w)\n y = MatMul(a, w) }", w=WEIGHT * 300)
    done = converted(source, [{"x": SQUARE["x"] * 10}])
    assert [node.precision for node in done.plan.nodes] == ["fp32", "fp32"] and "FP8" not in done.notes[-1]


@pytest.mark.parametrize("opset", [13, 17, 21, 22])
def test_the_opset_is_raised_to_one_in_which_fp8_may_go_anywhere(opset: int) -> None:
    done = converted(layers(opset), [X])
    assert done.model.opset_import[0].version == max(opset, 21) and text(done.model) == GOLDEN


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, r"calibration: 'math: fp8' takes the scales .* 'Conv_0'.*calibration= \(--calibrate\)"),
        ({"raise_opset": False}, "calibration:"),
        ({"calibration": [X], "raise_opset": False}, "opset: FP8 operands take opset 21.*allow the opset to be raised"),
        ({"calibration": [X], "opset": 19}, "FP8 operands take opset 21.*name opset=21 or later"),
    ],
)
def test_what_is_missing_is_said(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OnnxError, match=words):
        amp.convert_onnx(layers(17), rules="fp8", **options)
    plan = amp.explain(layers(17), rules="fp8", dtype="fp16")
    assert [node.op for node in plan.nodes if node.math] == ["onnx.Conv", "onnx.MatMul", "onnx.Gemm"]


@pytest.mark.parametrize("rules", ["fp8", "default"])
def test_a_quantised_file_is_left_alone(rules: str) -> None:
    result = amp.convert_onnx(layers(), rules="fp8", calibration=[X]).model
    assert not amp.convert_onnx(result, rules=rules, calibration=[X]).changed


def test_data_in_a_file_of_their_own(tmp_path: Path) -> None:
    onnx.save(layers(), tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    done = amp.convert_onnx(tmp_path / "m.onnx", tmp_path / "o.onnx", rules="fp8", calibration=[X], verify=[X])
    assert (tmp_path / "o.onnx.data").stat().st_size < (tmp_path / "m.data").stat().st_size / 3
    memory = amp.convert_onnx(tmp_path / "m.onnx", rules="fp8", calibration=[X]).model
    written = onnx.load(tmp_path / "o.onnx")
    assert text(written) == text(memory) == GOLDEN
    assert stored(written) == stored(memory)
    for one, two in zip(written.graph.initializer, memory.graph.initializer, strict=True):
        assert nh.to_array(one).tobytes() == nh.to_array(two).tobytes()
    assert done.refusal is None and 0.01 < done.report.largest_error < 0.1


def test_tuning_takes_scales_from_its_batches(tmp_path: Path) -> None:
    result = amp.tune(layers(), [X], rules="fp8", tolerance=0.02, output=tmp_path / "tuned.yaml", dtype="fp16")
    done = amp.convert_onnx(layers(), rules=tmp_path / "tuned.yaml", calibration=[X], verify=[X])
    assert done.report.largest_error <= 0.02 < result.before


def test_what_overflows_is_found_without_calibration() -> None:
    source = model("(float[16,32] x) => (float[16,32] y) { a = MatMul(x, w)\n y = MatMul(a, w) }", w=WEIGHT * 300)
    report = amp.find_nonfinite(source, {"x": SQUARE["x"] * 10}, rules="fp8", dtype="fp16")
    assert "first made by y_fp16 (onnx.MatMul, forward)\n    in the plan: MatMul_1, low by fp8.yaml" in str(report)


# ---- exports


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "rules", "counts"),
    [("gpt2", "fp8-rowwise", {"Gemm": 8}), ("resnet50", "fp8", {"Conv": 53})],
)
def test_exports(name: str, rules: str, counts: dict[str, int]) -> None:
    source, batches = built(name)
    done = converted(source, batches, rules)
    assert Counter(node.op.removeprefix("onnx.") for node in done.plan.nodes if node.math) == counts
    assert done.refusal is None and 0.01 < done.report.largest_error < 0.1
    print(name, rules, f"{done.report.largest_error:.3f}")  # for the docs
