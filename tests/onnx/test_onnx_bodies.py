"""`convert_onnx` on If, Loop and Scan: captured values, state variables, outputs of branches."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto as T
from onnx import helper as h
from onnx_models import (
    DTYPES,
    RNG,
    X,
    casts,
    check,
    info,
    loop,
    model,
    node,
    same_numbers,
    weight,
)


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
