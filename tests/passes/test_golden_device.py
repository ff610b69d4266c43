"""Golden text of the passes of `passes/device`: a graph in our own text form, `---`, and the graph behind the pass.

`AMP_REGENERATE=1 pytest tests/passes/test_golden_device.py` writes what stands behind `---` anew: read the diff.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from amp_compiler.fx.text import format_fx, parse_fx
from amp_compiler.ops.cpu import update as cpu_update
from amp_compiler.passes import find_pass

GOLDEN = Path(__file__).parents[1] / "golden"
PASSES = ("channels_last", "two_matrices", "native_ops")
CASES = [path for name in PASSES for path in sorted((GOLDEN / name).glob("*.txt"))]


@pytest.fixture(autouse=True)
def any_processor(monkeypatch):
    """What is replaced depends on the machine; the text does not."""
    monkeypatch.setattr(cpu_update, "most_inner", lambda: 512)


@pytest.mark.parametrize("path", CASES, ids=[f"{path.parent.name}/{path.stem}" for path in CASES])
def test_text_before_and_after(path):
    before, _, after = path.read_text(encoding="utf-8").partition("---\n")
    graph_module = parse_fx(before)
    given = format_fx(graph_module)
    result = find_pass(path.parent.name)()(graph_module)
    made = format_fx(result.subject)
    if os.environ.get("AMP_REGENERATE"):
        comments = "".join(f"{line}\n" for line in before.splitlines() if line.startswith("#"))
        path.write_text(f"{comments}{given}---\n{made}", encoding="utf-8")
        after = made
    assert made == after
    assert result.modified == (made != given)
    assert result.modified != path.stem.endswith("left_alone")
    again = find_pass(path.parent.name)()(result.subject)
    assert not again.modified and format_fx(again.subject) == made


def test_every_pass_has_a_case_that_it_changes_and_one_that_it_leaves_alone():
    for name in PASSES:
        left = [path.stem.endswith("left_alone") for path in CASES if path.parent.name == name]
        assert len(set(left)) == 2
