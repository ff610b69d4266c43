"""Numbers that a 16-bit type does not hold: constants, ops that overflow, calibrated magnitudes, whole numbers."""

import numpy as np
import pytest
from compound_models import norm
from onnx import TensorProto as T
from onnx import numpy_helper as nh
from onnx_models import RNG, X, check, info, masked, mlp, model, node, program, same_numbers, scalar, weight

import amp_compiler as amp
from amp_compiler.onnx.check.verify import verify
from amp_compiler.onnx.convert import convert_onnx
from amp_compiler.onnx.plan import explain_onnx


def with_constant(number, op="Mul", shape=()):
    return model(
        [node("MatMul", ["x", "w"], ["a"]), node(op, ["a", "c"], ["b"], "op"), node("MatMul", ["b", "w"], ["y"])],
        [info("x", 4, 8)],
        [info("y", 4, 8)],
        [weight("w", 8, 8), nh.from_array(np.full(shape, number, np.float32), "c")],
    )


@pytest.mark.parametrize("number", [1e6, -1e6, 65505.0, 1e-9, -1e-9, 2.0**-25])
def test_a_constant_that_does_not_fit_keeps_its_reader_in_fp32(number):
    done = check(with_constant(number), "fp16")
    result = next(entry for entry in done.plan.nodes if entry.name == "op")
    assert result.precision == "fp32" and "'c'" in result.reason
    kept = {tensor.name: nh.to_array(tensor) for tensor in done.model.graph.initializer}["c"]
    assert kept.dtype == np.float32 and kept == np.float32(number)


FITTING = {"fp16": (65504.0, 0.0, -0.0, np.inf, -np.inf, 2.0**-24, 1.0), "bf16": (1e6, 1e-9, 3e38)}


@pytest.mark.parametrize(("dtype", "number"), [(dtype, one) for dtype, numbers in FITTING.items() for one in numbers])
def test_a_constant_that_fits_does_not(dtype, number):
    assert precision(check(with_constant(number), dtype), "op") == "low"


def test_lost_elements_of_a_factor_are_below_the_rounding_of_the_others():
    data = np.ones((8, 8), np.float32)
    data[0, 0] = 1e-9
    for scale, expected in ((1.0, "low"), (1e-5, "fp32")):
        stored = nh.from_array(data * np.float32(scale), "w")
        source = model([node("MatMul", ["x", "w"], ["y"])], [info("x", 4, 8)], [info("y", 4, 8)], [stored])
        assert check(source, "fp16").plan.nodes[0].precision == expected


def test_numbers_that_do_not_fit_are_followed_through_views():
    source = model(
        [node("Transpose", ["c"], ["t"], "turn"), node("MatMul", ["x", "t"], ["y"], "product")],
        [info("x", 4, 8)],
        [info("y", 4, 8)],
        [nh.from_array(np.full((8, 8), 1e6, np.float32), "c")],
    )
    done = check(source, "fp16")
    assert [entry.precision for entry in done.plan.nodes] == ["fp32", "fp32"]
    same_numbers(source, done.model, {"x": X}, 1e-6)


def test_the_largest_negative_fp32_is_no_infinity_in_bf16():
    done = check(masked(-3.4028234663852886e38), "bf16", "apex-o3")
    data = {tensor.name: nh.to_array(tensor) for tensor in done.model.graph.initializer}
    assert np.isfinite(data["big"].astype(np.float32))


def test_a_mask_that_is_used_elsewhere_too_is_kept():
    source = masked(-1e9)
    source.graph.node.append(node("Mul", ["s", "big"], ["z"], "elsewhere"))
    source.graph.output.append(info("z", 4, 8))
    done = check(source, "fp16", "fast")
    data = {tensor.name: nh.to_array(tensor) for tensor in done.model.graph.initializer}
    assert data["big"] == np.float32(-1e9)
    precisions = {entry.name: entry.precision for entry in done.plan.nodes}
    assert precisions["bias"] == precisions["elsewhere"] == "fp32"


def test_masks_in_constants_and_filled_tensors():
    nodes = [
        node("Constant", [], ["minf"], value=scalar("", -np.inf)),
        node("ConstantOfShape", ["shape"], ["full"], value=nh.from_array(np.array([-3e38], np.float32))),
        node("MatMul", ["x", "w"], ["s"]),
        node("Where", ["keep", "s", "full"], ["m"], "pick"),
        node("Where", ["keep", "m", "minf"], ["m2"], "again"),
        node("Softmax", ["m2"], ["p"], axis=-1),
        node("MatMul", ["p", "w"], ["y"]),
    ]
    source = model(nodes, [info("x", 4, 8), info("keep", 4, 8, kind=T.BOOL)], [info("y", 4, 8)],
                   [weight("w", 8, 8), nh.from_array(np.array([4, 8]), "shape")])  # fmt: skip
    done = check(source, "fp16", "apex-o3")
    stored = {entry.output[0]: nh.to_array(entry.attribute[0].t) for entry in done.model.graph.node
              if entry.op_type.startswith("Constant")}  # fmt: skip
    assert stored["full"] == np.float16(-65504) and stored["full"].dtype == np.float16
    assert stored["minf"] == -np.inf and stored["minf"].dtype == np.float16
    keep = np.arange(8)[None].repeat(4, 0) < 6
    same_numbers(source, done.model, {"x": X, "keep": keep})


@pytest.mark.parametrize("square", ["pow", "mul"])
def test_a_rule_file_leaves_powers_to_its_rules(square):
    """The data are known not to overflow; where they do, the check of the conversion says so."""
    source = norm(square=square, root="reciprocal")
    rules = {"version": 1, "extends": "apex-o3", "keep": {"powers": False}}
    done = check(source, "fp16", rules)
    assert {entry.precision for entry in done.plan.nodes} == {"low"}
    feeds = {"input": RNG.standard_normal((2, 5, 8)).astype(np.float32)}
    same_numbers(source, done.model, feeds)
    feeds["input"] *= 400
    large = amp.convert_onnx(source, rules=rules, dtype="fp16", verify=[feeds], check=False)
    assert large.report.outputs[0].relative > 0.5


def test_exponentials():
    nodes = program("""a = MatMul(x, w) [free] e = Exp(a) top = ReduceMax<axes=[-1]>(a) d = Sub(a, top)
        [bounded] f = Exp(d) [plus] g = Add(e, two) [log] l = Log(g) y = Add(l, f)""")
    source = model(nodes, [info("x", 4, 8)], [info("y", 4, 8)], [weight("w", 8, 8), scalar("two", 2.0)], opset=13)
    precisions = {entry.name: entry.precision for entry in check(source, "fp16", "apex-o3").plan.nodes}
    assert precisions["free"] == precisions["plus"] == precisions["log"] == "fp32" and precisions["bounded"] == "low"
    assert {entry.precision for entry in check(source, "bf16", "apex-o3").plan.nodes} == {"low"}


def test_calibrated_ranges_keep_makers_and_readers_in_fp32():
    plan = explain_onnx(mlp(), ranges={"a": 40000.0, "b": 100.0})
    assert [entry.precision for entry in plan.nodes] == ["fp32", "fp32", "low"]
    assert "4e+04 in calibration" in plan.nodes[0].reason
    assert {entry.precision for entry in explain_onnx(mlp(), ranges={"a": 1e9}, dtype="bf16").nodes} == {"low"}
    assert explain_onnx(mlp(), ranges={"a": 10.0}) == amp.explain(mlp(), dtype="fp16")


def test_infinite_masks_do_not_count_in_calibration():
    """What -inf fills before a softmax reaches infinity in every run, and that says nothing of the scores."""
    nodes = program("""[scores] s = MatMul(x, w) [pick] m = Where(keep, s, minf)
        [softmax] p = Softmax<axis=-1>(m) [mix] y = MatMul(p, w)""")
    source = model(nodes, [info("x", 4, 8), info("keep", 4, 8, kind=T.BOOL)], [info("y", 4, 8)],
                   [weight("w", 8, 8), scalar("minf", -np.inf)])  # fmt: skip
    keep = np.arange(8)[None].repeat(4, 0) < 6
    batches = [{"x": X, "keep": keep}]
    done = convert_onnx(source, rules="apex-o3", calibration=batches, verify=batches)
    assert {entry.name: entry.precision for entry in done.plan.nodes}["pick"] == "low"
    assert done.report.first_bad is None


def test_a_rule_for_one_part_of_a_layer_norm_holds_for_all():
    part = {"version": 1, "extends": "apex-o3", "rules": [{"match": {"op": "onnx.Sqrt"}, "precision": "fp32"}]}
    done = check(norm(centred=True, bias=True), "bf16", part)
    (centred,) = (entry for entry in done.plan.nodes if entry.op == "onnx.Sub")
    assert centred.precision == "fp32" and "'n_root'" in centred.reason


DRAWN = np.random.default_rng(3)
CAST = node("Cast", ["i"], ["f"], "cast", to=T.FLOAT)
PRODUCT = node("MatMul", ["q", "w"], ["y"], "product")
DATA = [weight("w", 8, 8), weight("taps", 3, 3, 3), scalar("k", 1e-5), scalar("mu", 70000.0),
        scalar("first", [0], np.int64),
        scalar("last", [-1], np.int64), scalar("two", 2.0), scalar("zero", 0, np.int64), scalar("one", 1, np.int64),
        scalar("most", [100], np.int64), scalar("far", 100000, np.int64)]  # fmt: skip
SCALED = {  # what `i`, whole numbers of [n, 8] around 70,000, goes through to `q`
    "scaled": "[cast] f = Cast<to=1>(i) q = Mul(f, k)",
    "divided": "[cast] f = Cast<to=1>(i) q = Div(f, mu)",
    "less a mean": "[cast] f = Cast<to=1>(i) d = Sub(f, mu) q = Mul(d, k)",
    "moved": "[cast] f = Cast<to=1>(i) u = Unsqueeze(f, first) v = Squeeze(u, first) q = Mul(v, k)",
    "summed": "[cast] f = Cast<to=1>(i) d = Add(f, f) e = Mul(d, two) q = Mul(e, k)",
    "multiplied": "[cast] f = Cast<to=1>(i) d = Mul(f, f) e = Mul(d, k) q = Mul(e, k)",
    "running sum": "c = CumSum(i, one) f = Cast<to=1>(c) q = Mul(f, k)",
    "by way of FP64": "g = Cast<to=11>(i) f = Cast<to=1>(g) q = Mul(f, k)",
    "chosen": "b = Less(i, one) j = Where(b, one, i) f = Cast<to=1>(j) q = Mul(f, k)",
    "product, then scale": "[cast] f = Cast<to=1>(i) d = MatMul(f, w) e = Relu(d) q = Mul(e, k)",
    "two products": "[cast] f = Cast<to=1>(i) d = Gemm(f, w, mu) v = MatMul(w, w) e = MatMul(d, v) q = Mul(e, k)",
    "convolution": (
        "[cast] f = Cast<to=1>(i) u = Unsqueeze(f, first) d = Conv<pads=[1, 1]>(u, taps) e = Squeeze(d, first) "
        "q = Mul(e, k)"
    ),
    "largest index": "j = Add(i, far) f = Cast<to=1>(j) q = Mul(f, k)",
}


def source_of(nodes, kind=T.INT64):
    return model([*nodes, PRODUCT], [info("i", 3, 8, kind=kind)], [info("y", 3, 8)], DATA)


def test_calibration_says_how_large_they_are():
    batch = {"i": DRAWN.integers(0, 100, (3, 8), np.int32)}
    source = source_of([CAST, node("Mul", ["f", "two"], ["q"], "scale")], T.INT32)
    assert precision(amp.convert_onnx(source, dtype="fp16", calibration=[batch]), "scale") == "low"


def precision(done, name):
    return next(entry.precision for entry in done.plan.nodes if entry.name == name)


@pytest.mark.parametrize("case", SCALED)
def test_numbers_beyond_fp16(case):
    source = source_of(program(SCALED[case]))
    done = check(source, "fp16")
    batch = {"i": DRAWN.integers(66000, 80000, (3, 8))}
    assert verify(source, done.model, [batch]).ok(3e-3)
    assert precision(done, "product") == "low"


@pytest.mark.parametrize(("kind", "expected"), [
    (T.INT32, "fp32"), (T.UINT32, "fp32"), (T.UINT64, "fp32"), (T.UINT16, "fp32"),
    (T.INT16, "low"), (T.UINT8, "low"), (T.INT8, "low"), (T.BOOL, "low"),
])  # fmt: skip
def test_a_type_says_how_large_its_numbers_are(kind, expected):
    nodes = [CAST, node("Mul", ["f", "two"], ["q"], "scale")]
    assert precision(check(source_of(nodes, kind), "fp16"), "scale") == expected
    assert precision(check(source_of(nodes, kind), "bf16"), "scale") == "low"


BOUNDED = {  # what makes whole numbers `j` that the graph says the bounds of
    "an index": "j = ArgMax<axis=-1>(x)",
    "a choice": "b = Greater(i, far) j = Where(b, one, zero)",
    "a truth value": "b = Greater(i, far) j = Cast<to=7>(b)",
    "arithmetic": "b = Greater(i, far) c = Cast<to=7>(b) d = Mul(c, most) e = Sub(most, d) j = Add(e, d)",
    "a size": "s = Shape(x) j = Gather(s, one)",
}


@pytest.mark.parametrize("case", BOUNDED)
def test_numbers_that_the_graph_bounds_are_low(case):
    nodes = [*program(BOUNDED[case]), node("Cast", ["j"], ["f"], to=T.FLOAT), node("MatMul", ["x", "w"], ["h"]),
             node("Add", ["h", "f"], ["q"], "sum"), PRODUCT]  # fmt: skip
    source = model(nodes, [info("i", 8, 8, kind=T.INT64), info("x", 8, 8)], [info("y", 8, 8)], DATA)
    assert precision(check(source, "fp16"), "sum") == "low"


def test_a_mask_of_attention_holds_zeros_and_ones():
    """It says so by what the scores are added to: where it is used otherwise too, as for a mean, it is low there."""
    nodes = [
        node("Unsqueeze", ["mask", "first"], ["a"]), node("Cast", ["a"], ["b"], to=T.FLOAT),
        node("Sub", ["unit", "b"], ["c"], "off"), node("Mul", ["c", "big"], ["d"], "bias"),
        node("MatMul", ["x", "w"], ["s"]), node("Add", ["s", "d"], ["m"], "sum"),
        node("Softmax", ["m"], ["p"], axis=-1),
        node("Cast", ["mask"], ["f"], to=T.FLOAT), node("Mul", ["p", "f"], ["q"], "seen"), PRODUCT,
    ]  # fmt: skip
    source = model(nodes, [info("mask", 8, kind=T.INT64), info("x", 8, 8)], [info("y", 8, 8)],
                   [*DATA, scalar("unit", 1.0), scalar("big", -10000.0)])  # fmt: skip
    done = check(source, "fp16")
    assert [precision(done, name) for name in ("off", "bias", "sum", "seen")] == ["low"] * 4
