"""`convert_onnx` on models of every shape: valid, idempotent, the same on every run, and right in its numbers."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper as nh

import amp_compiler as amp
from amp_compiler.errors import OnnxError
from amp_compiler.onnx_convert import convert_onnx

RNG = np.random.default_rng(0)
DTYPES = ("fp16", "bf16")
LOW = {"fp16": T.FLOAT16, "bf16": T.BFLOAT16}


def info(name, *shape, kind=T.FLOAT):
    return h.make_tensor_value_info(name, kind, list(shape))


def weight(name, *shape, scale=0.5):
    return nh.from_array((RNG.standard_normal(shape) * scale).astype(np.float32), name)


def scalar(name, number, kind=np.float32):
    return nh.from_array(np.asarray(number, kind), name)


def model(nodes, inputs, outputs, data=(), opset=18, ir_version=9, extra=(), **facts):
    graph = h.make_graph(list(nodes), "g", list(inputs), list(outputs), initializer=list(data), **facts)
    imports = [h.make_opsetid("", opset), *extra]
    made = h.make_model(graph, opset_imports=imports, ir_version=ir_version)
    onnx.checker.check_model(made, full_check=not extra)
    return made


def node(op, inputs, outputs, name="", **attrs):
    return h.make_node(op, list(inputs), list(outputs), name=name or None, **attrs)


def check(source, dtype, rules="default", *, full=True, **options):
    """Convert, and check everything that must hold of every conversion."""
    before = source.SerializeToString()
    done = convert_onnx(source, rules=rules, dtype=dtype, **options)
    made = done.model
    assert source.SerializeToString() == before, "the input was touched"
    onnx.checker.check_model(made, full_check=full)
    again = convert_onnx(made, rules=rules, dtype=dtype, **options)
    assert again.model.SerializeToString() == made.SerializeToString(), "not idempotent"
    if options.get("keep_io_types", True):
        assert list(made.graph.input) == list(source.graph.input)
        assert list(made.graph.output) == list(source.graph.output)
    names = [output for entry in made.graph.node for output in entry.output if output]
    assert len(names) == len(set(names))
    return done


def run(source, feeds):
    return ort.InferenceSession(source.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)


def same_numbers(source, made, feeds, tolerance=4e-3):
    for want, got in zip(run(source, feeds), run(made, feeds), strict=True):
        assert want.dtype == got.dtype and want.shape == got.shape
        assert np.linalg.norm(want - got) <= tolerance * np.linalg.norm(want) + 1e-7


def casts(made):
    return [entry for entry in made.graph.node if entry.op_type == "Cast"]


def types(made):
    """Element type of every value, by ONNX's own inference."""
    inferred = onnx.shape_inference.infer_shapes(made)
    graph = inferred.graph
    found = {tensor.name: tensor.data_type for tensor in graph.initializer}
    for entry in (*graph.input, *graph.output, *graph.value_info):
        found[entry.name] = entry.type.tensor_type.elem_type
    return found


def mlp(width=8):
    return model(
        [
            node("MatMul", ["x", "w1"], ["a"], "first"),
            node("Relu", ["a"], ["b"], "act"),
            node("MatMul", ["b", "w2"], ["y"], "second"),
        ],
        [info("x", 4, width)],
        [info("y", 4, width)],
        [weight("w1", width, width), weight("w2", width, width)],
    )


X = RNG.standard_normal((4, 8)).astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_benign_model_has_one_cast_at_each_end_and_16_bit_weights(dtype):
    source = mlp()
    done = check(source, dtype)
    assert [entry.precision for entry in done.plan.nodes] == ["low"] * 3
    assert len(casts(done.model)) == 2
    assert {tensor.data_type for tensor in done.model.graph.initializer} == {LOW[dtype]}
    assert [tensor.name for tensor in done.model.graph.initializer] == ["w1", "w2"]
    if dtype == "fp16":
        same_numbers(source, done.model, {"x": X})


def test_weights_are_rounded_to_nearest_even_and_keep_sign_and_zero():
    data = np.array([[1.0, -0.0, 0.0, 2049.0, 2051.0, -np.inf, 1e-7, -1e-7]], np.float32).T
    source = model(
        [node("MatMul", ["x", "w"], ["y"])], [info("x", 1, 8)], [info("y", 1, 1)], [nh.from_array(data, "w")]
    )
    made = nh.to_array(check(source, "fp16").model.graph.initializer[0])
    want = data.astype(np.float16)
    assert made.tobytes() == want.tobytes()
    assert made[3, 0] == 2048 and made[4, 0] == 2052 and np.signbit(made[1, 0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_shared_initializer_is_stored_once_or_twice(dtype):
    nodes = [
        node("MatMul", ["x", "w"], ["a"]),
        node("MatMul", ["a", "w"], ["b"]),
        node("Exp", ["w"], ["e"]),
        node("MatMul", ["b", "e"], ["y"]),
    ]
    both = check(model(nodes, [info("x", 4, 8)], [info("y", 4, 8)], [weight("w", 8, 8)]), dtype).model
    assert sorted(tensor.data_type for tensor in both.graph.initializer) == sorted([T.FLOAT, LOW[dtype]])
    only = check(model([*nodes[:1], node("MatMul", ["a", "w"], ["y"])], [info("x", 4, 8)], [info("y", 4, 8)],
                       [weight("w", 8, 8)]), dtype).model  # fmt: skip
    assert [tensor.data_type for tensor in only.graph.initializer] == [LOW[dtype]]


def test_an_initializer_that_is_an_input_keeps_its_type():
    source = model(
        [node("MatMul", ["x", "w"], ["y"])],
        [info("x", 4, 8), info("w", 8, 8)],
        [info("y", 4, 8)],
        [weight("w", 8, 8)],
        ir_version=3,
        opset=13,
    )
    made = check(source, "fp16").model
    assert made.graph.initializer[0].data_type == T.FLOAT
    assert sorted(entry.input[0] for entry in casts(made)) == ["w", "x", "y_fp16"]
    same_numbers(source, made, {"x": X})


def test_an_output_that_is_used_inside_keeps_its_name():
    source = model(
        [node("MatMul", ["x", "w"], ["a"], "one"), node("MatMul", ["a", "w"], ["y"], "two")],
        [info("x", 4, 8)],
        [info("a", 4, 8), info("y", 4, 8)],
        [weight("w", 8, 8)],
    )
    made = check(source, "fp16").model
    assert next(entry for entry in made.graph.node if entry.name == "two").input[0] == "a_fp16"
    same_numbers(source, made, {"x": X})


def test_a_value_that_the_model_itself_casts_and_returns():
    """The output may be the model's own upcast: it gets a name of its own, and both outputs keep theirs."""
    source = model(
        [
            node("MatMul", ["x", "w"], ["a"]),
            node("Cast", ["a"], ["b"], to=T.FLOAT),
            node("MatMul", ["b", "w"], ["c"]),
        ],
        [info("x", 4, 8)],
        [info("a", 4, 8), info("b", 4, 8), info("c", 4, 8)],
        [weight("w", 8, 8)],
    )
    same_numbers(source, check(source, "fp16").model, {"x": X})


def test_unnamed_duplicate_and_odd_names():
    nodes = [
        node("MatMul", ["x", "w"], ["return"]),
        node("Relu", ["return"], ["a"], "return"),
        node("MatMul", ["a", "w"], ["x_fp16"], "twin"),
        node("MatMul", ["x_fp16", "w"], ["y"], "twin"),
    ]
    source = model(nodes, [info("x", 4, 8)], [info("y", 4, 8)], [weight("w", 8, 8)])
    done = check(source, "fp16")
    kept = [(entry.name, entry.op_type) for entry in done.model.graph.node if entry.op_type != "Cast"]
    assert kept == [("", "MatMul"), ("return", "Relu"), ("twin", "MatMul"), ("twin", "MatMul")]
    for number, made in enumerate((source, done.model)):  # ONNX Runtime alone wants node names to differ
        for index, entry in enumerate(made.graph.node):
            entry.name = f"{number}_{index}"
    same_numbers(source, done.model, {"x": X})


@pytest.mark.parametrize("rules", ["default", "apex-o3", "fast"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_branches_of_if(dtype, rules):
    """Captured values, equal names in both branches, and branch outputs of one type."""

    def branch(name, op):
        return h.make_graph(
            [node("MatMul", ["a", "w"], ["t"]), node(op, ["t"], ["o"])], name, [], [info("o", 4, 8)]
        )  # fmt: skip

    source = model(
        [
            node("MatMul", ["x", "w"], ["a"]),
            h.make_node("If", ["c"], ["s"], then_branch=branch("p", "Relu"), else_branch=branch("q", "Tanh")),
            node("MatMul", ["s", "w"], ["y"]),
        ],
        [info("x", 4, 8), info("c", kind=T.BOOL)],
        [info("y", 4, 8)],
        [weight("w", 8, 8)],
    )
    done = check(source, dtype, rules)
    assert sum(entry.precision == "low" and entry.op == "onnx.MatMul" for entry in done.plan.nodes) == 4
    if dtype == "fp16":
        for flag in (True, False):
            same_numbers(source, done.model, {"x": X, "c": np.array(flag)})


def loop(scan=False):
    body_nodes = [node("MatMul", ["s", "w"], ["t"]), node("Tanh", ["t"], ["o"]), node("MatMul", ["o", "k"], ["u"])]
    if scan:
        body = h.make_graph([*body_nodes, node("Add", ["u", "e"], ["r"])], "body",
                            [info("s", 4, 8), info("e", 4, 8)], [info("o", 4, 8), info("r", 4, 8)])  # fmt: skip
        inner = h.make_node("Scan", ["x", "seq"], ["f", "y"], body=body, num_scan_inputs=1)
        return model([inner], [info("x", 4, 8), info("seq", 3, 4, 8)], [info("f", 4, 8), info("y", 3, 4, 8)],
                     [weight("w", 8, 8), weight("k", 8, 8)])  # fmt: skip
    body = h.make_graph(
        [*body_nodes, node("Identity", ["cond"], ["more"])],
        "body",
        [info("i", kind=T.INT64), info("cond", kind=T.BOOL), info("s", 4, 8)],
        [info("more", kind=T.BOOL), info("o", 4, 8), info("u", 4, 8)],
    )
    inner = h.make_node("Loop", ["n", "go", "x"], ["f", "y"], body=body)
    return model(
        [node("MatMul", ["z", "w"], ["k"]), inner, node("MatMul", ["f", "k"], ["last"])],
        [info("x", 4, 8), info("z", 8, 8), info("n", kind=T.INT64), info("go", kind=T.BOOL)],
        [info("last", 4, 8), h.make_tensor_value_info("y", T.FLOAT, [None, 4, 8])],
        [weight("w", 8, 8)],
    )


@pytest.mark.parametrize("rules", ["default", "apex-o3", "fast"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scan", [False, True], ids=["loop", "scan"])
def test_bodies_of_loops(dtype, rules, scan):
    source = loop(scan)
    done = check(source, dtype, rules)
    assert any(entry.op == "onnx.MatMul" and entry.precision == "low" for entry in done.plan.nodes)
    feeds = {"x": X, "z": RNG.standard_normal((8, 8)).astype(np.float32), "n": np.array(3), "go": np.array(True)}
    if scan:
        feeds = {"x": X, "seq": RNG.standard_normal((3, 4, 8)).astype(np.float32)}
    if dtype == "fp16":
        same_numbers(source, done.model, feeds)


def test_what_a_loop_reads_from_outside_is_cast_outside():
    source = loop()
    rules = {
        "version": 1,
        "rules": [{"match": {}, "precision": "fp32"}, {"match": {"node": "^MatMul_2$"}, "precision": "low"}],
    }
    made = check(source, "fp16", rules).model
    outer = [entry for entry in casts(made) if entry.input[0] == "k"]
    body = next(entry for entry in made.graph.node if entry.op_type == "Loop").attribute[0].g
    assert len(outer) == 1 and all(entry.input[0] != "k" for entry in body.node if entry.op_type == "Cast")


@pytest.mark.parametrize("dtype", DTYPES)
def test_nested_bodies(dtype):
    inner = h.make_graph([node("MatMul", ["s", "w"], ["p"])], "inner", [], [info("p", 4, 8)])
    other = h.make_graph([node("Add", ["s", "b"], ["p"])], "other", [], [info("p", 4, 8)])
    body = h.make_graph(
        [
            h.make_node("If", ["cond"], ["o"], then_branch=inner, else_branch=other),
            node("Identity", ["cond"], ["more"]),
        ],
        "body",
        [info("i", kind=T.INT64), info("cond", kind=T.BOOL), info("s", 4, 8)],
        [info("more", kind=T.BOOL), info("o", 4, 8)],
    )
    source = model(
        [node("MatMul", ["x", "w"], ["a"]), h.make_node("Loop", ["n", "go", "a"], ["y"], body=body)],
        [info("x", 4, 8), info("n", kind=T.INT64), info("go", kind=T.BOOL)],
        [info("y", 4, 8)],
        [weight("w", 8, 8), weight("b", 8)],
    )
    done = check(source, dtype)
    if dtype == "fp16":
        same_numbers(source, done.model, {"x": X, "n": np.array(2), "go": np.array(True)})


@pytest.mark.parametrize("dtype", DTYPES)
def test_resize_with_shared_scales(dtype):
    source = model(
        [
            node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
            node("Resize", ["a", "", "s"], ["b"], mode="nearest"),
            node("Mul", ["b", "m"], ["c"]),
            node("Resize", ["c", "", "s"], ["y"], mode="nearest"),
        ],
        [info("x", 1, 2, 4, 4)],
        [h.make_tensor_value_info("y", T.FLOAT, [1, 2, 16, 16])],
        [weight("w", 2, 2, 3, 3), nh.from_array(np.array([1, 1, 2, 2], np.float32), "s"), weight("m", 1)],
    )
    made = check(source, dtype, "apex-o3").model
    data = {tensor.name: tensor.data_type for tensor in made.graph.initializer}
    assert data["s"] == T.FLOAT and data["w"] == LOW[dtype]


@pytest.mark.parametrize("opset", [9, 11, 13, 14, 15, 17, 21])
@pytest.mark.parametrize("dtype", DTYPES)
def test_opsets(opset, dtype):
    """Batch norm in every version: its statistics are tied to the data before opset 15, and bf16 wants opset 22."""
    data = [weight("w", 3, 2, 3, 3), weight("b", 3), weight("s", 3), weight("mean", 3)]
    data.append(nh.from_array(np.array([0.5, 1.0, 2.0], np.float32), "var"))
    source = model(
        [
            node("Conv", ["x", "w", "b"], ["a"], "conv"),
            node("BatchNormalization", ["a", "s", "b", "mean", "var"], ["c"], "norm"),
            node("Relu", ["c"], ["d"], "act"),
            node("GlobalAveragePool", ["d"], ["y"], "pool"),
        ],
        [info("x", 1, 2, 5, 5)],
        [info("y", 1, 3, 1, 1)],
        data,
        opset=opset,
        ir_version=4,
    )
    done = check(source, dtype)
    assert {entry.name: entry.precision for entry in done.plan.nodes} == dict.fromkeys(
        ("conv", "norm", "act", "pool"), "low"
    )
    if dtype == "fp16":
        assert done.model.opset_import[0].version == opset
        same_numbers(source, done.model, {"x": RNG.standard_normal((1, 2, 5, 5)).astype(np.float32)})


def test_an_opset_that_cannot_be_raised_is_an_error_that_says_so(monkeypatch):
    source = model([node("Conv", ["x", "w"], ["y"], "conv")], [info("x", 1, 2, 5, 5)], [info("y", 1, 3, 3, 3)],
                   [weight("w", 3, 2, 3, 3)], opset=17)  # fmt: skip

    def fail(proto, version):
        raise RuntimeError("no adapter")

    monkeypatch.setattr(onnx.version_converter, "convert_version", fail)
    with pytest.raises(
        OnnxError, match=r"Conv takes bf16 from opset 22 on .*cannot raise the model from 17: no adapter"
    ):
        convert_onnx(source, dtype="bf16")
    kept = convert_onnx(source, dtype="bf16", raise_opset=False)
    assert (
        kept.model.SerializeToString()
        == convert_onnx(source, dtype="fp16", rules={"version": 1}).model.SerializeToString()
    )
    assert kept.plan.nodes[0].reason == "Conv takes no bf16 before opset 22; the opset is 17"


def test_raising_keeps_names_doc_strings_and_metadata():
    source = model([h.make_node("Conv", ["x", "w"], ["y"], name="conv", doc_string="a note")], [info("x", 1, 2, 5, 5)],
                   [info("y", 1, 3, 3, 3)], [weight("w", 3, 2, 3, 3)], opset=17)  # fmt: skip
    source.graph.node[0].metadata_props.add(key="k", value="v")
    source.metadata_props.add(key="author", value="me")
    made = check(source, "bf16").model
    conv = next(entry for entry in made.graph.node if entry.op_type == "Conv")
    assert (conv.name, conv.doc_string, conv.metadata_props[0].value) == ("conv", "a note", "v")
    assert made.metadata_props[0].value == "me"
    assert nh.to_array(source.graph.initializer[0]).shape == tuple(made.graph.initializer[0].dims)


# ---- numbers that do not fit


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
    found = next(entry for entry in done.plan.nodes if entry.name == "op")
    assert found.precision == "fp32" and "'c'" in found.reason
    kept = {tensor.name: nh.to_array(tensor) for tensor in done.model.graph.initializer}["c"]
    assert kept.dtype == np.float32 and kept == np.float32(number)


@pytest.mark.parametrize("number", [65504.0, 0.0, -0.0, np.inf, -np.inf, 2.0**-24, 1.0])
def test_a_constant_that_fits_does_not(number):
    done = check(with_constant(number), "fp16")
    assert next(entry for entry in done.plan.nodes if entry.name == "op").precision == "low"


def test_bf16_has_the_range_of_fp32():
    for number in (1e6, 1e-9, 3e38):
        done = check(with_constant(number), "bf16")
        assert next(entry for entry in done.plan.nodes if entry.name == "op").precision == "low"


def test_lost_elements_of_a_factor_are_below_the_rounding_of_the_others():
    data = np.ones((8, 8), np.float32)
    data[0, 0] = 1e-9
    source = model(
        [node("MatMul", ["x", "w"], ["y"])], [info("x", 4, 8)], [info("y", 4, 8)], [nh.from_array(data, "w")]
    )
    assert check(source, "fp16").plan.nodes[0].precision == "low"
    small = model([node("MatMul", ["x", "w"], ["y"])], [info("x", 4, 8)], [info("y", 4, 8)],
                  [nh.from_array(data * np.float32(1e-5), "w")])  # fmt: skip
    assert check(small, "fp16").plan.nodes[0].precision == "fp32"


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


def masked(number, fill=False):
    """softmax(x·w + (1 - mask) * number)·w"""
    nodes = [
        node("MatMul", ["x", "w"], ["s"], "scores"),
        node("Sub", ["one", "mask"], ["off"], "off"),
        node("Mul", ["off", "big"], ["bias"], "bias"),
        node("Add", ["s", "bias"], ["m"], "masked"),
        node("Softmax", ["m"], ["p"], "softmax", axis=-1),
        node("MatMul", ["p", "w"], ["y"], "mix"),
    ]
    data = [weight("w", 8, 8), scalar("one", 1.0), scalar("big", number)]
    return model(nodes, [info("x", 4, 8), info("mask", 4, 8)], [info("y", 4, 8)], data)


@pytest.mark.parametrize("number", [-3.4028234663852886e38, -1e9, -1e5])
@pytest.mark.parametrize("rules", ["default", "fast", "apex-o2", "apex-o3"])
def test_an_attention_mask_becomes_the_minimum_of_the_type(number, rules):
    source = masked(number)
    done = check(source, "fp16", rules)
    precisions = {entry.name: entry.precision for entry in done.plan.nodes}
    data = {tensor.name: nh.to_array(tensor) for tensor in done.model.graph.initializer}
    touched = any(precisions[name] == "low" for name in ("off", "bias", "masked", "softmax"))
    assert data["big"] == (np.float32(-65504.0) if touched else np.float32(number))
    mask = (np.arange(8) < 5).astype(np.float32)[None].repeat(4, 0)
    got = run(done.model, {"x": X, "mask": mask})[0]
    assert np.isfinite(got).all()
    same_numbers(source, done.model, {"x": X, "mask": mask})


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


# ---- ops that overflow


def rms_norm(square):
    first = node("Pow", ["a", "two"], ["q"], "square") if square == "Pow" else node("Mul", ["a", "a"], ["q"], "square")
    return model(
        [
            node("MatMul", ["x", "w"], ["a"]),
            first,
            node("ReduceMean", ["q"], ["v"], "mean", axes=[-1]),
            node("Add", ["v", "eps"], ["ve"], "eps"),
            node("Sqrt", ["ve"], ["r"], "root"),
            node("Reciprocal", ["r"], ["i"], "inverse"),
            node("Mul", ["a", "i"], ["n"], "scaled"),
            node("MatMul", ["n", "w"], ["y"]),
        ],
        [info("x", 4, 8)],
        [info("y", 4, 8)],
        [weight("w", 8, 8), scalar("two", 2.0), scalar("eps", 1e-6)],
        opset=13,
    )


@pytest.mark.parametrize("rules", ["default", "fast", "apex-o3", "safe"])
@pytest.mark.parametrize("square", ["Pow", "Mul"])
def test_a_variance_in_parts_stays_fp32(square, rules):
    source = rms_norm(square)
    done = check(source, "fp16", rules)
    precisions = {entry.name: entry.precision for entry in done.plan.nodes}
    assert {precisions[name] for name in ("square", "mean", "eps", "root", "inverse", "scaled")} == {"fp32"}
    same_numbers(source, done.model, {"x": X * 200})


def test_exponentials():
    nodes = [
        node("MatMul", ["x", "w"], ["a"]),
        node("Exp", ["a"], ["e"], "free"),
        node("ReduceMax", ["a"], ["top"], axes=[-1]),
        node("Sub", ["a", "top"], ["d"]),
        node("Exp", ["d"], ["f"], "bounded"),
        node("Add", ["e", "one"], ["g"], "plus"),
        node("Log", ["g"], ["l"], "log"),
        node("Add", ["l", "f"], ["y"]),
    ]
    source = model(nodes, [info("x", 4, 8)], [info("y", 4, 8)], [weight("w", 8, 8), scalar("one", 1.0)], opset=13)
    precisions = {entry.name: entry.precision for entry in check(source, "fp16", "apex-o3").plan.nodes}
    assert precisions["free"] == precisions["plus"] == precisions["log"] == "fp32" and precisions["bounded"] == "low"
    assert {entry.precision for entry in check(source, "bf16", "apex-o3").plan.nodes} == {"low"}


def test_calibrated_ranges_keep_makers_and_readers_in_fp32():
    from amp_compiler.onnx_plan import explain_onnx

    plan = explain_onnx(mlp(), ranges={"a": 40000.0, "b": 100.0})
    assert [entry.precision for entry in plan.nodes] == ["fp32", "fp32", "low"]
    assert "4e+04 in calibration" in plan.nodes[0].reason
    assert {entry.precision for entry in explain_onnx(mlp(), ranges={"a": 1e9}, dtype="bf16").nodes} == {"low"}
    assert explain_onnx(mlp(), ranges={"a": 10.0}) == amp.explain(mlp(), dtype="fp16")


# ---- what is left alone


@pytest.mark.parametrize("dtype", DTYPES)
def test_quantised_models_are_left_intact(dtype):
    data = [
        scalar("s", 0.1),
        scalar("z", 0, np.uint8),
        nh.from_array(RNG.integers(0, 9, (8, 8)).astype(np.uint8), "wq"),
    ]
    source = model(
        [
            node("QuantizeLinear", ["x", "s", "z"], ["q"]),
            node("DequantizeLinear", ["q", "s", "z"], ["d"]),
            node("DequantizeLinear", ["wq", "s", "z"], ["w"]),
            node("MatMul", ["d", "w"], ["a"]),
            node("QuantizeLinear", ["a", "s", "z"], ["aq"]),
            node("DequantizeLinear", ["aq", "s", "z"], ["y"]),
        ],
        [info("x", 4, 8)],
        [info("y", 4, 8)],
        data,
    )
    done = check(source, dtype)
    assert not done.changed and done.plan.cast_bytes == 0
    assert [entry.SerializeToString() for entry in done.model.graph.node] == [
        e.SerializeToString() for e in source.graph.node
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_sequences_fp64_and_integers(dtype):
    source = model(
        [
            node("MatMul", ["x", "w"], ["a"]),
            node("SequenceConstruct", ["a", "x"], ["seq"]),
            node("SequenceAt", ["seq", "zero"], ["b"]),
            node("Cast", ["b"], ["c"], to=T.DOUBLE),
            node("Mul", ["c", "c"], ["d"], "double"),
            node("Cast", ["d"], ["e"], to=T.FLOAT),
            node("MatMul", ["e", "w"], ["y"]),
            node("Cast", ["a"], ["whole"], to=T.INT64),
        ],
        [info("x", 4, 8)],
        [info("y", 4, 8), info("whole", 4, 8, kind=T.INT64)],
        [weight("w", 8, 8), scalar("zero", 0, np.int64)],
    )
    done = check(source, dtype)
    assert next(entry for entry in done.plan.nodes if entry.name == "double").precision == "keep"
    if dtype == "fp16":
        got, want = run(done.model, {"x": X})[0], run(source, {"x": X})[0]
        assert np.linalg.norm(got - want) < 5e-3 * np.linalg.norm(want)


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


def test_local_functions_are_written_out():
    steps = [node("MatMul", ["a", "b"], ["t"]), node("Relu", ["t"], ["o"])]
    inner = h.make_function("f", "Double", ["a", "b"], ["o"], steps, [h.make_opsetid("", 18)])
    graph = h.make_graph([h.make_node("Double", ["x", "w"], ["y"], domain="f", name="call")], "g", [info("x", 4, 8)],
                         [info("y", 4, 8)], [weight("w", 8, 8)])  # fmt: skip
    source = h.make_model(
        graph, functions=[inner], opset_imports=[h.make_opsetid("", 18), h.make_opsetid("f", 1)], ir_version=9
    )
    done = check(source, "fp16")
    assert done.plan.low_nodes == 2 and not done.model.functions
    same_numbers(source, done.model, {"x": X})


def test_dynamic_dimensions_empty_tensors_and_unsorted_nodes():
    source = model(
        [
            node("MatMul", ["x", "w"], ["a"]),
            node("Concat", ["a", "nothing"], ["b"], axis=0),
            node("MatMul", ["b", "w"], ["y"]),
        ],
        [h.make_tensor_value_info("x", T.FLOAT, ["n", 8])],
        [h.make_tensor_value_info("y", T.FLOAT, ["m", 8])],
        [weight("w", 8, 8), nh.from_array(np.zeros((0, 8), np.float32), "nothing")],
    )
    done = check(source, "fp16")
    assert done.plan.low_nodes == 3
    same_numbers(source, done.model, {"x": X})
    nodes = list(source.graph.node)
    del source.graph.node[:]
    source.graph.node.extend(reversed(nodes))
    again = convert_onnx(source)
    onnx.checker.check_model(again.model, full_check=True)


def test_keep_io_types_false():
    source = mlp()
    made = check(source, "fp16", keep_io_types=False).model
    assert not casts(made)
    assert {entry.type.tensor_type.elem_type for entry in (*made.graph.input, *made.graph.output)} == {T.FLOAT16}
    assert [entry.name for entry in (*made.graph.input, *made.graph.output)] == ["x", "y"]


def test_the_empty_plan_changes_nothing():
    source = loop()
    done = check(source, "fp16", {"version": 1, "rules": [{"match": {}, "precision": "keep"}]})
    assert not done.changed and done.plan.casts == ()
    assert done.model.graph.SerializeToString() == source.graph.SerializeToString()


# ---- files


def test_files_are_written_whole_and_the_input_is_never_touched(tmp_path):
    source, target = tmp_path / "m.onnx", tmp_path / "out.onnx"
    onnx.save(mlp(), source)
    before = source.read_bytes()
    done = convert_onnx(source, target)
    assert done.path == target and done.model is None and source.read_bytes() == before
    assert target.read_bytes() == convert_onnx(source).model.SerializeToString(deterministic=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.onnx", "out.onnx"]
    for wrong in (source, tmp_path / "no" / "out.onnx"):
        with pytest.raises(OnnxError):
            convert_onnx(source, wrong)
    with pytest.raises(OnnxError, match="cannot be read"):
        convert_onnx(tmp_path / "none.onnx")
    (tmp_path / "junk.onnx").write_bytes(b"no model at all")
    with pytest.raises(OnnxError, match="no ONNX model"):
        convert_onnx(tmp_path / "junk.onnx")


def test_external_data_stay_external_and_cast_exactly(tmp_path):
    inline = mlp(64)
    onnx.save(mlp_of(inline), tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    convert_onnx(tmp_path / "m.onnx", tmp_path / "out.onnx")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.data", "m.onnx", "out.onnx", "out.onnx.data"]
    onnx.checker.check_model(str(tmp_path / "out.onnx"), full_check=True)
    made = onnx.load(tmp_path / "out.onnx")
    want = convert_onnx(mlp_of(inline)).model
    for got, expected in zip(made.graph.initializer, want.graph.initializer, strict=True):
        assert got.name == expected.name
        np.testing.assert_array_equal(nh.to_array(got), nh.to_array(expected))
    with pytest.raises(OnnxError, match="data file of the input"):
        convert_onnx(tmp_path / "m.onnx", tmp_path / "m.data")
    (tmp_path / "m.data").unlink()
    with pytest.raises(OnnxError, match="keep the data files beside the model"):
        convert_onnx(tmp_path / "m.onnx")


def mlp_of(source):
    copied = onnx.ModelProto()
    copied.CopyFrom(source)
    return copied


def test_the_bytes_do_not_depend_on_the_hash_seed(tmp_path):
    onnx.save(masked(-1e9), tmp_path / "a.onnx")
    onnx.save(loop(), tmp_path / "b.onnx")
    code = (
        "import sys, hashlib, amp_compiler as amp\n"
        "for path in sys.argv[1:]:\n"
        "    for dtype in ('fp16', 'bf16'):\n"
        "        done = amp.convert_onnx(path, dtype=dtype, rules='fast')\n"
        "        print(hashlib.sha256(done.model.SerializeToString() + done.plan.to_json().encode()).hexdigest())\n"
    )
    found = set()
    for seed in ("0", "1", "77"):
        ran = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "a.onnx"), str(tmp_path / "b.onnx")],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        found.add(ran.stdout)
    assert len(found) == 1 and found.pop().count("\n") == 4


def test_explain_reads_onnx(tmp_path):
    onnx.save(mlp(), tmp_path / "m.onnx")
    assert amp.explain(tmp_path / "m.onnx") == amp.explain(mlp(), dtype="fp16") == convert_onnx(mlp()).plan


def test_infinite_masks_do_not_count_in_calibration():
    """What -inf fills before a softmax reaches infinity in every run, and that says nothing of the scores."""
    nodes = [
        node("MatMul", ["x", "w"], ["s"], "scores"),
        node("Where", ["keep", "s", "minf"], ["m"], "pick"),
        node("Softmax", ["m"], ["p"], "softmax", axis=-1),
        node("MatMul", ["p", "w"], ["y"], "mix"),
    ]
    source = model(nodes, [info("x", 4, 8), info("keep", 4, 8, kind=T.BOOL)], [info("y", 4, 8)],
                   [weight("w", 8, 8), scalar("minf", -np.inf)])  # fmt: skip
    keep = np.arange(8)[None].repeat(4, 0) < 6
    batches = [{"x": X, "keep": keep}]
    done = convert_onnx(source, rules="apex-o3", calibration=batches, verify=batches)
    assert {entry.name: entry.precision for entry in done.plan.nodes}["pick"] == "low"
    assert done.report.first_bad is None


def test_calibration_and_verification_from_a_file(tmp_path):
    big = np.full((4, 8), 3e4, np.float32)
    np.savez(tmp_path / "data.npz", x=big)
    onnx.save(mlp(), tmp_path / "m.onnx")
    done = convert_onnx(
        tmp_path / "m.onnx", tmp_path / "o.onnx", calibration=tmp_path / "data.npz", verify=tmp_path / "data.npz"
    )
    assert {entry.precision for entry in done.plan.nodes} == {"fp32"}
    assert "in calibration" in done.plan.nodes[0].reason and done.report.first_bad is None
