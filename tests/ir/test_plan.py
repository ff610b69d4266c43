"""`PrecisionPlan`: text, JSON, difference, equality."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from amp_compiler.errors import AmpError
from amp_compiler.ir.plan import PlannedCast, PlannedNode, PrecisionPlan
from amp_compiler.report.table import summary_line

NODE = PlannedNode(
    "y",
    "aten.linear",
    "matmul",
    "fc",
    "low",
    "default.yaml:4",
    "tensor cores",
    "low",
    "model.py:3",
    (("y", "fp16"),),
    inputs=("x", "w"),
)
CASTS = (
    PlannedCast("x", "fp32", "fp16", 96, (("y", 0), ("return", 1))),
    PlannedCast("h", "fp16", "fp32", 12, explicit=True),
    PlannedCast("h", "fp16", "fp16", 0, (("z", 0),)),
)
PLAN = PrecisionPlan(
    "fp16",
    "default",
    "cpu",
    (NODE, replace(NODE, name="é", precision="fp32", outputs=())),
    CASTS,
    (("x", "fp32"),),
    ("y", "x"),
)


def test_sums() -> None:
    assert (PLAN.cast_bytes, PLAN.cast_count, PLAN.low_nodes) == (108, 2, 1)
    assert (PLAN.to_dict()["cast_bytes"], PLAN.to_dict()["cast_count"]) == (108, 2) and "2 casts" in repr(PLAN)
    one = PrecisionPlan("fp16", "default", "cpu", PLAN.nodes[:1], PLAN.casts[:1])
    assert repr(one).endswith("1 node, 1 cast)")
    assert summary_line(one).endswith("1 node (1 fp16) · 1 cast, 96 B a forward")


def test_json_round_trip(tmp_path: Path) -> None:
    text = PLAN.to_json(tmp_path / "plan.json")
    assert (tmp_path / "plan.json").read_text(encoding="utf-8") == text == PLAN.to_json()
    assert PrecisionPlan.from_dict(json.loads(text)) == PLAN


def test_plans_written_before_reads_were_kept_are_read_back() -> None:
    data = PLAN.to_dict()
    for part in (data, *data["nodes"]):
        del part["inputs"]
    del data["outputs"]
    plan = PrecisionPlan.from_dict(data)
    assert plan == replace(PLAN, nodes=tuple(replace(node, inputs=()) for node in PLAN.nodes), inputs=(), outputs=())


def test_text_tells_kinds_of_casts_apart() -> None:
    assert str(PLAN) == PLAN.to_text()
    assert PLAN.to_text().splitlines() == [
        "plan dtype=fp16 rules=default device=cpu cast_bytes=108",
        "fp16 y = aten.linear -> fp16  module=fc  rule=default.yaml:4  (tensor cores)",
        "fp32 é = aten.linear ->   module=fc  rule=default.yaml:4  (tensor cores)",
        "cast x: fp32 -> fp16, 96 bytes, for y[0], return[1]",
        "model's own cast h: fp16 -> fp32, 12 bytes",
        "read h (fp16) itself, for z[0]",
    ]


def test_equality_and_difference() -> None:
    assert replace(PLAN, nodes=(*PLAN.nodes,)) == PLAN
    assert PLAN.diff(PLAN) == ""
    other = replace(PLAN, casts=CASTS[1:])
    assert other != PLAN
    changed = [line for line in PLAN.diff(other).splitlines() if line[0] in "+-" and line[1] not in "+-"]
    assert "-cast x: fp32 -> fp16, 96 bytes, for y[0], return[1]" in changed
    assert len(changed) == 3  # the cast, and the sum in the head, before and after


@pytest.mark.parametrize(
    "data", [[1], {}, {"version": 0}, {"version": 1, "nodes": []}, {**PLAN.to_dict(), "nodes": [{}]}]
)
def test_what_is_no_plan_is_refused(data: Any) -> None:
    with pytest.raises(AmpError, match=r"make it again with amp\.explain"):
        PrecisionPlan.from_dict(data)
