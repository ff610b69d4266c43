"""A plan as a notebook shows it: short, valid and safe HTML."""

from dataclasses import replace
from html import unescape

import pytest
from page_plans import transformer
from test_page import HOSTILE, Page, hostile_plan

from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.report.html import MOST_CASTS, MOST_NODES


def test_nodes_and_casts_stand_in_tables():
    plan = transformer(13)
    text = plan._repr_html_()
    cells = Page(text).cells
    for node in plan.nodes:
        at = cells.index(node.name)
        assert cells[at + 1 : at + 3] == [node.op, node.module]
        assert cells[at + 3].partition(" (")[0] == node.precision.replace("low", "bf16")
    for cast in plan.casts:
        assert ", ".join(f"{name}[{index}]" for name, index in cast.users) in cells
    assert "13 nodes (8 bf16, 5 fp32)" in unescape(text)
    assert "the first" not in text and "the largest" not in text


def test_what_the_model_says_is_text_alone():
    plan = hostile_plan()
    text = plan._repr_html_()
    read = Page(text)
    assert HOSTILE not in text and "<script" not in text
    assert set(read.tags) <= {"div", "p", "b", "code", "table", "caption", "thead", "tbody", "tr", "th", "td"}
    assert any("<script>" in cell for cell in read.cells)  # to be read, as it is called


@pytest.mark.parametrize("length", [1, 10_000])
def test_of_a_large_plan_a_part_is_shown(length):
    plan = transformer(10_000)
    nodes = [replace(node, name=node.name + "&" * length, reason="x" * length) for node in plan.nodes]
    casts = [replace(cast, users=cast.users * length) for cast in plan.casts[:50]]
    text = replace(plan, nodes=tuple(nodes), casts=(*casts, *plan.casts[50:]), rules="r" * length)._repr_html_()
    read = Page(text)
    assert len(text) < 100_000
    assert read.tags.count("tr") == 2 + MOST_NODES + MOST_CASTS
    assert f"the first {MOST_NODES} of 10,000 nodes" in text
    assert f"the largest {MOST_CASTS} of {len(plan.casts):,} casts" in text


def test_the_largest_casts_are_shown():
    plan = transformer(1000)
    largest = replace(plan.casts[-1], value="largest", bytes=10**9)
    assert "largest" in Page(replace(plan, casts=(*plan.casts, largest))._repr_html_()).cells


def test_an_empty_plan_has_no_tables_and_text_stays_text():
    plan = PrecisionPlan("bf16", "default", "cpu", (), ())
    assert "table" not in Page(plan._repr_html_()).tags
    assert str(plan) == plan.to_text() and repr(plan).startswith("PrecisionPlan(")
