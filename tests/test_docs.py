"""What of the docs is made from the code is current, and links lead somewhere."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import amp_compiler as amp

ROOT = Path(__file__).parent.parent
TOOLS = ROOT / "docs" / "tools"
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / one / "README.md" for one in ("passes", "rules"))]
)


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    names = {path.stem for path in TOOLS.glob("*.py")}
    yield __import__("generate")
    for name in names & set(sys.modules):
        del sys.modules[name]


def test_what_is_made_from_the_code_is_current(generate) -> None:
    for path, make in generate.FILES.items():
        assert path.read_text(encoding="utf-8") == make(), f"{path.relative_to(ROOT)} is not current: run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```|<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        assert "://" in target or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_that_are_named_exist(page: Path) -> None:
    """A path in backticks is one from the root, or one inside the package."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"`([\w./-]+/[\w.-]*\.(?:py|yaml|md|cpp|h|json|txt))`", text):
        places = (ROOT / target, ROOT / "amp_compiler" / target, page.parent / target)
        assert any(place.exists() for place in places), target


def test_every_public_name_is_in_the_reference() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    places = {"pipelines": "passes.pipeline", "callbacks": "diagnose.callbacks"}  # the module itself
    missing = [name for name in amp.__all__ if f"::: amp_compiler.{places.get(name, name)}\n" not in text + "\n"]
    assert not missing


def test_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL))
    exec(compile(code, "tutorial.md", "exec", dont_inherit=True), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert "as one graph" in printed and "1 of 3 nodes that round stay in FP32" in printed


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r": (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} <= listed
