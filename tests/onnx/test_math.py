"""`math: fp32` in ONNX models: casts around what does not compute in FP32 by itself, names and numbers kept."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper as h
from onnx.reference import ReferenceEvaluator

import amp_compiler as amp

RULES = {"version": 1, "rules": [{"match": {}, "precision": "low", "math": "fp32"}]}


def model_of(nodes: list[Any], outputs: dict[str, list[int]], initializers: Any = ()) -> onnx.ModelProto:
    graph = h.make_graph(
        nodes,
        "g",
        [h.make_tensor_value_info("x", T.FLOAT, [4, 8])],
        [h.make_tensor_value_info(name, T.FLOAT, shape) for name, shape in outputs.items()],
        list(initializers),
    )
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", 20)])
    model.ir_version = 9
    onnx.checker.check_model(model, full_check=True)
    return model


def wrapped(model: onnx.ModelProto, **options: Any) -> onnx.ModelProto:
    made = amp.convert_onnx(model, rules=RULES, **({"dtype": "fp16"} | options)).model
    onnx.checker.check_model(made, full_check=True)
    return made


def node(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(one for one in model.graph.node if one.name == name)


def decided_outputs(model: onnx.ModelProto, value: str) -> onnx.NodeProto:
    return next(one for one in model.graph.node if value in one.output)


WEIGHT = onnx.numpy_helper.from_array(np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32), "w")
X = np.random.default_rng(1).normal(size=(4, 8)).astype(np.float32)


def test_a_gelu_computes_in_fp32_and_keeps_its_name() -> None:
    model = model_of(
        [h.make_node("MatMul", ["x", "w"], ["a"], name="mm"), h.make_node("Gelu", ["a"], ["b"], name="g"),
         h.make_node("Add", ["b", "a"], ["y"], name="add")],
        {"y": [4, 8]}, [WEIGHT],
    )  # fmt: skip
    made = wrapped(model)
    gelu = node(made, "g")
    (up,) = [one for one in made.graph.node if one.output[0] == gelu.input[0]]
    (down,) = [one for one in made.graph.node if one.input[0] == gelu.output[0]]
    assert (up.op_type, list(up.input), up.attribute[0].i) == ("Cast", ["a"], T.FLOAT)
    assert (down.op_type, list(down.output), down.attribute[0].i) == ("Cast", ["b"], T.FLOAT16)
    assert list(node(made, "add").input) == ["b", "a"], "a sum needs no casts: one operation, rounded once"
    low = (X.astype(np.float16).astype(np.float32) @ onnx.numpy_helper.to_array(WEIGHT).astype(np.float16).astype(
        np.float32)).astype(np.float16)  # fmt: skip
    plain = model_of([h.make_node("Gelu", ["x"], ["b"])], {"b": [4, 8]})
    exact = ReferenceEvaluator(plain).run(None, {"x": low.astype(np.float32)})[0].astype(np.float16)
    found = ReferenceEvaluator(made).run(None, {"x": X})[0]
    np.testing.assert_allclose(found, (exact.astype(np.float32) + low).astype(np.float16), rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("keep_io_types", [True, False])
def test_an_output_and_a_stored_operand(dtype: str, keep_io_types: bool) -> None:
    slope = onnx.numpy_helper.from_array(np.full(8, 0.1, np.float32), "slope")
    model = model_of([h.make_node("PRelu", ["x", "slope"], ["y"], name="p")], {"y": [4, 8]}, [slope])
    made = wrapped(model, dtype=dtype, keep_io_types=keep_io_types)
    low = T.FLOAT16 if dtype == "fp16" else T.BFLOAT16
    (stored,) = made.graph.initializer
    assert stored.data_type == low, "stored in 16 bits all the same"
    assert all(decided_outputs(made, name).op_type == "Cast" for name in node(made, "p").input)
    types = {value.name: value.type.tensor_type.elem_type for value in (*made.graph.input, *made.graph.output)}
    assert types == dict.fromkeys(("x", "y"), T.FLOAT if keep_io_types else low)


def test_inside_a_body() -> None:
    def body(op: str) -> onnx.GraphProto:
        nodes = [h.make_node("Identity", ["x"], ["i"]), h.make_node(op, ["i"], [f"{op}_y"], name=op)]
        return h.make_graph(nodes, op, [], [h.make_tensor_value_info(f"{op}_y", T.FLOAT, [4, 8])])

    condition = onnx.numpy_helper.from_array(np.array(True), "c")
    branches = {"then_branch": body("Gelu"), "else_branch": body("Sigmoid")}
    model = model_of([h.make_node("If", ["c"], ["y"], **branches)], {"y": [4, 8]}, [condition])
    made = wrapped(model)
    inner = next(one for one in made.graph.node if one.op_type == "If").attribute[0].g
    (computing,) = [one for one in inner.node if one.op_type in ("Gelu", "Sigmoid")]
    around = [one.op_type for one in inner.node]
    assert around.index("Cast") < around.index(computing.op_type) < len(around) - 1
    found = ReferenceEvaluator(made).run(None, {"x": X})[0]
    np.testing.assert_allclose(found, ReferenceEvaluator(model).run(None, {"x": X})[0], rtol=2e-3, atol=1e-3)


def test_products_views_and_kernels_that_compute_in_fp32_get_none() -> None:
    gamma = onnx.numpy_helper.from_array(np.ones(8, np.float32), "gamma")
    model = model_of(
        [h.make_node("MatMul", ["x", "w"], ["a"]), h.make_node("Transpose", ["a"], ["t"], perm=[1, 0]),
         h.make_node("Transpose", ["t"], ["u"], perm=[1, 0]), h.make_node("LayerNormalization", ["u", "gamma"], ["n"]),
         h.make_node("Softmax", ["n"], ["s"]), h.make_node("Relu", ["s"], ["y"])],
        {"y": [4, 8]}, [WEIGHT, gamma],
    )  # fmt: skip
    casts = [one for one in wrapped(model).graph.node if one.op_type == "Cast"]
    assert [(list(one.input), list(one.output)) for one in casts] == [(["x"], ["x_fp16"]), (["y_fp16"], ["y"])]


def test_a_rule_that_matches_nothing_is_told_once(caplog: Any) -> None:
    model = model_of([h.make_node("Relu", ["x"], ["y"], name="/head/Relu")], {"y": [4, 8]})
    asked = {"version": 1, "extends": "default", "rules": [{"match": {"node": "^/haed/"}, "precision": "low"}]}
    done = amp.convert_onnx(model, rules=asked)
    assert [(rule.condition, rule.nearest) for rule in done.plan.unused_rules] == [("node", "/head/Relu")]
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "'/head/Relu'" in said
