"""Graph text: what is written is read back unchanged."""

import pytest
from graph_reading import parse_graph

from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.graph import Node, Operand, Pin, PrecisionGraph, Value, ValueKind
from amp_compiler.ir.graph_text import format_graph

TEXT = """graph cpu
input x: fp32[2, 8]
param w: fp32[8, 8] volatile
const "return": bf16[]
y = aten.linear(input=x, weight=w:fp16|fp32) {attr=1, eps=1e-05, shape=(2, (), "s"), no=none} -> fp32[2, 8]  \
module=fc1 type=Linear source="model.py:3" part=gelu pin=fp32 "because"
a, b = aten.split(self=y, hint="return":none) -> fp32[2, s0]~8, fp32[?]~8 volatile  name=split region=then
() = aten.check(self=a)  name=check
return a, "return"
"""


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


def test_comments_and_blank_lines_say_nothing() -> None:
    assert format_graph(parse_graph("# a\n\ngraph cpu\n  # b\nreturn\n")) == "graph cpu\nreturn\n"


@pytest.mark.parametrize("name", ["return", "input", "1e5", "é", 'q"', "two words", "x\u2028", "\n", ""])
def test_a_name_of_any_letters_is_read_back(name: str) -> None:
    graph = PrecisionGraph("cpu")
    graph.add_value(Value(name, DType.FLOAT32, (name, 2), 6, ValueKind.INPUT))
    node = Node(f"node {name}", name, (Operand(name, name),), ("made",), {name: name}, name, name, name, name)
    graph.add_node(node, [Value("made", DType.FLOAT16, None, 3)])
    back = parse_graph(format_graph(graph))
    assert (back.nodes, back.values) == (graph.nodes, graph.values)
