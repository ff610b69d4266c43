"""The preset `quantized` for what is floating point in quantised models; FP64 and 16-bit models made FP32 first."""

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper as nh
from onnx_models import LOW, casts, check, info, model, node, precisions, run, scalar

from amp_compiler.errors import OnnxError
from amp_compiler.onnx.check.verify import verify
from amp_compiler.onnx.convert import convert_onnx
from amp_compiler.onnx.plan import explain_onnx

RNG = np.random.default_rng(5)
X = RNG.standard_normal((4, 64)).astype(np.float32)


def qdq(opset: int = 19, scale: float = 0.02, **attributes) -> onnx.ModelProto:
    """Two quantised products with an activation between, as a quantiser writes them."""
    rng = np.random.default_rng(5)
    data = [scalar("z", 0, np.int8), scalar("sx", 0.03), scalar("sa", 0.02), scalar("sb", 0.01)]
    nodes = [
        node("QuantizeLinear", ["x", "sx", "z"], ["xq"], "q0"),
        node("DequantizeLinear", ["xq", "sx", "z"], ["xd"], "d0"),
    ]
    before = "xd"
    for index, after in ((1, "a"), (2, "b")):
        data.append(nh.from_array(rng.integers(-90, 90, (64, 64)).astype(np.int8), f"w{index}"))
        data.append(nh.from_array(np.full(64, scale, np.float32), f"sw{index}"))
        data.append(nh.from_array(np.zeros(64, np.int8), f"zw{index}"))
        weight = [f"w{index}", f"sw{index}", f"zw{index}"]
        nodes += [
            h.make_node("DequantizeLinear", weight, [f"wd{index}"], name=f"dw{index}", axis=1, **attributes),
            node("MatMul", [before, f"wd{index}"], [f"m{index}"], f"mm{index}"),
            node("Sigmoid", [f"m{index}"], [f"g{index}"], f"act{index}"),
            node("QuantizeLinear", [f"g{index}", f"s{after}", "z"], [f"{after}q"], f"q{index}"),
            node("DequantizeLinear", [f"{after}q", f"s{after}", "z"], [f"{after}d"], f"d{index}"),
        ]
        before = f"{after}d"
    nodes.append(node("Identity", [before], ["y"], "end"))
    return model(nodes, [info("x", 4, 64)], [info("y", 4, 64)], data, opset=opset, ir_version=10)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("opset", [13, 19, 21, 23])
def test_what_is_between_goes_low_and_scales_follow(opset, dtype):
    """Before opset 19 the two take FP32 alone: the opset is raised."""
    source = qdq(opset)
    done = check(source, dtype, "quantized")
    low = {name for name, precision in precisions(done).items() if precision == "low"}
    assert low >= {"mm1", "mm2", "act1", "act2", "dw1", "dw2", "d0", "d1", "q1", "q2"}
    kinds = {tensor.name: tensor.data_type for tensor in done.model.graph.initializer}
    assert {kinds[name] for name in ("sw1", "sw2", "sa")} == {LOW[dtype]}
    assert {kinds[name] for name in ("w1", "w2", "z")} == {T.INT8}
    assert not casts(done.model), "the first and the last of them stand between the types"
    report = verify(source, done.model, [{"x": X}])
    assert report.first_bad is None and report.largest_error < (0.02 if dtype == "fp16" else 0.1), str(report)


def test_onnx_runtime_gives_the_same_within_a_step():
    source = qdq()
    result = convert_onnx(source, rules="quantized").model
    want, got = run(source, {"x": X})[0], run(result, {"x": X})[0]
    assert np.abs(want - got).max() <= 0.01 + 1e-3, "one step of the last scale"


@pytest.mark.parametrize(
    "rules", ["default", "fast", {"version": 1, "rules": [{"match": {}, "precision": "low"}]}], ids=str
)
def test_under_other_rules_it_stays_as_it_is(rules):
    assert not convert_onnx(qdq(), rules=rules).changed


def test_a_scale_that_the_low_type_does_not_hold_keeps_fp32():
    """0.00002 is subnormal in FP16: it would be off by a hundredth, and all that it scales with it."""
    done = check(qdq(scale=2e-5), "fp16", "quantized")
    wide = {name for name, precision in precisions(done).items() if precision == "fp32"}
    assert wide >= {"dw1", "dw2"} and precisions(done)["mm1"] == "low"
    reason = next(entry.reason for entry in done.plan.nodes if entry.name == "dw1")
    assert reason == "its scale 'sw1' holds numbers that fp16 does not hold to all its digits"
    assert precisions(check(qdq(scale=2e-5), "bf16", "quantized"))["dw1"] == "low"


def test_a_result_whose_type_is_named_keeps_it():
    done = check(qdq(23, output_dtype=T.FLOAT), "fp16", "quantized")
    assert precisions(done)["dw1"] == "keep" and precisions(done)["mm1"] == "low"


def test_rules_may_ask_for_it_part_by_part():
    rules = {
        "version": 1, "extends": "quantized", "rules": [{"match": {"node": "2$"}, "precision": "fp32"}],
    }  # fmt: skip
    result = precisions(check(qdq(), "fp16", rules))
    assert result["mm1"] == "low" and {result[name] for name in ("mm2", "act2", "dw2")} == {"fp32"}


def test_integer_arithmetic_stays():
    data = [scalar("z", 0, np.uint8), nh.from_array(RNG.integers(0, 9, (8, 8)).astype(np.uint8), "w"), scalar("s", 0.1)]
    nodes = [
        node("DynamicQuantizeLinear", ["x"], ["q", "qs", "qz"], "dynamic"),
        node("MatMulInteger", ["q", "w", "qz", "z"], ["i"], "product"),
        node("Cast", ["i"], ["f"], to=T.FLOAT),
        node("Mul", ["f", "qs"], ["y"], "scale"),
    ]
    source = model(nodes, [info("x", 4, 8)], [info("y", 4, 8)], data)
    result = precisions(check(source, "fp16", "quantized"))
    assert result["dynamic"] == result["product"] == "keep"


DRAWN = np.random.default_rng(3)
WIDE = DRAWN.standard_normal((4, 8))
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


@pytest.mark.parametrize("keep", [True, False], ids=["own ends", "open ends"])
@pytest.mark.parametrize(("kind", "dtype"), [("fp64", "fp16"), ("fp64", "bf16"), ("fp16", "bf16"), ("bf16", "fp16")])
def test_all_of_it_is_converted(kind, dtype, keep):
    source = whole(kind)
    before = source.SerializeToString()
    done = convert_onnx(source, dtype=dtype, as_fp32=kind, keep_io_types=keep)
    assert source.SerializeToString() == before
    onnx.checker.check_model(done.model, full_check=True)
    result = precisions(done)
    assert {result[name] for name in ("first", "mul", "inner", "last")} == {"low"}
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
    report = verify(source, done.model, [{"x": WIDE}])
    assert report.largest_error < 3e-3 and report.first_bad is None
    got = run(done.model, {"x": WIDE if keep else WIDE.astype(np.float16)})
    for want, one in zip(run(source, {"x": WIDE}), got, strict=True):
        assert np.linalg.norm(want - one) < 3e-3 * np.linalg.norm(want)


def test_an_fp16_model_becomes_a_bf16_one():
    source = whole("fp16")
    assert not convert_onnx(source, dtype="bf16").plan.low_nodes
    done = convert_onnx(source, dtype="bf16", as_fp32="fp16", verify=[{"x": WIDE.astype(np.float16)}])
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


def test_inputs_that_are_outputs_and_read_in_a_body():
    """An output that is an input keeps its type; a body reads the cast one."""
    branch = h.make_graph([node("Identity", ["x"], ["o"])], "b", [], [info("o", 4, kind=T.DOUBLE)])
    nodes = [h.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch, name="if")]
    source = model(nodes, [info("c", kind=T.BOOL), info("x", 4, kind=T.DOUBLE)],
                   [info("y", 4, kind=T.DOUBLE), info("x", 4, kind=T.DOUBLE)])  # fmt: skip
    result = convert_onnx(source, as_fp32="fp64").model
    onnx.checker.check_model(result, full_check=True)
    x = np.arange(4.0)
    for got in run(result, {"c": np.array(True), "x": x}):
        np.testing.assert_array_equal(got, x)


def test_the_shell(tmp_path, shell):
    onnx.save(whole("fp64"), tmp_path / "m.onnx")
    code, out = shell("convert", tmp_path / "m.onnx", tmp_path / "o.onnx", "--as-fp32", "fp64", "--verify")
    assert not code and "passed" in out
