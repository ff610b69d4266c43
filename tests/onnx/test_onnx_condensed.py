"""Conversion on the light graph: what comes out is what comes out where every node is an object of `onnx_ir`."""

from __future__ import annotations

import contextlib
import dataclasses
import gc

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from onnx import TensorProto as T
from onnx_models import copy, info, masked, mlp, model, node, run, weight
from random_models import models

from amp_compiler.errors import AmpError
from amp_compiler.onnx import plan as planning
from amp_compiler.onnx.convert import convert_onnx
from amp_compiler.onnx.model import condense
from amp_compiler.onnx.model.model import open_model, read_model
from amp_compiler.onnx.model.plain import PlainGraph


def read_whole(opened, *, plain, **options):
    """The model, every node of it an object of `onnx_ir`."""
    return read_model(opened, plain=False, **options)


def outcome(source, monkeypatch, *, plain, **options):
    """The converted model's bytes, the plan and the notes; or the text of the error."""
    with monkeypatch.context() as patch:
        if not plain:
            patch.setattr(planning, "read_model", read_whole)
        try:
            done = convert_onnx(source, check=False, **options)
        except AmpError as error:
            return str(error)
    return done.model.SerializeToString(deterministic=True), done.plan.to_json(), done.notes, done.changed


def assert_same(source, monkeypatch, **options):
    whole = outcome(source, monkeypatch, plain=False, **options)
    assert outcome(source, monkeypatch, plain=True, **options) == whole


def chain(length, *, described=False, empty=False):
    """Products, sums and activations, of which one is FP32 by its name."""
    steps = (("MatMul", ["w"]), ("Add", ["b"]), ("Tanh", []), ("Softmax", []))
    nodes, read = [], "x"
    for index in range(length):
        op, others = steps[index % len(steps)]
        made = "y" if index == length - 1 else f"v{index}"
        nodes.append(node(op, [read, *others], [made], f"n{index}"))
        read = made
    built = model(nodes, [info("x", 2, 8)], [info("y", 2, 8)], [weight("w", 8, 8), weight("b", 8)])
    if described:
        built = onnx.shape_inference.infer_shapes(built)
    for one in built.graph.node if empty else ():
        one.domain = one.doc_string = one.overload = ""
        one.metadata_props.add(key="a", value="1")
    return built


WAYS = (
    {},
    {"dtype": "bf16", "keep_io_types": False},
    {"rules": {"version": 1, "extends": "default", "rules": [{"match": {"node": "n9$"}, "precision": "fp32"}]}},
    {"rules": {"version": 1, "extends": "default", "rules": [{"match": {"family": "matmul"}, "math": "fp32"}]}},
    {"rules": {"version": 1, "rules": [{"match": {}, "precision": "fp32"}]}},
)


@pytest.mark.parametrize("options", WAYS, ids=["default", "low ends", "one in FP32", "math", "nothing low"])
@pytest.mark.parametrize("form", [{}, {"described": True}, {"empty": True}], ids=["plain", "described", "empty text"])
def test_a_chain_comes_out_the_same(monkeypatch, options, form):
    assert_same(chain(24, **form), monkeypatch, **options)


@pytest.mark.parametrize("options", WAYS[:2], ids=["default", "low ends"])
@given(source=models())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_model_comes_out_the_same(monkeypatch, options, source):
    assert_same(source, monkeypatch, **options)


def test_masks_twins_of_names_and_stored_data_come_out_the_same(monkeypatch):
    assert_same(masked(-1e9), monkeypatch)
    assert_same(mlp(), monkeypatch, calibration=[{"x": np.full((2, 8), 1e5, np.float32)}])
    twins = chain(12)
    for one in twins.graph.node:
        one.name = "twin"
    assert_same(twins, monkeypatch)
    nameless = chain(12)
    for one in nameless.graph.node:
        one.name = ""
    assert_same(nameless, monkeypatch)
    own = chain(12)
    own.graph.node[5].op_type = "Cast"
    own.graph.node[5].attribute.append(onnx.helper.make_attribute("to", T.FLOAT))
    del own.graph.node[5].input[1:]
    assert_same(own, monkeypatch)


def test_only_what_is_changed_is_an_object(monkeypatch):
    made = []

    class Seen(condense.Condensed):
        def __init__(self, *given):
            super().__init__(*given)
            made.append(self)

    monkeypatch.setattr("amp_compiler.onnx.model.model.Condensed", Seen)
    source = chain(400)
    before = copy(source)
    done = convert_onnx(source, check=False)
    assert source == before
    (condensed,) = made
    assert sorted(condensed.nodes) == [0, 399]  # what reads the cast of the input, and what makes the output
    assert len(done.model.graph.node) == 402  # and two casts
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32)}
    np.testing.assert_allclose(run(done.model, feeds)[0], run(source, feeds)[0], atol=2e-3)


def test_no_message_outlives_a_conversion():
    """Nodes and values hold one another, so that the collector alone frees them, later; their messages go at once."""
    gc.collect()
    gc.disable()
    try:
        convert_onnx(chain(40), check=False)
        graphs = [one for one in gc.get_objects() if isinstance(one, PlainGraph)]
        assert [one for one in graphs if one.proto.node] == []
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "change",
    [
        lambda graph: graph.node.extend([graph.node.pop(2)]),
        lambda graph: graph.node[1].output.append(""),
        lambda graph: graph.input.append(info("w", 8, 8)),
        lambda graph: setattr(graph.node[0], "domain", "ai.onnx"),
        lambda graph: graph.node[3].input.append("nowhere"),
    ],
    ids=["out of order", "an output without a name", "an initializer that is an input", "ai.onnx", "nothing makes it"],
)
def test_what_is_not_plain_is_read_whole(monkeypatch, change):
    source = chain(8)
    change(source.graph)
    with contextlib.suppress(AmpError):
        assert not isinstance(read_model(open_model(source), check=False, plain=True).ir.graph, PlainGraph)
    assert_same(source, monkeypatch)


def test_the_text_of_nodes_is_that_of_the_message(monkeypatch):
    """A model whose opset was raised has another message: it is not read by the text of the one before."""
    source = chain(8)
    opened = open_model(source)
    assert [(one.name, one.op, one.inputs) for one in opened.texts] == [
        (one.name, one.op_type, tuple(one.input)) for one in source.graph.node
    ]
    assert isinstance(read_model(opened, check=False, plain=True).ir.graph, PlainGraph)
    unread = dataclasses.replace(opened, texts=None)
    assert not isinstance(read_model(unread, check=False, plain=True).ir.graph, PlainGraph)
    assert_same(source, monkeypatch, opset=21)


@pytest.mark.parametrize("length", [60, 200, 20_000])
def test_nodes_of_all_sizes_are_copied(monkeypatch, length):
    """A size is written in one, two or three bytes."""
    source = chain(8)
    source.graph.node[4].name = "n" * length
    source.graph.node[5].doc_string = "d" * length
    assert_same(source, monkeypatch)
