"""The drawing of a plan: what it shows, where its boxes stand, and what it leaves out."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from itertools import combinations, pairwise

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from page_plans import MIXED
from planning import plan_text

from amp_compiler.ir.plan import PlannedCast, PlannedNode, PrecisionPlan
from amp_compiler.report.drawing import Box, Drawing, draw_plan
from amp_compiler.report.flow import LARGEST, flow_of
from amp_compiler.report.layers import Line, layer_of, place, spine_of

HEIGHT = 26


def node(name: str, *inputs: str, op: str = "aten.relu", precision: str = "low", dtype: str = "bf16") -> PlannedNode:
    return PlannedNode(name, op, "elementwise", "", precision, "", "why", outputs=((name, dtype),), inputs=inputs)


def plan_of(*nodes: PlannedNode, casts: tuple[PlannedCast, ...] = (), outputs: tuple[str, ...] = ()) -> PrecisionPlan:
    return PrecisionPlan("bf16", "default", "cpu", nodes, casts, (("x", "bf16"),), outputs)


def boxes(drawing: Drawing, kind: str) -> list[Box]:
    return [box for box in drawing.boxes if box.kind == kind]


def middle(box: Box) -> int:
    return box.x + box.width // 2


def named(drawing: Drawing) -> dict[str, Box]:
    return {box.name: box for box in drawing.boxes if box.name}


def test_letters_as_wide_as_high_have_room() -> None:
    name = "输入的图像数据张量"
    plan = replace(plan_of(node("y", name)), inputs=((name, "bf16"),))
    assert boxes(draw_plan(plan), "input")[0].width > 12 * len(name)  # at 12 pixels


def test_casts_inputs_and_results_stand_between_makers_and_readers() -> None:
    flow, words = flow_of(plan_text(MIXED))
    labels = [(flow.labels[a], flow.labels[b]) for a, b in flow.graph.edges]
    assert not words
    assert sorted(labels) == [
        ("fp16 → fp32, 3.0 KiB", "returned"),
        ("fp16 → fp32, 3.0 KiB", "softmax"),
        ("fp32 → fp16, 3.0 KiB", "linear"),
        ("fp32 → fp16, 3.0 KiB", "matmul"),
        ("linear", "fp16 → fp32, 3.0 KiB"),
        ("linear", "matmul"),
        ("matmul", "fp16 → fp32, 3.0 KiB"),
        ("softmax", "fp32 → fp16, 3.0 KiB"),
        ("x", "fp32 → fp16, 3.0 KiB"),
    ]
    assert [cast.value for cast in flow.stored["node", "y"]] == ["w"]


def test_a_read_past_an_upcast_comes_from_the_value_itself() -> None:
    casts = (PlannedCast("y", "bf16", "bf16", 0, (("z", 0),)), PlannedCast("y", "bf16", "fp32", 48, explicit=True))
    up = node("up", "y", op="aten.to", precision="keep", dtype="fp32")
    flow, _ = flow_of(plan_of(node("y", "x"), up, node("z", "up"), casts=casts))
    assert list(flow.graph.edges(("node", "y"))) == [(("node", "y"), ("node", "up")), (("node", "y"), ("node", "z"))]
    assert not [vertex for vertex in flow.graph if vertex[0] == "cast"]


def test_boxes_say_what_they_are() -> None:
    drawing = draw_plan(plan_text(MIXED))
    found = named(drawing)
    assert {name: box.precision for name, box in found.items()} == {"y": "low", "s": "fp32", "z": "low"}
    assert found["y"].title.splitlines()[:2] == ["y = aten.linear", "module fc"]
    assert (found["y"].stored_count, found["s"].stored_count) == (1, 0)
    assert "cast w: fp32 → fp16, 384 B\nfor y[1]" in found["y"].stored
    assert [(box.label, box.precision) for box in boxes(drawing, "input")] == [("x", "fp32")]
    assert [(box.label, box.precision) for box in boxes(drawing, "output")] == [("returned", "fp32")]
    assert [bracket.name for bracket in drawing.brackets] == ["fc", "attn.soft", "attn"]
    assert {wire.title: wire.precision for wire in drawing.wires}["y: fp32"] == "fp32"


def test_a_chain_is_straight_and_so_are_the_additions_of_a_residual_net() -> None:
    chain = plan_of(*(node(f"n{i}", f"n{i - 1}" if i else "x") for i in range(9)), outputs=("n8",))
    assert len({middle(box) for box in draw_plan(chain).boxes}) == 1
    nodes, stream = [], "x"
    for i in range(5):
        nodes += [node(f"a{i}", stream, "mask"), node(f"b{i}", f"a{i}"), node(f"add{i}", stream, f"b{i}")]
        stream = f"add{i}"
    residual = replace(plan_of(*nodes, outputs=(stream,)), inputs=(("mask", "bool"), ("x", "bf16")))
    found = named(draw_plan(residual))
    assert max(middle(found[f"add{i}"]) for i in range(5)) - min(middle(found[f"add{i}"]) for i in range(5)) <= 1
    assert all(middle(found[f"b{i}"]) != middle(found["add0"]) for i in range(5))


@st.composite
def plans(draw: st.DrawFn) -> PrecisionPlan:
    """Random graphs: each node reads up to three of the values before it, some through casts; some are returned."""
    rng = random.Random(draw(st.integers(0, 10**6)))
    nodes, casts = [], []
    for index in range(draw(st.integers(1, 60))):
        known = ["x", *(one.name for one in nodes)]
        near = known[-rng.choice([2, 5, 60]) :]
        inputs = tuple(rng.choice(near) for _ in range(rng.randint(0, 3)))
        nodes.append(node(f"n{index}", *inputs, precision=rng.choice(["low", "fp32", "keep"])))
        if inputs and rng.random() < 0.4:
            casts.append(PlannedCast(inputs[0], "bf16", "fp32", index, ((f"n{index}", 0),)))
    outputs = tuple(one.name for one in nodes if rng.random() < 0.1)
    return plan_of(*nodes, casts=tuple(casts), outputs=outputs)


@settings(max_examples=60, deadline=None)
@given(plans())
def test_readers_stand_below_makers_and_no_two_boxes_overlap(plan: PrecisionPlan) -> None:
    flow, _ = flow_of(plan)
    drawing = draw_plan(plan)
    assert drawing == draw_plan(plan)
    drawn = [box for box in drawing.boxes if box.kind != "far"]
    assert len(drawn) == len(flow.graph)
    places = {(box.kind, box.title): box for box in drawn}
    for maker, reader in flow.graph.edges:
        upper, lower = (places[vertex[0], flow.titles[vertex]] for vertex in (maker, reader))
        assert upper.y + HEIGHT < lower.y
    rows: dict[int, list[Box]] = {}
    for box in drawing.boxes:
        rows.setdefault(box.y, []).append(box)
        assert box.x >= 0 and box.x + box.width <= drawing.width and 0 <= box.y <= drawing.height - HEIGHT
    assert all(a.x + a.width < b.x for row in rows.values() for a, b in pairwise(sorted(row, key=lambda box: box.x)))


@settings(max_examples=30, deadline=None)
@given(plans())
def test_every_wire_runs_from_its_maker_to_its_readers(plan: PrecisionPlan) -> None:
    """The steps of a wire, joined end to start, reach from one box to as many as read the value."""
    drawing = draw_plan(plan)
    tops = {(middle(box), box.y) for box in drawing.boxes}
    bottoms = {(middle(box), box.y + HEIGHT) for box in drawing.boxes}
    for wire in drawing.wires:
        steps: nx.DiGraph = nx.DiGraph()
        for x, y, rail, drop in re.findall(r"M(-?\d+) (-?\d+)(v26)?((?:v20|c[^M]*))", wire.path):
            start = (int(x), int(y) + (HEIGHT if rail else 0))
            shift = 0 if drop.startswith("v") else int(drop.split()[-2])
            if rail:
                steps.add_edge((int(x), int(y)), start)
            steps.add_edge(start, (start[0] + shift, start[1] + 20))
        starts = {place for place, degree in steps.in_degree() if degree == 0}
        ends = {place for place, degree in steps.out_degree() if degree == 0}
        assert starts and ends
        assert all(any(abs(x - a) <= 1 and y == b for a, b in bottoms) for x, y in starts)
        assert all(any(abs(x - a) <= 1 and y == b for a, b in tops) for x, y in ends)


def test_parts_that_are_not_joined_stand_side_by_side() -> None:
    drawing = draw_plan(plan_of(node("a", "x"), node("b", "a"), node("c"), node("d", "c"), node("e", "d")))
    found = named(drawing)
    assert found["c"].y == boxes(drawing, "input")[0].y
    assert found["c"].x != boxes(drawing, "input")[0].x


def test_what_comes_from_far_above_is_named_beside_its_reader() -> None:
    nodes = [node("first", "x"), node("n0", "first"), *(node(f"n{i}", f"n{i - 1}") for i in range(1, 80))]
    drawing = draw_plan(plan_of(*nodes, node("last", "n79", "first")))
    (far,) = boxes(drawing, "far")
    last = named(drawing)["last"]
    assert far.label == "first"
    assert far.y == last.y - 46


def test_of_a_large_graph_the_largest_casts_are_drawn() -> None:
    nodes = [node("n0", "x"), *(node(f"n{i}", f"n{i - 1}") for i in range(1, LARGEST + 1))]
    sizes = {i: (i * 37) % 1999 for i in range(1, LARGEST, 4)}
    casts = tuple(PlannedCast(f"n{i - 1}", "bf16", "fp32", size, ((f"n{i}", 0),)) for i, size in sizes.items())
    drawing = draw_plan(plan_of(*nodes, casts=casts))
    assert drawing.words == (
        "The graph has 2,001 nodes, too many to draw all. "
        "Drawn are the nodes at the ends of the 150 largest casts between nodes."
    )
    largest = sorted(sizes, key=lambda i: -sizes[i])[:150]
    assert set(named(drawing)) == {f"n{i - back}" for i in largest for back in (0, 1)}
    assert len(boxes(drawing, "cast")) == 150
    assert not boxes(drawing, "input")
    assert not draw_plan(plan_of(*nodes[:-1])).words


def test_a_drawing_that_cannot_be_says_why() -> None:
    large = plan_of(node("n0", "x"), *(node(f"n{i}", "n0") for i in range(1, LARGEST + 1)))
    assert draw_plan(large).words.endswith("No cast stands between two of them.")
    circle = plan_of(node("a", "b"), node("b", "a"))
    assert "in a circle" in draw_plan(circle).words
    old = plan_of(replace(node("a"), inputs=()))
    assert "does not say which node reads which" in draw_plan(old).words
    for plan in (large, circle, old):
        assert not draw_plan(plan).boxes


def test_sources_and_casts_stand_right_above_their_readers() -> None:
    graph: nx.DiGraph = nx.DiGraph([("a", "b"), ("b", "c"), ("late", "c"), ("early", "c")])
    assert layer_of(graph, {"late"}) == {"a": 0, "b": 1, "c": 2, "late": 1, "early": 0}


def test_the_spine_is_what_everything_passes() -> None:
    edges = [("x", "a"), ("a", "l"), ("a", "r"), ("l", "j"), ("r", "j"), ("m", "j"), ("m", "l")]
    diamond: nx.DiGraph = nx.DiGraph(edges)
    assert spine_of(diamond) == ["x", "a", "j"]
    assert spine_of(nx.DiGraph()) == []


def test_crossings_go_and_order_gives_room() -> None:
    """Three lines that cross one another in the first order come apart, and vertices keep their distance."""
    lines = [Line(0, 5), Line(1, 4), Line(2, 3)]
    middles = place([[0, 1, 2], [3, 4, 5]], [10.0] * 6, lines, set(), 4.0)
    for a, b in combinations(lines, 2):
        assert (middles[a.above] < middles[b.above]) == (middles[a.below] < middles[b.below])
    for layer in ([0, 1, 2], [3, 4, 5]):
        near = sorted(middles[vertex] for vertex in layer)
        assert all(b - a >= 14 - 1e-9 for a, b in pairwise(near))


@pytest.mark.parametrize("weight", [1, 3])
def test_the_spine_stands_at_zero_whatever_pulls(weight: int) -> None:
    lines = [Line(0, 2, weight), Line(1, 2, weight), Line(2, 3), Line(2, 4)]
    middles = place([[0, 1], [2], [3, 4]], [10.0] * 5, lines, {0, 2, 4}, 4.0)
    assert [abs(round(middles[vertex], 6)) for vertex in (0, 2, 4)] == [0, 0, 0]
    assert abs(middles[1]) >= 14 - 1e-6
