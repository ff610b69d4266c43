"""Whole numbers that are cast to floating point: FP16 ends at 65504, and nothing may become infinite."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto as T
from onnx_models import check, info, model, node, scalar, weight

import amp_compiler as amp
from amp_compiler.onnx.check.verify import verify

RNG = np.random.default_rng(3)
CAST = node("Cast", ["i"], ["f"], "cast", to=T.FLOAT)
PRODUCT = node("MatMul", ["q", "w"], ["y"], "product")
DATA = [weight("w", 8, 8), weight("taps", 3, 3, 3), scalar("k", 1e-5), scalar("mu", 70000.0),
        scalar("first", [0], np.int64),
        scalar("last", [-1], np.int64), scalar("two", 2.0), scalar("zero", 0, np.int64), scalar("one", 1, np.int64),
        scalar("most", [100], np.int64), scalar("far", 100000, np.int64)]  # fmt: skip
SCALED = {  # what `i`, whole numbers of [n, 8] around 70,000, goes through to `q`
    "scaled": [CAST, node("Mul", ["f", "k"], ["q"])],
    "divided": [CAST, node("Div", ["f", "mu"], ["q"])],
    "less a mean": [CAST, node("Sub", ["f", "mu"], ["d"]), node("Mul", ["d", "k"], ["q"])],
    "moved": [CAST, node("Unsqueeze", ["f", "first"], ["u"]), node("Squeeze", ["u", "first"], ["v"]),
              node("Mul", ["v", "k"], ["q"])],
    "summed": [CAST, node("Add", ["f", "f"], ["d"]), node("Mul", ["d", "two"], ["e"]), node("Mul", ["e", "k"], ["q"])],
    "multiplied": [CAST, node("Mul", ["f", "f"], ["d"]), node("Mul", ["d", "k"], ["e"]),
                   node("Mul", ["e", "k"], ["q"])],
    "running sum": [node("CumSum", ["i", "one"], ["c"]), node("Cast", ["c"], ["f"], to=T.FLOAT),
                    node("Mul", ["f", "k"], ["q"])],
    "by way of FP64": [node("Cast", ["i"], ["g"], to=T.DOUBLE), node("Cast", ["g"], ["f"], to=T.FLOAT),
                       node("Mul", ["f", "k"], ["q"])],
    "chosen": [node("Less", ["i", "one"], ["b"]), node("Where", ["b", "one", "i"], ["j"]),
               node("Cast", ["j"], ["f"], to=T.FLOAT), node("Mul", ["f", "k"], ["q"])],
    "product, then scale": [CAST, node("MatMul", ["f", "w"], ["d"]), node("Relu", ["d"], ["e"]),
                            node("Mul", ["e", "k"], ["q"])],
    "two products": [CAST, node("Gemm", ["f", "w", "mu"], ["d"]), node("MatMul", ["w", "w"], ["v"]),
                     node("MatMul", ["d", "v"], ["e"]), node("Mul", ["e", "k"], ["q"])],
    "convolution": [CAST, node("Unsqueeze", ["f", "first"], ["u"]), node("Conv", ["u", "taps"], ["d"], pads=[1, 1]),
                    node("Squeeze", ["d", "first"], ["e"]), node("Mul", ["e", "k"], ["q"])],
    "largest index": [node("Add", ["i", "far"], ["j"]), node("Cast", ["j"], ["f"], to=T.FLOAT),
                      node("Mul", ["f", "k"], ["q"])],
}  # fmt: skip


def source_of(nodes, kind=T.INT64):
    return model([*nodes, PRODUCT], [info("i", 3, 8, kind=kind)], [info("y", 3, 8)], DATA)


def test_calibration_says_how_large_they_are():
    batch = {"i": RNG.integers(0, 100, (3, 8), np.int32)}
    source = source_of([CAST, node("Mul", ["f", "two"], ["q"], "scale")], T.INT32)
    assert precision(amp.convert_onnx(source, dtype="fp16", calibration=[batch]), "scale") == "low"


def precision(done, name):
    return next(entry.precision for entry in done.plan.nodes if entry.name == name)


@pytest.mark.parametrize("case", SCALED)
def test_numbers_beyond_fp16(case):
    source = source_of(SCALED[case])
    done = check(source, "fp16")
    batch = {"i": RNG.integers(66000, 80000, (3, 8))}
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
    "an index": [node("ArgMax", ["x"], ["j"], axis=-1)],
    "a choice": [node("Greater", ["i", "far"], ["b"]), node("Where", ["b", "one", "zero"], ["j"])],
    "a truth value": [node("Greater", ["i", "far"], ["b"]), node("Cast", ["b"], ["j"], to=T.INT64)],
    "arithmetic": [node("Greater", ["i", "far"], ["b"]), node("Cast", ["b"], ["c"], to=T.INT64),
                   node("Mul", ["c", "most"], ["d"]), node("Sub", ["most", "d"], ["e"]),
                   node("Add", ["e", "d"], ["j"])],
    "a size": [node("Shape", ["x"], ["s"]), node("Gather", ["s", "one"], ["j"])],
}  # fmt: skip


@pytest.mark.parametrize("case", BOUNDED)
def test_numbers_that_the_graph_bounds_are_low(case):
    nodes = [*BOUNDED[case], node("Cast", ["j"], ["f"], to=T.FLOAT), node("MatMul", ["x", "w"], ["h"]),
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
