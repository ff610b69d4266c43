"""Graph text: what is written is read back unchanged."""

from __future__ import annotations

import math

from graph_reading import parse_graph
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.graph import PIN_PRECISIONS, Node, Operand, Pin, PrecisionGraph, Value, ValueKind
from amp_compiler.ir.graph_text import format_graph

TEXT = """graph cpu
input x: fp32[2, 8]
param w: fp32[8, 8] volatile
const "return": bf16[]
y = aten.linear(input=x, weight=w:fp16|fp32) {attr=1, eps=1e-05, shape=(2, (), "s"), no=none} -> fp32[2, 8]  \
module=fc1 type=Linear source="model.py:3" part=gelu pin=fp32 "because"
a, b = aten.split(self=y, hint="return":none) -> fp32[2, s0]~8, fp32[?]~8 volatile  name=split region=then \
phase=backward
() = aten.check(self=a)  name=check
return a, "return"
"""
NAMES = st.one_of(
    st.sampled_from(["a", "b", "x.1", "/lm/0", "return", "input", "1", "1e5", "é", 'q"', "x\u2028"]),
    st.text(max_size=4),
)
SOURCES = [kind for kind in ValueKind if kind is not ValueKind.RESULT]
ATTRS = st.recursive(
    st.one_of(st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=4), st.none()),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)


@st.composite
def values(draw: st.DrawFn, name: str, kind: ValueKind) -> Value:
    shape = draw(st.one_of(st.none(), st.lists(st.one_of(st.integers(0, 9), NAMES), max_size=3).map(tuple)))
    known = shape is not None and all(isinstance(dim, int) for dim in shape)
    numel = math.prod(shape) if known and draw(st.booleans()) else draw(st.integers(0, 99))
    return Value(name, draw(st.sampled_from(DType)), shape, numel, kind, draw(st.booleans()))


@st.composite
def graphs(draw: st.DrawFn) -> PrecisionGraph:
    graph = PrecisionGraph(draw(NAMES))
    names = iter(draw(st.lists(NAMES, min_size=1, max_size=10, unique=True)))
    for kind in draw(
        st.lists(st.sampled_from([kind for kind in ValueKind if kind is not ValueKind.RESULT]), max_size=3)
    ):
        if (name := next(names, None)) is not None:
            graph.add_value(draw(values(name, kind)))
    while (name := next(names, None)) is not None:
        types = st.one_of(st.none(), st.frozensets(st.sampled_from(DType), max_size=2))
        operands = st.builds(Operand, st.sampled_from(sorted(graph.values) or [""]), NAMES, types)
        made = [draw(values(name, ValueKind.RESULT))] if draw(st.booleans()) else []
        node = Node(
            draw(st.sampled_from([name, f"node {name}"])), draw(NAMES),
            tuple(draw(st.lists(operands, max_size=3))) if graph.values else (),
            tuple(value.name for value in made), draw(st.dictionaries(NAMES, ATTRS, max_size=2)),
            draw(NAMES), draw(NAMES), draw(NAMES), draw(NAMES), draw(st.sampled_from(["forward", "backward"])),
            draw(st.one_of(st.none(), st.builds(Pin, st.sampled_from(PIN_PRECISIONS), st.text(max_size=5)))),
        )  # fmt: skip
        graph.add_node(node, made)
    if graph.values:
        graph.outputs = draw(st.lists(st.sampled_from(sorted(graph.values)), max_size=3))
    return graph


def test_hand_written_text_is_its_own_round_trip() -> None:
    assert format_graph(parse_graph(TEXT)) == TEXT


def test_hand_written_text_says_what_it_seems_to() -> None:
    graph = parse_graph(TEXT)
    node = graph.nodes["y"]
    assert node.attrs == {"attr": 1, "eps": 1e-5, "shape": (2, (), "s"), "no": None}
    assert (node.module, node.module_type, node.source) == ("fc1", "Linear", "model.py:3")
    assert node.pin == Pin("fp32", "because")
    assert node.inputs[1].allowed == {DType.FLOAT16, DType.FLOAT32}
    assert graph.nodes["split"].inputs[1] == Operand("return", "hint", frozenset())
    assert graph.values["a"].shape == (2, "s0") and graph.values["a"].numel == 8
    assert graph.values["b"].shape is None and graph.values["b"].volatile
    assert graph.outputs == ["a", "return"]


@settings(max_examples=150, deadline=None)
@given(graphs())
def test_round_trip(graph: PrecisionGraph) -> None:
    text = format_graph(graph)
    back = parse_graph(text)
    assert back.device == graph.device
    assert back.nodes == graph.nodes
    assert list(back.nodes) == list(graph.nodes)
    assert back.values == graph.values
    assert back.outputs == graph.outputs
    assert format_graph(back) == text


def test_comments_and_blank_lines_say_nothing() -> None:
    assert format_graph(parse_graph("# a\n\ngraph cpu\n  # b\nreturn\n")) == "graph cpu\nreturn\n"
