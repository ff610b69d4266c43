"""Lists of tensors: what reads or makes one list, puts in or takes out, runs in one type, and no cast takes a list."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto as T
from onnx import helper as h
from onnx import parser
from onnx_models import DTYPES, check, info, model, node, precisions, run, scalar, weight

from amp_compiler.onnx.check.verify import verify
from amp_compiler.onnx.convert import convert_onnx

RNG = np.random.default_rng(5)
X = RNG.standard_normal((4, 4)).astype(np.float32)
AT = scalar("at", 0, np.int64)


def graph(body, outputs="float[4, 4] y", inputs=""):
    text = f"""<ir_version: 9, opset_import: ["" : 18]> g (float[4, 4] x{inputs}) => ({outputs})
        <float[4, 4] w, int64 at = {{0}}> {{ {body} }}"""
    result = parser.parse_model(text)
    del result.graph.initializer[:]
    result.graph.initializer.extend([weight("w", 4, 4), AT])
    return result


def held(built):
    """The element type of each empty list."""
    return [entry.attribute[0].i for entry in built.graph.node if entry.op_type == "SequenceEmpty"]


PRODUCTS = """
    [product] a = MatMul(x, w) [again] b = MatMul(a, w)
    [empty] e = SequenceEmpty<dtype = 1>() [put] l = SequenceInsert(e, a) [more] m = SequenceInsert(l, b)
    [drop] n = SequenceErase(m, at) [take] c = SequenceAt(n, at) [last] y = MatMul(c, w)"""


def test_a_list_of_products_is_low():
    source = graph(PRODUCTS)
    done = check(source, "fp16")
    assert {precisions(done)[one] for one in ("put", "more", "drop", "take")} == {"low"}
    assert held(done.model) == [T.FLOAT16] and len([cast for cast in done.plan.casts if cast.bytes]) == 2
    assert verify(source, done.model, [{"x": X}]).largest_error < 2e-3


def test_where_its_type_is_declared_it_changes():
    source = graph(PRODUCTS)
    kind = h.make_sequence_type_proto(h.make_tensor_type_proto(T.FLOAT, [4, 4]))
    source.graph.value_info.extend(h.make_value_info(name, kind) for name in ("l", "m"))
    result = check(source, "fp16").model
    declared = {one.name: one.type.sequence_type.elem_type.tensor_type.elem_type for one in result.graph.value_info}
    assert {declared[name] for name in ("l", "m") if name in declared} <= {T.FLOAT16}


@pytest.mark.parametrize("put_in", ["x", "r"])
def test_an_fp32_reader_sees_no_rounded_number(put_in):
    """What is FP32 is put in, beside a product, and what is taken out is an output."""
    source = graph(f"""
        [product] a = MatMul(x, w) [relu] r = Relu(x) [made] l = SequenceConstruct(a, {put_in})
        one = Constant<value_int = 1>() [take] c = SequenceAt(l, one) [same] y = Identity(c)""")
    done = check(source, "fp16")
    assert precisions(done)["made"] == precisions(done)["take"] == "fp32"
    np.testing.assert_array_equal(run(done.model, {"x": X})[0], run(source, {"x": X})[0])


def test_a_length_asks_for_no_type():
    source = graph(PRODUCTS + "[count] k = SequenceLength(m)", "float[4, 4] y, int64 k")
    done = check(source, "fp16")
    assert precisions(done)["more"] == "low" and run(done.model, {"x": X})[1] == 2


GIVEN = {
    "an output": ("[product] a = MatMul(x, w) [made] l = SequenceConstruct(a, a)", "seq(float[4, 4]) l", ""),
    "an input": (
        "[product] a = MatMul(x, w) [made] m = SequenceInsert(l, a) [take] c = SequenceAt(m, at) y = MatMul(c, w)",
        "float[4, 4] y",
        ", seq(float[4, 4]) l",
    ),
}


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("kind", GIVEN)
def test_what_enters_or_leaves_the_graph_keeps_its_type(kind, keep):
    source = graph(*GIVEN[kind])
    done = check(source, "fp16", keep_io_types=keep)
    assert precisions(done)["made"] == "keep" and precisions(done)["product"] == "low"
    before = [one.type for one in (*source.graph.input, *source.graph.output) if one.type.HasField("sequence_type")]
    after = [one.type for one in (*done.model.graph.input, *done.model.graph.output)]
    assert before and all(one in after for one in before)


BORDERS = {
    "a Loop puts a product into a list that it carries": """
        three = Constant<value_int = 3>() e = SequenceEmpty<dtype = 1>()
        r = Loop(three, , e) <body = body (int64 i, bool go, seq(float[4, 4]) l) => (bool on, seq(float[4, 4]) m) {
            on = Identity(go)
            p = MatMul(x, w)
            [put] m = SequenceInsert(l, p)
        }>""",
    "an If puts a product into a list, or not, and reads another one that is outside": """
        a = MatMul(x, w)
        l = SequenceConstruct(a, a)
        r = If(go) <then_branch = then () => (seq(float[4, 4]) m) {
            p = SequenceAt(l, at)
            [put] m = SequenceInsert(l, p)
        }, else_branch = other () => (seq(float[4, 4]) n) {
            n = SequenceErase(l, at)
        }>""",
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("border", BORDERS)
def test_a_list_that_crosses_the_border_of_a_body_keeps_its_type(border, dtype):
    source = graph(BORDERS[border] + "[take] c = SequenceAt(r, at) [last] y = MatMul(c, w)", inputs=", bool go")
    done = check(source, dtype)
    result = precisions(done)
    assert result["put"] == result["take"] == "keep" and result["last"] == "low"
    feeds = {"x": X, "go": np.asarray(True)}
    assert verify(source, done.model, [feeds]).largest_error < (2e-3 if dtype == "fp16" else 2e-2)


def test_a_list_is_read_within_a_body():
    source = graph(
        """a = MatMul(x, w) [made] l = SequenceConstruct(a, a)
        y = If(go) <then_branch = then () => (float[4, 4] q) {
            [inner] p = SequenceAt(l, at)
            q = MatMul(p, w)
        }, else_branch = other () => (float[4, 4] o) {
            o = MatMul(a, w)
        }>""",
        inputs=", bool go",
    )
    done = check(source, "fp16")
    assert precisions(done)["made"] == precisions(done)["inner"] == "low"
    for go in (True, False):
        assert verify(source, done.model, [{"x": X, "go": np.asarray(go)}]).largest_error < 2e-3


@pytest.mark.parametrize("requested", ["fp32", "keep"])
def test_a_rule_for_one_node_of_a_list_holds_for_all(requested):
    rules = {"version": 1, "extends": "default", "rules": [{"match": {"node": "^drop$"}, "precision": requested}]}
    done = check(graph(PRODUCTS), "fp16", rules)
    planned = {one.name: one for one in done.plan.nodes}
    assert {planned[one].precision for one in ("put", "more", "drop", "take")} == {requested}
    assert "one list" in planned["put"].reason and "'drop'" in planned["put"].reason


@st.composite
def programs(draw):
    """A few lists that inputs, products and what was taken out of others are put into."""
    nodes, tensors, lists = [node("MatMul", ["x", "w"], ["t0"])], ["x", "t0"], []
    for step in range(draw(st.integers(3, 12))):
        kinds = ["product", "tanh", "relu", "empty", "construct", "split"]
        kinds += ["insert", "insert", "take", "take", "join"] if lists else []
        kind, result = draw(st.sampled_from(kinds)), f"v{step}"
        one = draw(st.sampled_from(tensors))
        source, size = draw(st.sampled_from(lists)) if lists else ("", 0)
        if kind == "product":
            nodes.append(node("MatMul", [one, "w"], [result]))
        elif kind in ("tanh", "relu"):
            nodes.append(node(kind.title(), [one], [result]))
        elif kind == "take" and size:
            nodes.append(node("SequenceAt", [source, "at"], [result]))
        elif kind == "join" and size:
            nodes.append(node("ConcatFromSequence", [source], [f"{result}_all"], axis=0))
            nodes.append(node("Slice", [f"{result}_all", "zero", "four"], [result]))
        elif kind == "empty":
            nodes.append(node("SequenceEmpty", [], [result], dtype=T.FLOAT))
            lists.append((result, 0))
            continue
        elif kind == "construct":
            nodes.append(node("SequenceConstruct", [one, draw(st.sampled_from(tensors))], [result]))
            lists.append((result, 2))
            continue
        elif kind == "split":
            nodes.append(node("Concat", [one, one], [f"{result}_all"], axis=0))
            nodes.append(node("SplitToSequence", [f"{result}_all", "four_"], [result], axis=0))
            lists.append((result, 2))
            continue
        else:
            nodes.append(
                node("SequenceInsert", [source, one], [result]) if source else node("Identity", [one], [result])
            )
            if source:
                lists.append((result, size + 1))
                continue
        tensors.append(result)
    returned = dict.fromkeys([*draw(st.lists(st.sampled_from(tensors[1:]), max_size=2)), tensors[-1]])
    data = [weight("w", 4, 4), AT, scalar("zero", [0], np.int64), scalar("four", [4], np.int64),
            scalar("four_", 4, np.int64)]  # fmt: skip
    nodes += [node("Identity", [name], [f"out_{name}"]) for name in returned]
    return model(nodes, [info("x", 4, 4)], [info(f"out_{name}", 4, 4) for name in returned], data, opset=18)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("rules", ["default", "tensorflow", "safe", "apex-o3"])
@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(source=programs())
def test_any_program_of_lists(rules, source):
    """It is valid, loads, casts no list, and is as near as 16-bit arithmetic is."""
    done = check(source, "fp16", rules)
    assert verify(source, done.model, [{"x": X}]).largest_error < 1e-2
    makers = ("SequenceInsert", "SequenceErase", "SequenceConstruct", "SplitToSequence")
    lists = {one.output[0] for one in source.graph.node if one.op_type in makers}
    assert lists.isdisjoint(cast.value for cast in done.plan.casts)
    converted = convert_onnx(source, rules=rules, dtype="bf16")
    assert all(kind == T.FLOAT for kind in held(converted.model))
