"""The README does what it says: its tables are those of the results, its examples and commands run and print that.

`AMP_REGENERATE=1 pytest tests/test_readme.py` writes what the first example prints anew: read the diff and keep it.
"""

import os
import re
import runpy
import sys
from pathlib import Path

import pytest

import amp_compiler as amp
from amp_compiler.cli import main as cli

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


def test_tables_are_current():
    readme = runpy.run_path(str(ROOT / "benchmarks" / "readme.py"))
    for path in readme["FILES"]:
        text = path.read_text(encoding="utf-8")
        assert readme["render"](text) == text


@pytest.mark.compiles
def test_python_examples_run_in_order_and_print_what_stands_there(capsys):
    scope: dict[str, object] = {}
    first, *others = blocks("python")
    exec(first, scope)
    printed = capsys.readouterr().out
    if os.environ.get("AMP_REGENERATE"):
        new = re.sub(r"```text\n.*?```", lambda _: f"```text\n{printed}```", TEXT, count=1, flags=re.DOTALL)
        README.write_text(new, encoding="utf-8")
        return
    assert [printed] == blocks("text")
    for block in others:
        exec(block, scope)
    assert isinstance(scope["fast"], amp.CompiledModule)


def test_it_is_short():
    assert len(TEXT.splitlines()) <= 120


@pytest.mark.parametrize("line", re.findall(r"^amp-compiler (.*)$", TEXT, flags=re.MULTILINE))
def test_commands_run(line, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["amp-compiler", *line.split()])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code, capsys.readouterr().err
