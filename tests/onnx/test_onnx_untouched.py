"""What `convert_onnx` leaves alone: quantised parts, sequences, FP64, custom domains, types that are not known."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper as h
from onnx_models import (
    DTYPES,
    RNG,
    check,
    info,
    model,
    node,
    types,
    weight,
)

from amp_compiler.onnx.convert import convert_onnx


def custom():
    source = model(
        [
            node("MatMul", ["x", "w"], ["a"]),
            h.make_node("Odd", ["a"], ["b"], domain="my.ops", name="odd"),
            node("Relu", ["b"], ["c"], "after"),
            node("MatMul", ["c", "w"], ["y"], "last"),
        ],
        [info("x", 4, 8)],
        [info("y", 4, 8)],
        [weight("w", 8, 8)],
        extra=[h.make_opsetid("my.ops", 1)],
        value_info=[info("b", 4, 8)],
    )
    return source


def test_custom_domains_keep_their_precision_unless_a_rule_names_them():
    done = check(custom(), "fp16", full=False)
    precisions = {entry.name: entry.precision for entry in done.plan.nodes}
    assert precisions["odd"] == "keep" and precisions["last"] == "low"
    assert types(done.model)["a_fp32"] == T.FLOAT
    assert next(entry for entry in done.model.graph.node if entry.name == "odd").input[0] == "a_fp32"
    named = {"version": 1, "extends": "default", "rules": [{"match": {"op": "my.ops.Odd"}, "precision": "low"}]}
    done = check(custom(), "fp16", named, full=False)
    assert {entry.name: entry.precision for entry in done.plan.nodes}["odd"] == "low"
    assert {info.name: info.type.tensor_type.elem_type for info in done.model.graph.value_info}["b"] == T.FLOAT16


def test_a_type_that_cannot_be_inferred_is_not_guessed():
    source = custom()
    del source.graph.value_info[:]
    done = check(source, "fp16", full=False)
    reasons = {entry.name: (entry.precision, entry.reason) for entry in done.plan.nodes}
    assert reasons["odd"] == ("keep", "the type of 'b' cannot be inferred, and is not guessed")
    assert reasons["after"][0] == reasons["last"][0] == "keep"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [T.INT32, T.FLOAT])
def test_bits_read_as_another_type_stay_what_they_are(dtype, kind):
    """BitCast wants equal widths, so that 16-bit data would make it invalid, and other numbers of an FP32 result."""
    source = model(
        [node("MatMul", ["x", "w"], ["a"]), node("BitCast", ["a"], ["y"], "bits", to=kind)],
        [info("x", 4, 8)],
        [info("y", 4, 8, kind=kind)],
        [weight("w", 8, 8)],
        opset=26,
        ir_version=13,
    )
    everything = {"version": 1, "rules": [{"match": {}, "precision": "low"}]}
    made = convert_onnx(source, rules=everything, dtype=dtype)
    onnx.checker.check_model(made.model, full_check=True)
    assert {entry.name: entry.precision for entry in made.plan.nodes}["bits"] == "keep"
    assert types(made.model)["a_fp32"] == T.FLOAT


@pytest.mark.parametrize("outside", [False, True])
def test_a_zipmap_is_left_alone_with_what_it_reads(outside, tmp_path):
    """A classifier of scikit-learn: its labels and the probability of each, as maps."""
    maps = h.make_sequence_type_proto(h.make_map_type_proto(T.INT64, h.make_tensor_type_proto(T.FLOAT, None)))
    nodes = [
        node("MatMul", ["x", "w"], ["a"], "first"), node("Relu", ["a"], ["b"], "relu"),
        node("MatMul", ["b", "v"], ["c"], "second"), node("Softmax", ["c"], ["p"], "softmax", axis=1),
        node("ArgMax", ["p"], ["label"], "label", axis=1, keepdims=0),
        node("ZipMap", ["p"], ["probabilities"], "zip", domain="ai.onnx.ml", classlabels_int64s=[0, 1, 2]),
    ]  # fmt: skip
    source = model(nodes, [info("x", 4, 32)], [info("label", 4, kind=T.INT64)],
                   [weight("w", 32, 32), weight("v", 32, 3)], opset=15,
                   extra=[h.make_opsetid("ai.onnx.ml", 3)])  # fmt: skip
    source.graph.output.append(h.make_value_info("probabilities", maps))
    path = tmp_path / "m.onnx"
    onnx.save(source, path, save_as_external_data=outside, size_threshold=1024)
    batch = {"x": RNG.standard_normal((4, 32)).astype(np.float32)}
    done = convert_onnx(path, tmp_path / "low.onnx", calibration=[batch], verify=[batch])
    made = onnx.load(done.path)
    assert {entry.name: entry.precision for entry in done.plan.nodes}["zip"] == "keep"
    assert [entry.precision for entry in done.plan.nodes if entry.op == "onnx.MatMul"] == ["low", "low"]
    assert made.graph.output[1].type == source.graph.output[1].type and done.refusal is None
    assert done.report.ok(2e-3) and len(done.report.outputs) == 2
    assert any("ai.onnx.ml.ZipMap" in note for note in done.notes)
