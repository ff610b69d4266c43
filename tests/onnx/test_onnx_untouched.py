"""Ops that ONNX does not know: ONNX Runtime's own have types and families, all others stay, with what they read."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper as nh
from onnx_models import DTYPES, LOW, RNG, check, info, model, node, precisions, same_numbers, types, weight

from amp_compiler.errors import OnnxError
from amp_compiler.onnx.check.calibrate import calibrate
from amp_compiler.onnx.check.verify import verify
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
    result = convert_onnx(source, rules=everything, dtype=dtype)
    onnx.checker.check_model(result.model, full_check=True)
    assert {entry.name: entry.precision for entry in result.plan.nodes}["bits"] == "keep"
    assert types(result.model)["a_fp32"] == T.FLOAT


@pytest.mark.parametrize("outside", [False, True])
def test_a_zipmap_is_left_alone_with_what_it_reads(outside, tmp_path):
    """A classifier of scikit-learn: its labels and the probability of each, as maps; nodes need not be sorted."""
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
    source.graph.node.reverse()
    path = tmp_path / "m.onnx"
    onnx.save(source, path, save_as_external_data=outside, size_threshold=1024)
    batch = {"x": RNG.standard_normal((4, 32)).astype(np.float32)}
    done = convert_onnx(path, tmp_path / "low.onnx", calibration=[batch], verify=[batch])
    result = onnx.load(done.path)
    assert {entry.name: entry.precision for entry in done.plan.nodes}["zip"] == "keep"
    assert [entry.precision for entry in done.plan.nodes if entry.op == "onnx.MatMul"] == ["low", "low"]
    assert result.graph.output[1].type == source.graph.output[1].type and done.refusal is None
    assert done.report.ok(2e-3) and len(done.report.outputs) == 2
    assert any("ai.onnx.ml.ZipMap" in note for note in done.notes)


X = RNG.standard_normal((2, 6, 16)).astype(np.float32)


def own(op, inputs, outputs, name, **attrs):
    return node(op, inputs, outputs, name, domain="com.microsoft", **attrs)


def optimized():
    """Half of a layer of a transformer, as the optimizer writes it: without a word on what its ops make."""
    mask = nh.from_array(np.array([6, 4], np.int32), "mask")
    nodes = [
        own("Attention", ["x", "qkv", "qkv_bias", "mask"], ["a"], "attention", num_heads=2),
        node("MatMul", ["a", "w"], ["b"], "projection"),
        own("SkipLayerNormalization", ["b", "x", "scale", "bias"], ["c", "", "", "sum"], "norm", epsilon=1e-5),
        node("MatMul", ["c", "w"], ["d"], "first"),
        own("BiasGelu", ["d", "bias"], ["e"], "gelu"),
        node("MatMul", ["e", "w"], ["f"], "second"),
        own("FastGelu", ["f"], ["g"], "fast"),
        node("Add", ["g", "sum"], ["y"], "add"),
    ]
    data = [weight("qkv", 16, 48), weight("qkv_bias", 48), weight("w", 16, 16), weight("scale", 16), weight("bias", 16)]
    return model(nodes, [info("x", 2, 6, 16)], [info("y", 2, 6, 16)], [*data, mask],
                 extra=[h.make_opsetid("com.microsoft", 1)])  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_of_it_is_low(dtype):
    source = optimized()
    done = check(source, dtype, full=False)
    named = ("attention", "projection", "norm", "first", "gelu", "second", "fast", "add")
    assert precisions(done) == dict.fromkeys(named, "low")
    assert len(done.plan.casts) > 0 and not done.notes
    stored = {tensor.name: tensor.data_type for tensor in done.model.graph.initializer}
    assert stored["qkv"] == stored["scale"] == LOW[dtype] and stored["mask"] == T.INT32
    if dtype == "fp16":
        same_numbers(source, done.model, {"x": X})


def test_what_nothing_names_stays_and_is_told():
    source = model([own("CDist", ["x", "x"], ["d"], "distance", metric="euclidean"), node("MatMul", ["d", "w"], ["y"])],
                   [info("x", 8, 8)], [info("y", 8, 8)], [weight("w", 8, 8)],
                   extra=[h.make_opsetid("com.microsoft", 1)])  # fmt: skip
    done = check(source, "fp16", full=False)
    assert [entry.precision for entry in done.plan.nodes] == ["keep", "low"]
    assert done.notes[0].startswith("1 of 2 nodes in fp16: neither the op table nor a rule names 1 com.microsoft.CDist")


def test_where_types_end_a_note_says_it():
    """An op that nobody knows: what it makes has no type."""
    source = optimized()
    source.graph.node[2].domain, source.graph.node[2].op_type = "my.ops", "Norm"
    source.graph.node[2].ClearField("attribute")
    source.opset_import.append(h.make_opsetid("my.ops", 1))
    done = convert_onnx(source)
    assert done.notes[0].startswith("2 of 8 nodes in fp16: 6 types of values not inferred")
    assert "'norm' (my.ops.Norm)" in done.notes[0]


def test_types_are_known_within_bodies_and_of_several_outputs():
    body = h.make_graph(
        [own("BiasGelu", ["x", "bias"], ["g"], "gelu"), node("MatMul", ["g", "w"], ["o"], "inner")], "then", [],
        [info("o", 2, 6, 16)],
    )  # fmt: skip
    other = h.make_graph([node("Identity", ["x"], ["p"], "same")], "else", [], [info("p", 2, 6, 16)])
    source = model(
        [h.make_node("If", ["c"], ["y"], name="if", then_branch=body, else_branch=other),
         own("SkipLayerNormalization", ["y", "x", "bias"], ["z", "mean"], "norm"),
         node("MatMul", ["mean", "one"], ["m"], "last")],
        [info("x", 2, 6, 16), info("c", kind=T.BOOL)], [info("z", 2, 6, 16), info("m", 2, 6, 16)],
        [weight("w", 16, 16), weight("bias", 16), weight("one", 1, 16)], extra=[h.make_opsetid("com.microsoft", 1)],
    )  # fmt: skip
    done = convert_onnx(source)
    precisions = {entry.name: entry.precision for entry in done.plan.nodes}
    assert precisions["gelu"] == precisions["inner"] == precisions["last"] == "low"
    assert precisions["norm"] == "keep"  # its means are FP32 by its schema
    onnx.checker.check_model(done.model, full_check=True)
    assert types(done.model)["y"] == T.FLOAT


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["SimplifiedLayerNormalization", "LayerNormalization"])
def test_ops_that_onnx_runtime_alone_has_in_the_default_domain(op, dtype, tmp_path):
    """Its optimizer makes them of an RMSNorm, and of a layer norm below opset 17; ONNX knows neither there.

    The opset is one that BF16 raises, so that ONNX's version converter meets them too.
    """
    nodes = [node("MatMul", ["x", "w"], ["a"], "first"), node("Relu", ["a"], ["n"], "norm"),
             node("MatMul", ["n", "w"], ["y"], "second")]  # fmt: skip
    source = model(nodes, [info("x", "rows", 16)], [info("y", "rows", 16)], [weight("w", 16, 16)], opset=11)
    source.graph.initializer.append(weight("scale", 16))
    source.graph.node[1].op_type = op
    source.graph.node[1].input.append("scale")
    batches = [{"x": X[0]}]
    assert set(calibrate(source, batches)) >= {"a", "n"}
    done = convert_onnx(source, dtype=dtype)
    assert precisions(done) == dict.fromkeys(("first", "norm", "second"), "low")
    assert {node.domain for node in done.model.graph.node} == {""}
    assert [entry.domain for entry in done.model.opset_import] == [""]
    assert verify(source, done.model, batches).ok(2e-2)
    onnx.save(source, tmp_path / "m.onnx")
    assert convert_onnx(tmp_path / "m.onnx", tmp_path / "made.onnx", dtype=dtype).plan.casts == done.plan.casts
    source.graph.node[1].op_type = f"{op}s"
    with pytest.raises(OnnxError, match=f"No Op registered for {op}s "):
        convert_onnx(source)
