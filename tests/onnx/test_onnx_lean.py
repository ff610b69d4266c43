"""What computes in FP32 inside takes and gives 16 bits: no casts around norms and softmax, and no more error."""

import numpy as np
import pytest
from onnx import TensorProto as T
from onnx import numpy_helper as nh
from onnx_models import BOTH, DTYPES, RNG, casts, check, error, info, model, node, program, weight

from amp_compiler.onnx.convert import convert_onnx

NORMS = {
    "LayerNormalization": (["h", "scale", "bias"], {}),
    "InstanceNormalization": (["h", "scale", "bias"], {}),
    "GroupNormalization": (["h", "scale", "bias"], {"num_groups": 2}),
    "RMSNormalization": (["h", "scale"], {}),
    "Softmax": (["h"], {}),
    "LogSoftmax": (["h"], {}),
    "ReduceMean": (["h"], {"keepdims": 1}),
}


def between_products(op):
    """Two products, and the op between them."""
    operands, attributes = NORMS[op]
    nodes = [
        node("MatMul", ["x", "w"], ["h"], "first"),
        node(op, operands, ["n"], "inside", **attributes),
        node("Mul", ["n", "h"], ["p"], "both"),
        node("MatMul", ["p", "v"], ["y"], "last"),
    ]
    data = [weight("w", 8, 8), weight("v", 8, 8), weight("scale", 8), weight("bias", 8)]
    return model(nodes, [info("x", 3, 8, 8)], [info("y", 3, 8, 8)], data, opset=23, ir_version=10)


@BOTH
@pytest.mark.parametrize("op", NORMS)
def test_no_cast_stands_around_it_and_it_costs_no_accuracy(op, dtype):
    source, feeds = between_products(op), {"x": RNG.standard_normal((3, 8, 8)).astype(np.float32)}
    done = check(source, dtype)
    (inside,) = [entry for entry in done.plan.nodes if entry.name == "inside"]
    assert inside.precision == "low" and "FP32" in inside.reason
    assert len(casts(done.model)) == 2  # of the input and of the output of the graph
    wide = {"version": 1, "extends": "default", "rules": [{"match": {"node": "inside"}, "precision": "fp32"}]}
    before = error(source, convert_onnx(source, dtype=dtype, rules=wide).model, feeds)
    assert error(source, done.model, feeds) <= 2 * before + 2.0**-9


@pytest.mark.parametrize("op", ["LayerNormalization", "RMSNormalization"])
def test_outliers_whose_squares_overflow(op):
    """Numbers of hundreds: their squares are no FP16 numbers, all else is, and the op makes none of them."""
    source, feeds = between_products(op), {"x": np.random.default_rng(0).standard_normal((3, 8, 8), np.float32) * 300}
    assert np.abs(feeds["x"]).max() ** 2 > 65504
    assert error(source, convert_onnx(source, dtype="fp16").model, feeds) < 3e-3


@pytest.mark.parametrize("op", NORMS)
def test_safe_keeps_it_in_fp32(op):
    plan = convert_onnx(between_products(op), dtype="fp16", rules="safe").plan
    assert next(entry for entry in plan.nodes if entry.name == "inside").precision == "fp32"


@BOTH
def test_a_sum_stays_in_fp32(dtype):
    nodes = program("[first] h = MatMul(x, w) [sum] y = ReduceSum<keepdims=1>(h)")
    source = model(nodes, [info("x", 3, 8)], [info("y", 1, 1)], [weight("w", 8, 8)])
    plan = convert_onnx(source, dtype=dtype).plan
    assert next(entry for entry in plan.nodes if entry.name == "sum").precision == "fp32"
    assert source.graph.output[0].type.tensor_type.elem_type == T.FLOAT


@BOTH
def test_a_softmax_between_fp32_values_stays_as_it_is(dtype):
    """No cast is saved, and 16 bits would make one number of 10,000 to 10,003."""
    alone = model([node("Softmax", ["x"], ["y"])], [info("x", 2, 4)], [info("y", 2, 4)])
    assert not convert_onnx(alone, dtype=dtype).plan.casts


@pytest.mark.parametrize(("op", "mode", "opset", "dtype", "expected"), [
    *(("Resize", mode, 19, dtype, "low") for mode in ("nearest", "linear") for dtype in DTYPES),
    *(("Resize", "cubic", 19, dtype, "fp32") for dtype in DTYPES),
    ("Resize", None, 13, "fp16", "low"), ("Upsample", "linear", 9, "fp16", "low"),
])  # fmt: skip
def test_a_resize_is_an_average_of_neighbours(op, mode, opset, dtype, expected):
    """It takes and gives 16 bits, and costs no accuracy; a cubic one weighs beyond its neighbours."""
    scales = nh.from_array(np.array([1, 1, 2, 2], np.float32), "scales")
    operands = ["h", "", "scales"] if op == "Resize" else ["h", "scales"]
    nodes = [
        node("Conv", ["x", "w"], ["h"], "first"),
        node(op, operands, ["r"], "inside", **({"mode": mode} if mode else {})),
        node("Conv", ["r", "w"], ["y"], "last"),
    ]
    source = model(nodes, [info("x", 1, 4, 6, 6)], [info("y", 1, 4, 12, 12)], [weight("w", 4, 4, 1, 1), scales],
                   opset=opset)  # fmt: skip
    done = check(source, dtype)
    assert [entry.precision for entry in done.plan.nodes if entry.name == "inside"] == [expected]
    assert expected == "fp32" or len(casts(done.model)) == 2
    wide = {"version": 1, "extends": "default", "rules": [{"match": {"node": "inside"}, "precision": "fp32"}]}
    feeds = {"x": RNG.standard_normal((1, 4, 6, 6)).astype(np.float32)}
    before = error(source, convert_onnx(source, dtype=dtype, rules=wide).model, feeds)
    assert error(source, done.model, feeds) <= 2 * before


def erf_gelu(read, built):
    nodes = [
        node("Div", [read, "root"], [f"{built}0"]), node("Erf", [f"{built}0"], [f"{built}1"]),
        node("Add", [f"{built}1", "one"], [f"{built}2"]), node("Mul", [read, f"{built}2"], [f"{built}3"]),
        node("Mul", [f"{built}3", "half"], [built]),
    ]  # fmt: skip
    return nodes, [nh.from_array(np.float32(at), name) for name, at in (("root", 2**0.5), ("one", 1), ("half", 0.5))]


@BOTH
def test_elementwise_ops_between_fp32_values_stay_there(dtype):
    """Between quantised products, whose 8 bits a rounding in front of them flips, and around sums in FP32."""

    def quantised(read, result):
        scale = ["scale", "zero"]
        return [
            node("QuantizeLinear", [read, *scale], [f"{result}q"]),
            node("DequantizeLinear", [f"{result}q", *scale], [result]),
        ]

    gelu, data = erf_gelu("b", "g")
    nodes = [
        *quantised("x", "d"), node("MatMul", ["d", "w"], ["m"]), node("Add", ["m", "bias"], ["b"]), *gelu,
        *quantised("g", "e"), node("MatMul", ["e", "w"], ["n"]), node("CumSum", ["n", "axis"], ["s"]),
        node("Sigmoid", ["s"], ["p"]), node("CumSum", ["p", "axis"], ["y"]),
    ]  # fmt: skip
    data += [weight("w", 8, 8), weight("bias", 8), nh.from_array(np.float32(0.03), "scale")]
    data += [nh.from_array(np.int8(0), "zero"), nh.from_array(np.int64(1), "axis")]
    source = model(nodes, [info("x", 4, 8)], [info("y", 4, 8)], data)
    done = check(source, dtype)
    assert done.plan.casts == () and "low" not in {entry.precision for entry in done.plan.nodes}
    assert error(source, done.model, {"x": RNG.standard_normal((4, 8)).astype(np.float32)}) == 0


@BOTH
def test_a_gelu_between_products_in_16_bits_runs_so(dtype):
    gelu, data = erf_gelu("b", "g")
    nodes = [node("MatMul", ["x", "w"], ["b"]), *gelu, node("MatMul", ["g", "w"], ["y"])]
    done = check(model(nodes, [info("x", 4, 8)], [info("y", 4, 8)], [weight("w", 8, 8), *data]), dtype)
    assert {entry.precision for entry in done.plan.nodes} == {"low"}


@BOTH
@pytest.mark.parametrize("op", ["Sigmoid", "Softmax", "Tanh"])
def test_probabilities_that_leave_a_file_are_made_in_fp32(op, dtype):
    """The small ones are subnormal in FP16, and the cast stands in front of it instead of behind it."""
    nodes = [
        node("MatMul", ["x", "w"], ["h"]), node(op, ["h"], ["p"], "end"), node("Reshape", ["p", "sizes"], ["y"]),
    ]  # fmt: skip
    data = [weight("w", 8, 8), nh.from_array(np.array([-1]), "sizes")]
    source = model(nodes, [info("x", 4, 8)], [info("y", 32)], data)
    low = {"version": 1, "extends": "default", "rules": [{"match": {"node": "end"}, "precision": "low"}]}

    def planned(**options):
        done = check(source, dtype, **options)
        return len(done.plan.casts), next(node.precision for node in done.plan.nodes if node.name == "end")

    count, precision = planned()
    assert precision == "fp32" and planned(rules=low) == (count, "low")
    assert planned(keep_io_types=False)[1] == "low"
    source.graph.output.append(info("q", 4, 8))
    source.graph.node.append(node("MatMul", ["p", "w"], ["q"]))
    assert planned()[1] == "low"  # it has another reader
