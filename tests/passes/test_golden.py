"""Golden text of the neutral passes: `tests/golden/<pass>/*.txt`, what goes in and what comes out.

For `classify`: rules, a graph, and the decisions. For ONNX_PLAN: a graph, perhaps ranges or the target with its opset,
and the graph. For the others: a graph, perhaps decisions, and the outcome. Decisions come from the small table in
`planning.py`; lines `node: precision` after `--- decisions` override them.
`AMP_REGENERATE=1 pytest tests/test_golden.py` writes the expected part anew: read the diff before you keep it.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest
from graph_reading import parse_graph
from planning import FP16, draft_of, finish
from ruamel.yaml import YAML

from amp_compiler.ir.facts import Magnitudes
from amp_compiler.passes import PASSES, find_pass
from amp_compiler.passes.pipeline import ONNX_PLAN
from amp_compiler.passes.plan.assign_precision import AssignPrecision
from amp_compiler.passes.plan.classify import Classify
from amp_compiler.passes.plan.make_plan import plan_of
from amp_compiler.planner.draft import Draft
from amp_compiler.policy.loader import load_rules
from amp_compiler.policy.rules import Context
from amp_compiler.policy.targets import load_target

GOLDEN = Path(__file__).parents[1] / "golden"
MARK, DECISIONS, GRAPH, RANGES = "---\n", "--- decisions\n", "--- graph\n", "--- ranges\n"
TARGET = "--- target\n"


def classify(text: str, _: dict[str, str]) -> str:
    rules, _, graph = text.partition(GRAPH)
    draft = Draft(parse_graph(graph), load_rules(YAML(typ="safe").load(rules)), Context(FP16))
    decisions = Classify()(draft).subject.decisions
    return "".join(
        f"{name}: {decision.precision.value}"
        + (f" math={decision.math.short}" if decision.math else "")
        + (f"  by {decision.rule}" if decision.rule else "")
        + f"  ({decision.reason})\n"
        for name, decision in decisions.items()
    )


def assign(graph: str, decisions: dict[str, str]) -> str:
    draft = AssignPrecision()(draft_of(graph, decisions)).subject
    notes = ((name, label, draft.notes.get(name)) for name, label in draft.labels.items())
    return "".join(f"{label:<5}{name}" + (f"  ({note})\n" if note else "\n") for name, label, note in notes)


def place(graph: str, decisions: dict[str, str]) -> str:
    lines = plan_of(finish(draft_of(graph, decisions))).to_text().splitlines(keepends=True)
    return "".join(line for line in lines if line.startswith(("cast ", "read ", "model's own cast "))) or "no casts\n"


def pin(name: str, text: str, _: dict[str, str]) -> str:
    """The graph behind a pass of ONNX_PLAN, for FP16 and the preset `default`; magnitudes stand behind the graph."""
    text, _, target = text.partition(TARGET)
    graph, _, lines = text.partition(RANGES)
    rows = (line.split(": ") for line in lines.splitlines())
    ranges = {key: Magnitudes(*map(float, numbers.split())) for key, numbers in rows}
    draft = Draft(parse_graph(graph), load_rules("default"), Context(FP16, "onnx"), ranges=ranges)
    assert draft.to_text() == graph, "the text does not read back as itself"
    options: dict[str, Any] = {}
    if target:
        provider, opset = target.split()
        options = {"target": load_target(provider), "versions": dict.fromkeys(draft.graph.nodes, int(opset))}
    cls = find_pass(name)
    run = cls(**{key: value for key, value in options.items() if key in cls.__dataclass_fields__})
    found = run(draft).subject
    again = run(found)
    assert not again.modified and again.subject is found
    return found.to_text()


RUNNERS = {
    "classify": classify,
    "assign_precision": assign,
    "place_casts": place,
    **{name: functools.partial(pin, name) for name in ONNX_PLAN.names},
}
FILES = [path for name in RUNNERS for path in sorted((GOLDEN / name).glob("*.txt"))]


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_golden(path: Path) -> None:
    given, _, expected = path.read_text(encoding="utf-8").rpartition(MARK)
    graph, _, lines = given.partition(DECISIONS)
    decisions = dict(line.split(": ") for line in lines.splitlines() if line)
    found = RUNNERS[path.parent.name](graph, decisions)
    if os.environ.get("AMP_REGENERATE"):
        path.write_text(given + MARK + found, encoding="utf-8")
        return
    assert found == expected


@pytest.mark.parametrize("name", ONNX_PLAN.names)
def test_a_pass_that_pins_has_a_case_that_changes_and_one_that_is_left_alone(name: str) -> None:
    texts = [path.read_text(encoding="utf-8").rpartition(MARK) for path in FILES if path.parent.name == name]
    graphs = [(given.partition(TARGET)[0].partition(RANGES)[0], expected) for given, _, expected in texts]
    assert {given != expected for given, expected in graphs} == {True, False}


def test_every_pass_with_golden_files_has_a_runner() -> None:
    assert FILES
    assert {path.parent.name for path in FILES} == set(RUNNERS)
    assert {folder.name for folder in GOLDEN.iterdir()} == set(PASSES)  # those on FX: test_golden_fx.py
