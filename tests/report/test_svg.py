"""A plan as one SVG picture: what it shows, and that its lines run from makers to readers."""

import random
import re
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from page_plans import random_plan
from planning import plan_text
from test_page import HOSTILE, MIXED, PARTS, hostile_plan

from amp_compiler.errors import AmpError
from amp_compiler.ir.plan import PlannedCast, PlannedNode, PrecisionPlan
from amp_compiler.report.svg import plan_svg

TAG = "{http://www.w3.org/2000/svg}"
ROW = 24


def node(name: str, *inputs: str, precision: str = "low", dtype: str = "bf16") -> PlannedNode:
    return PlannedNode(
        name, "aten.relu", "elementwise", "", precision, "", "why", outputs=((name, dtype),), inputs=inputs
    )


def plan_of(*nodes: PlannedNode, casts: tuple[PlannedCast, ...] = (), outputs: tuple[str, ...] = ()) -> PrecisionPlan:
    return PrecisionPlan("bf16", "default", "cpu", nodes, casts, (("x", "bf16"),), outputs)


def rows_of(root: ET.Element) -> list[tuple[str, str]]:
    """The kind of each line, and what is written in it."""
    groups = [group for group in root.iter(f"{TAG}g") if group.get("class")]
    assert [group.get("transform") for group in groups] == [f"translate(0 {ROW * at})" for at in range(len(groups))]
    return [(group.get("class"), group.findall(f"{TAG}text")[1].text) for group in groups]


def wires_of(root: ET.Element) -> list[tuple[int, list[int], int | None]]:
    """Of each value the line of its maker, those of its readers, and the lane; `None` for one to the next line."""
    result = []
    for path in root.iter(f"{TAG}path"):
        if direct := re.match(r"M14 (\d+)v6m", path.get("d")):
            result.append((int(direct[1]) // ROW, [int(direct[1]) // ROW + 1], None))
            continue
        out, x, top, bottom = map(int, re.match(r"M0 (\d+)H(-\d+)M-\d+ (\d+)V(\d+)", path.get("d")).groups())
        readers = [int(y) for y in re.findall(rf"M{x} (\d+)H0", path.get("d"))]
        assert (top, bottom) == (min(out, *readers), max(out, *readers))
        result.append((out // ROW, [y // ROW for y in readers], x))
    return result


def test_every_node_stands_there_once_and_every_cast_with_its_bytes(tmp_path):
    plan = plan_text(MIXED)
    plan.to_svg(tmp_path / "plan.svg")
    rows = rows_of(ET.parse(tmp_path / "plan.svg").getroot())
    assert [(kind, *text.split()[:2]) for kind, text in rows] == [
        ("fp32", "input", "x"), ("cast", "cast", "x"), ("low", "linear", "y"), ("cast", "cast", "y"),
        ("fp32", "softmax", "s"), ("cast", "cast", "s"), ("low", "matmul", "z"), ("cast", "cast", "z"),
        ("keep", "returned", "z"),
    ]  # fmt: skip
    assert all(text.endswith("3.0 KiB") for kind, text in rows if kind == "cast")
    assert rows[2][1].split()[2:] == ["fc", "+", "casts", "of", "weights,", "384", "B"]


def test_names_are_only_ever_text_and_letters_that_xml_has_not_are_replaced():
    plan = hostile_plan()
    plan = replace(plan, nodes=(replace(plan.nodes[0], name="a\x00b", precision=HOSTILE),), casts=())
    text = plan_svg(plan)
    assert HOSTILE not in text
    root = ET.fromstring(text)
    assert [box.get("data-node") for box in root.iter(f"{TAG}g") if box.get("data-node")] == ["a\ufffdb"]


def test_a_long_name_is_cut_and_letters_as_wide_as_high_have_room():
    name = "输入的图像数据张量" * 3
    root = ET.fromstring(plan_svg(replace(plan_of(node("y", name)), inputs=((name, "bf16"),))))
    assert rows_of(root)[0][1].endswith(name)
    assert int(root.get("width")) > 12 * len(name)  # at 12 pixels
    assert int(ET.fromstring(plan_svg(plan_of(node("y" * 10**5, "x")))).get("width")) < 1000


def test_no_nodes_are_an_error_and_a_plan_that_does_not_say_who_reads_whom_has_no_lines():
    with pytest.raises(AmpError, match="no nodes to draw"):
        plan_svg(plan_of())
    assert wires_of(ET.fromstring(plan_svg(plan_of(node("a"), node("b"))))) == []


def test_a_read_past_an_upcast_comes_from_the_value_itself():
    casts = (PlannedCast("y", "bf16", "bf16", 0, (("z", 0),)), PlannedCast("y", "bf16", "fp32", 48, explicit=True))
    up = node("up", "y", precision="keep", dtype="fp32")
    root = ET.fromstring(plan_svg(plan_of(node("y", "x"), up, node("z", "up"), casts=casts)))
    assert [text.split()[1] for _, text in rows_of(root)] == ["x", "y", "up", "z"]
    assert wires_of(root) == [(0, [1], None), (1, [2, 3], -14)]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 60))
def test_lines_run_from_makers_to_readers_and_no_two_lie_on_another(seed: int, nodes: int) -> None:
    plan = random_plan(random.Random(seed), nodes)
    root = ET.fromstring(plan_svg(plan))
    rows = [(kind, *text.split()[:2]) for kind, text in rows_of(root)]
    at = {name: place for place, (_, op, name) in enumerate(rows) if op not in ("cast", "returned")}
    own = {cast.users[0]: cast for cast in plan.casts}
    wanted = set()
    for one in plan.nodes:
        for place, value in enumerate(one.inputs):
            if (one.name, place) not in own:
                wanted.add((at[value], at[one.name]))
                continue
            cast = at[one.name] - 1  # each has one reader, and stands right before it
            assert rows[cast] == ("cast", "cast", value)
            wanted |= {(at[value], cast), (cast, at[one.name])}
    results = [row for row, (_, op, _) in enumerate(rows) if op == "returned"]
    wanted |= {(at[value], row) for value, row in zip(plan.outputs, results, strict=True)}
    wires = wires_of(root)
    assert sorted((maker, reader) for maker, readers, _ in wires for reader in readers) == sorted(wanted)
    lanes: dict[int, list[tuple[int, int]]] = {}
    for maker, readers, lane in wires:
        if lane is not None:
            lanes.setdefault(lane, []).append((min(maker, *readers), max(maker, *readers)))
    for spans in lanes.values():
        spans.sort()
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_the_colours_are_those_of_the_page():
    style = (PARTS / "page.css").read_text(encoding="utf-8")
    drawn = re.findall(r"\.(low|fp32|keep|cast) rect \{ fill: (#\w+); stroke: (#\w+); \}", plan_svg(plan_text(MIXED)))
    assert [kind for kind, _, _ in drawn] == ["low", "fp32", "keep", "cast"] * 2  # on a light ground, and on a dark one
    for kind, fill, line in drawn:
        assert f"--{kind}: {line}; --{kind}-fill: {fill};" in style
