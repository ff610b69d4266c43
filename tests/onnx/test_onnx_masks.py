"""Attention masks in FP16: a row that is masked whole stays finite, however the mask is written."""

import numpy as np
import pytest
from onnx import TensorProto as T
from onnx_models import check, info, model, node, scalar, weight

from amp_compiler.onnx.check.run import open_to_run
from amp_compiler.onnx.check.verify import Side

LOWEST = -3.4028234663852886e38  # of FP32
OFF = [node("Sub", ["one", "mask"], ["off"]), node("Mul", ["off", "big"], ["bias"])]
KEPT = node("Cast", ["mask"], ["kept"], to=T.BOOL)
# The nodes between the scores `s` and what the softmax reads, `m`; and the sign of the stored number `big`.
FORMS = {
    "added": ([*OFF, node("Add", ["s", "bias"], ["m"])], 1),
    "subtracted": ([*OFF, node("Sub", ["s", "bias"], ["m"])], -1),
    "negated": ([*OFF, node("Neg", ["bias"], ["b"]), node("Add", ["s", "b"], ["m"])], -1),
    "mask times minus one": (
        [node("Mul", ["mask", "big"], ["a"]), node("Sub", ["a", "big"], ["b"]), node("Add", ["s", "b"], ["m"])], -1,
    ),
    "selected and added": ([KEPT, node("Where", ["kept", "zero", "big"], ["b"]), node("Add", ["s", "b"], ["m"])], 1),
    "selected": ([KEPT, node("Where", ["kept", "s", "big"], ["m"])], 1),
    "selected, then a bias": ([KEPT, node("Where", ["kept", "s", "big"], ["a"]), node("Add", ["a", "s"], ["m"])], 1),
    "twice": ([*OFF, node("Add", ["s", "bias"], ["a"]), node("Add", ["a", "bias"], ["m"])], 1),
    "summed": ([*OFF, node("Sum", ["s", "bias", "s"], ["m"])], 1),
    "scaled up": ([*OFF, node("Add", ["s", "bias"], ["a"]), node("Mul", ["a", "three"], ["m"])], 1),
    "scaled down": ([*OFF, node("Add", ["s", "bias"], ["a"]), node("Div", ["a", "three"], ["m"])], 1),
}  # fmt: skip


def attention(form, number):
    """softmax(x·w with a mask)·w"""
    nodes, sign = FORMS[form]
    return model(
        [node("MatMul", ["x", "w"], ["s"]), *nodes, node("Softmax", ["m"], ["p"], axis=-1),
         node("MatMul", ["p", "w"], ["y"])],
        [info("x", 4, 8), info("mask", 4, 8)], [info("y", 4, 8)],
        [weight("w", 8, 8), scalar("one", 1.0), scalar("zero", 0.0), scalar("three", 3.0),
         scalar("big", number * sign)],
    )  # fmt: skip


def outputs(proto, batch, *, rounded):
    return Side(open_to_run(proto), False, None, as_twin=rounded).run(batch)["y"]


@pytest.mark.parametrize(("number", "rules"), [(LOWEST, "default"), (-1e9, "apex-o3"), (-65504.0, "default")])
@pytest.mark.parametrize("form", FORMS)
def test_a_row_that_is_masked_whole_is_finite(form, number, rules):
    if number == -65504.0 and FORMS[form][1] < 0:
        number = -1e5  # a number that fits, and is subtracted, is no mask that the analysis knows
    source = attention(form, number)
    source.graph.initializer[0].CopyFrom(scalar("w", -np.eye(8)))  # all scores are far below zero
    x = np.random.default_rng(0).uniform(100, 200, (4, 8)).astype(np.float32)
    mask = np.ones((4, 8), np.float32)
    mask[0], mask[1, 3:] = 0, 0
    want = outputs(source, {"x": x, "mask": mask}, rounded=False)
    got = outputs(check(source, "fp16", rules).model, {"x": x, "mask": mask}, rounded=True)
    assert np.isfinite(got[np.isfinite(want)]).all()
    np.testing.assert_allclose(got[1:], want[1:], atol=0.13)  # scores of -128 to -256 are rounded to eighths
