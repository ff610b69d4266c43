"""Attention masks in FP16: a row that is masked whole stays finite, however the mask is written."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx_models import DTYPES, check, info, model, node, program, scalar, weight

from amp_compiler.onnx.check.run import open_to_run
from amp_compiler.onnx.check.verify import Side
from amp_compiler.onnx.convert import convert_onnx

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


# ---- masks that are inputs of the model: the nodes between the scores `s` and what the softmax reads
GIVEN = {
    "alone": "m = Add(s, given)",
    "taken apart": "part = Slice(given, start, end) m = Add(s, part)",
    "behind a stored one": "a = Add(s, stored) m = Add(a, given)",
    "before a stored one": "a = Add(s, given) m = Add(a, stored)",
    "with a stored one": "b = Add(stored, given) m = Add(s, b)",
    "less than a stored one": "b = Min(stored, given) m = Add(s, b)",
    "selected": "kept = Cast<to=9>(mask) m = Where(kept, s, given)",
}


@pytest.mark.sweep(38)  # every third: each form with each floor
@pytest.mark.parametrize("rules", ["default", "apex-o3"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("floor", [LOWEST, -1e9, -65504.0, -np.inf])
@pytest.mark.parametrize("form", GIVEN)
def test_a_mask_that_is_an_input_is_bounded_once(form, floor, dtype, rules):
    """Rows that it masks whole, alone or with a stored one, are finite; the others are what they were."""
    stored = np.triu(np.full((8, 8), max(floor, LOWEST)), 1)
    data = [scalar("w", -np.eye(8)), scalar("start", [0], np.int64), scalar("end", [4], np.int64)]
    nodes = [node("MatMul", ["x", "w"], ["s"], "scores"), *program(GIVEN[form]),
             node("Softmax", ["m"], ["p"], axis=-1), node("MatMul", ["p", "w"], ["y"])]  # fmt: skip
    source = model(
        nodes, [info("x", 4, 8, 8), info("given", 4, 1, 8), *([info("mask", 4, 1, 8)] * (form == "selected"))],
        [info("y", 4, 8, 8)], data + [scalar("stored", stored)] * ("stored" in form),
    )  # fmt: skip
    inputs = np.zeros((4, 1, 8), np.float32)
    inputs[0], inputs[1, :, :3] = floor, floor  # with the stored one all of the first rows
    batch = {"x": np.random.default_rng(0).uniform(0.5, 1, (4, 8, 8)).astype(np.float32), "given": inputs}
    if form == "selected":
        batch["mask"] = (inputs == 0).astype(np.float32)
    done = check(source, dtype, rules)  # converted again, nothing changes
    want, got = outputs(source, batch, rounded=False), outputs(done.model, batch, rounded=True)
    assert (np.isfinite(got) == np.isfinite(want)).all()
    np.testing.assert_allclose(got[1:, 3:], want[1:, 3:], atol={"fp16": 2e-3, "bf16": 1.6e-2}[dtype])
    assert [entry.op_type for entry in done.model.graph.node].count("Max") == 1
    check(source, dtype, rules, calibration=[batch])


@pytest.mark.parametrize("floor", [LOWEST, -1e9, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bias_of_fused_attention_is_bounded(floor, dtype):
    """Minus infinity stays what it was."""
    domain, reads = "com.microsoft", ["s", "s", "s", "", "", "given"]
    nodes = [node("MatMul", ["x", "w"], ["s"]),
             node("MultiHeadAttention", reads, ["y"], domain=domain, num_heads=2)]  # fmt: skip
    source = model(nodes, [info("x", 2, 4, 8), info("given", 2, 2, 4, 4)], [info("y", 2, 4, 8)], [weight("w", 8, 8)],
                   extra=[onnx.helper.make_opsetid(domain, 1)])  # fmt: skip
    inputs = np.zeros((2, 2, 4, 4), np.float32)
    inputs[0, 0], inputs[1, :, :, 2:] = floor, floor
    batch = {"x": np.random.default_rng(0).uniform(-1, 1, (2, 4, 8)).astype(np.float32), "given": inputs}
    result = check(source, dtype, full=False).model
    want, got = outputs(source, batch, rounded=False), outputs(result, batch, rounded=True)
    assert (np.isfinite(got) == np.isfinite(want)).all()
    np.testing.assert_allclose(got[1], want[1], atol={"fp16": 4e-3, "bf16": 3e-2}[dtype])


NOT_A_MASK = {  # nodes from an input `r` and a product `s` to `y`; a sum of inputs alone, `x + z`, is none either
    "read elsewhere": "m = Add(s, r) q = Softmax(m) y = Add(q, r)",
    "all in FP32": "m = Add(s, r) y = Softmax(m)",
    "in 16 bits itself": "m = Add(s, r) y = Softmax(m)",
    "scaled": "b = Mul(small, r) m = Add(s, b) y = Softmax(m)",
    "divided": "b = Div(r, large) m = Add(s, b) y = Softmax(m)",
    "gated": "b = Mul(r, p) m = Add(s, b) y = Softmax(m)",
    "compared behind a node": "b = Transpose(r) m = Add(s, b) q = Softmax(m) l = Less(b, small) y = Where(l, small, q)",
}


@pytest.mark.parametrize("form", NOT_A_MASK)
def test_what_is_no_mask_gets_no_bound(form):
    nodes = [node("Add", ["x", "z"], ["a"]), node("Softmax", ["a"], ["p"]), node("MatMul", ["p", "w"], ["s"])]
    source = model([*nodes, *program(NOT_A_MASK[form])], [info(name, 8, 8) for name in "xzr"], [info("y", 8, 8)],
                   [weight("w", 8, 8), scalar("small", 1e-4), scalar("large", 1e4)])  # fmt: skip
    rules = {"version": 1, "rules": [{"match": {}, "precision": "fp32"}]} if form == "all in FP32" else "apex-o3"
    done = convert_onnx(source, rules=rules, keep_io_types=form != "in 16 bits itself")
    assert "Max" not in {entry.op_type for entry in done.model.graph.node}
