"""`math: fp32` in ONNX models: casts around what does not compute in FP32 by itself, names and numbers kept."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper as nh
from onnx.reference import ReferenceEvaluator
from onnx_models import DTYPES, LOW, X, casts, info, model, node, scalar, weight

import amp_compiler as amp

RULES = {"version": 1, "rules": [{"match": {}, "precision": "low", "math": "fp32"}]}
WEIGHT = weight("w", 8, 8)


def of_x(nodes, *data, shape=(4, 8)):
    return model(nodes, [info("x", 4, 8)], [info("y", *shape)], data, opset=20)


def wrapped(source, **options):
    result = amp.convert_onnx(source, rules=RULES, **({"dtype": "fp16"} | options)).model
    onnx.checker.check_model(result, full_check=True)
    return result


def named(built, name):
    return next(one for one in built.graph.node if one.name == name)


def test_a_gelu_computes_in_fp32_and_keeps_its_name():
    nodes = [
        node("MatMul", ["x", "w"], ["a"], "mm"),
        node("Gelu", ["a"], ["b"], "g"),
        node("Add", ["b", "a"], ["y"], "s"),
    ]
    built = wrapped(of_x(nodes, WEIGHT))
    gelu = named(built, "g")
    (up,) = [one for one in built.graph.node if one.output[0] == gelu.input[0]]
    (down,) = [one for one in built.graph.node if one.input[0] == gelu.output[0]]
    assert (up.op_type, list(up.input), up.attribute[0].i) == ("Cast", ["a"], T.FLOAT)
    assert (down.op_type, list(down.output), down.attribute[0].i) == ("Cast", ["b"], T.FLOAT16)
    assert list(named(built, "s").input) == ["b", "a"], "a sum needs no casts: one operation, rounded once"
    half = [one.astype(np.float16).astype(np.float32) for one in (X, nh.to_array(WEIGHT))]
    low = (half[0] @ half[1]).astype(np.float16)
    exact = ReferenceEvaluator(of_x([node("Gelu", ["x"], ["y"])])).run(None, {"x": low.astype(np.float32)})[0]
    result = ReferenceEvaluator(built).run(None, {"x": X})[0]
    want = (exact.astype(np.float16).astype(np.float32) + low).astype(np.float16)
    np.testing.assert_allclose(result, want, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("keep_io_types", [True, False])
def test_an_output_and_a_stored_operand(dtype, keep_io_types):
    source = of_x([node("PRelu", ["x", "slope"], ["y"], "p")], scalar("slope", np.full(8, 0.1)))
    result = wrapped(source, dtype=dtype, keep_io_types=keep_io_types)
    (stored,) = result.graph.initializer
    assert stored.data_type == LOW[dtype], "stored in 16 bits all the same"
    assert {*named(result, "p").input} <= {one.output[0] for one in casts(result)}
    types = {value.name: value.type.tensor_type.elem_type for value in (*result.graph.input, *result.graph.output)}
    assert types == dict.fromkeys(("x", "y"), T.FLOAT if keep_io_types else LOW[dtype])


def test_inside_a_body():
    def body(op):
        nodes = [node("Identity", ["x"], ["i"]), node(op, ["i"], [f"{op}_y"], op)]
        return h.make_graph(nodes, op, [], [info(f"{op}_y", 4, 8)])

    chosen = node("If", ["c"], ["y"], then_branch=body("Gelu"), else_branch=body("Sigmoid"))
    source = of_x([chosen], scalar("c", True, np.bool_))
    built = wrapped(source)
    inner = next(one for one in built.graph.node if one.op_type == "If").attribute[0].g
    (computing,) = [one for one in inner.node if one.op_type in ("Gelu", "Sigmoid")]
    around = [one.op_type for one in inner.node]
    assert around.index("Cast") < around.index(computing.op_type) < len(around) - 1
    result = ReferenceEvaluator(built).run(None, {"x": X})[0]
    np.testing.assert_allclose(result, ReferenceEvaluator(source).run(None, {"x": X})[0], rtol=2e-3, atol=1e-3)


def test_products_views_and_kernels_that_compute_in_fp32_get_none():
    nodes = [
        node("MatMul", ["x", "w"], ["a"]), node("Transpose", ["a"], ["t"], perm=[1, 0]),
        node("Transpose", ["t"], ["u"], perm=[1, 0]), node("LayerNormalization", ["u", "gamma"], ["n"]),
        node("Softmax", ["n"], ["s"]), node("Relu", ["s"], ["y"]),
    ]  # fmt: skip
    result = wrapped(of_x(nodes, WEIGHT, scalar("gamma", np.ones(8))))
    assert [(*one.input, *one.output) for one in casts(result)] == [("x", "x_fp16"), ("y_fp16", "y")]
