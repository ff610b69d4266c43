"""The blocks of docs/migrate.md run, in order; those of systems that are not installed are quotations, and say so.

A file of another system gives the rules that stand behind it, to the letter, and what runs behind those reads them.
"""

import re
from pathlib import Path

import pytest

from amp_compiler.policy.importing.files import import_file
from amp_compiler.policy.loader import load_rules

PAGE = Path(__file__).parent.parent / "docs" / "migrate.md"
TEXT = PAGE.read_text(encoding="utf-8")
HEAD, *SECTIONS = re.split(r"^## ", TEXT, flags=re.MULTILINE)
SOURCES = {"prototxt": ("net.prototxt", "net.yaml"), "json": ("ds_config.json", "ds.yaml")}


def blocks(text: str) -> list[tuple[str, str]]:
    """Language and text of each."""
    return re.findall(r"^```(\w+)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def title(section: str) -> str:
    return section.partition("\n")[0].replace(" ", "-")


def case(section: str):
    """The Trainer takes seconds to import; `tests/forward/test_drop_in.py` runs it in the fast tests."""
    marks = [pytest.mark.slow] if "import transformers" in section else []
    return pytest.param(section, marks=marks, id=title(section))


@pytest.mark.parametrize("section", map(case, SECTIONS))
def test_a_section_runs(section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "import transformers" in section:
        pytest.importorskip("transformers", reason="the optional dependency of this section")
        pytest.importorskip("accelerate", reason="the optional dependency of this section")
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {"__name__": "__main__"}
    assert any(language == "python" and "assert " in text for language, text in blocks(section)), (
        "a section shows by itself that it works"
    )
    source = target = Path()
    for language, text in [*blocks(HEAD), *blocks(section)]:
        if language == "python":
            exec(compile(text, PAGE.name, "exec", dont_inherit=True), scope)
        elif language in SOURCES:
            source, target = map(Path, SOURCES[language])
            source.write_text(text, encoding="utf-8")
        elif language == "yaml":
            assert import_file(source).to_text() == text, "write the page's YAML anew"
            target.write_text(text, encoding="utf-8")
            assert load_rules(str(target))


@pytest.mark.parametrize("section", SECTIONS, ids=title)
def test_a_section_shows_both_sides(section: str) -> None:
    assert "There" in section and "Here" in section
    assert section.count("```py\n") == section.count("a quotation that is not run")


def test_the_files_of_both_systems_are_read() -> None:
    languages = [language for language, _ in blocks(TEXT)]
    assert sorted(SOURCES) == sorted(language for language in languages if language in SOURCES)
    assert languages.count("yaml") == len(SOURCES)
