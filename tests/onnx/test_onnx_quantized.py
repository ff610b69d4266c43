"""The preset `quantized`: what is floating point between DequantizeLinear and QuantizeLinear goes low."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper as nh
from onnx_models import LOW, casts, check, info, model, node, run, scalar

from amp_compiler.onnx.check.verify import verify
from amp_compiler.onnx.convert import convert_onnx

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


def precisions(done) -> dict[str, str]:
    return {entry.name: entry.precision for entry in done.plan.nodes}


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
    made = convert_onnx(source, rules="quantized").model
    want, got = run(source, {"x": X})[0], run(made, {"x": X})[0]
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
    found = precisions(check(qdq(), "fp16", rules))
    assert found["mm1"] == "low" and {found[name] for name in ("mm2", "act2", "dw2")} == {"fp32"}


def test_integer_arithmetic_stays():
    data = [scalar("z", 0, np.uint8), nh.from_array(RNG.integers(0, 9, (8, 8)).astype(np.uint8), "w"), scalar("s", 0.1)]
    nodes = [
        node("DynamicQuantizeLinear", ["x"], ["q", "qs", "qz"], "dynamic"),
        node("MatMulInteger", ["q", "w", "qz", "z"], ["i"], "product"),
        node("Cast", ["i"], ["f"], to=T.FLOAT),
        node("Mul", ["f", "qs"], ["y"], "scale"),
    ]
    source = model(nodes, [info("x", 4, 8)], [info("y", 4, 8)], data)
    found = precisions(check(source, "fp16", "quantized"))
    assert found["dynamic"] == found["product"] == "keep"
