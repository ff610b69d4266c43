"""Which nodes compute sizes, indices and angles; where the analysis begins and ends is golden text of `classify`."""

from pathlib import Path

import pytest
from graph_reading import parse_graph

from amp_compiler.planner.numbers import find_numbers
from amp_compiler.policy.loader import load_rules

GOLDEN = Path(__file__).parents[1] / "golden" / "classify" / "where_sizes_and_angles_begin_and_end.txt"
BOTH = """graph onnx
input x: fp32[4, 8]
const c: fp32[]
a = onnx.Mul(A=x, B=c) -> fp32[4, 8]
i = onnx.Cast(input=a) -> i64[4, 8]  pin=cast "cast"
b = onnx.Mul(A=x, B=c) -> fp32[4, 8]
s = onnx.Sin(input=b) -> fp32[4, 8]
return
"""


def kept_and_widest(graph, **keep):
    """Names of the nodes that are kept, and of those that run in the widest type."""
    numbers = find_numbers(parse_graph(graph), load_rules({"version": 1, "extends": "default", "keep": keep}))
    return sorted(numbers.kept), sorted(numbers.widest)


def test_each_part_has_a_switch():
    assert kept_and_widest(BOTH, angles=False) == (["a"], [])
    assert kept_and_widest(BOTH, sizes=False) == (["b", "s"], [])
    graph = GOLDEN.read_text(encoding="utf-8").partition("--- graph\n")[2].partition("---\n")[0]
    kept, widest = kept_and_widest(graph)
    assert kept and widest and kept_and_widest(graph, sizes=False, angles=False) == ([], [])


@pytest.mark.parametrize(("kind", "little"), [("param", False), ("buffer", True)])
def test_a_narrow_layer_of_a_torch_model_makes_data(kind, little):
    """Its weight is learned; a buffer holds frequencies."""
    body = (
        f"graph cpu\ninput x: fp32[4, 2]\n{kind} w: fp32[8, 2]\nm = aten.linear(input=x, weight=w) -> fp32[4, 8]\n"
        "g = aten.gt(self=m) {other=0} -> bool[4, 8]\nreturn g\n"
    )
    numbers = find_numbers(parse_graph(body), load_rules("default"))
    assert ("m" in numbers.kept) is ("g" in numbers.kept) is little
