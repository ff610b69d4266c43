"""A plan as one SVG picture."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest
from planning import plan_text
from test_drawing import node, plan_of
from test_page import HOSTILE, MIXED, PARTS, hostile_plan

from amp_compiler.errors import AmpError
from amp_compiler.report.svg import COLOURS, plan_svg

TAG = "{http://www.w3.org/2000/svg}"


def test_every_node_stands_there_once_and_every_cast_with_its_bytes(tmp_path):
    plan = plan_text(MIXED)
    plan.to_svg(tmp_path / "plan.svg")
    root = ET.parse(tmp_path / "plan.svg").getroot()
    assert sorted(box.get("data-name") for box in root.iter(f"{TAG}g") if box.get("data-name")) == ["s", "y", "z"]
    words = [text.text for text in root.iter(f"{TAG}text")]
    between = [cast for cast in plan.casts if cast.value != "w"]  # casts of weights are a number in the box
    assert sum("3.0 KiB" in one for one in words) == len(between)
    assert words.count("1") == 1
    titles = [title.text or "" for title in root.iter(f"{TAG}title")]
    assert any(title.startswith("y = aten.linear") for title in titles)


def test_the_same_picture_each_time():
    assert plan_svg(plan_text(MIXED)) == plan_svg(plan_text(MIXED))


def test_names_are_only_ever_text_and_letters_that_xml_has_not_are_replaced():
    plan = hostile_plan()
    plan = replace(plan, nodes=(replace(plan.nodes[0], name="a\x00b"),), casts=())
    text = plan_svg(plan)
    assert HOSTILE not in text
    root = ET.fromstring(text)
    assert [box.get("data-name") for box in root.iter(f"{TAG}g") if box.get("data-name")] == ["a\ufffdb"]


def test_a_large_plan_says_what_is_not_drawn_and_nothing_to_draw_is_an_error():
    large = plan_of(*(node(f"n{i}", f"n{i - 1}" if i else "x") for i in range(2001)))
    with pytest.raises(AmpError, match="too many to draw all"):
        plan_svg(large)
    with pytest.raises(AmpError, match="does not say which node reads which"):
        plan_svg(plan_of(node("a")))


def test_the_colours_are_those_of_the_page():
    style = (PARTS / "page.css").read_text(encoding="utf-8")
    for kind, (line, fill) in COLOURS.items():
        assert f"--{kind}: {line};" in style
        assert f"--{kind}-fill: {fill};" in style
