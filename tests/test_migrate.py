"""The blocks of docs/migrate.md that are ours run, in order; those of systems that are not installed are shown only."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "migrate.md"
TEXT = PAGE.read_text(encoding="utf-8")
HEAD, *SECTIONS = re.split(r"^## ", TEXT, flags=re.MULTILINE)


def blocks(text: str, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def case(section: str):
    """The Trainer takes seconds to import; `tests/forward/test_drop_in.py` runs it in the fast tests."""
    marks = [pytest.mark.slow] if "import transformers" in section else []
    return pytest.param(section, marks=marks, id=section.partition("\n")[0].replace(" ", "-"))


@pytest.mark.parametrize("section", map(case, SECTIONS))
def test_a_section_runs(section: str) -> None:
    if "import transformers" in section:
        pytest.importorskip("transformers", reason="the optional dependency of this section")
        pytest.importorskip("accelerate", reason="the optional dependency of this section")
    scope: dict[str, object] = {"__name__": "__main__"}
    ours = blocks(section)
    assert any("assert " in block for block in ours), "a section shows by itself that it works"
    for block in [*blocks(HEAD), *ours]:
        exec(compile(block, PAGE.name, "exec", dont_inherit=True), scope)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda text: text.partition("\n")[0].replace(" ", "-"))
def test_a_section_shows_both_sides(section: str) -> None:
    assert "There" in section and "Here" in section
    for block in blocks(section, "py"):
        compile(block, PAGE.name, "exec")
