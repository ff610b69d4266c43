"""The words of the field stand in code, messages and docs, not those that the project once had for the same things."""

import ast
import doctest
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = [ROOT / room for room in ("amp_compiler", "passes", "rules", "examples", "benchmarks", "docs", "tools")]
SUFFIXES = {".py", ".md", ".yaml", ".cpp", ".h", ".js", ".css", ".html"}
LONE = [ROOT / name for name in ("Makefile", "mkdocs.yml", "pyproject.toml", "tests/long_tests.txt")]

# Names of variables, parameters and functions: a word, and what says what the thing is.
NAMES = {
    "told": "message",
    "asked": "requested",
    "given": "args, options, text: what it is",
    "made": "result",
    "found": "matches, result",
    "lows": "low_weights",
    "Standing": "ChangeDetector",
    "Together": "RankCoordinator",
    "Offer": "RankState",
}
# In code, comments, messages and docs: a pattern, and what stands there instead.
TEXTS = {
    r"(?<![A-Za-z])mend(s|ed|ing)?(?![a-z])": "hint, fix",
    r"(?<![A-Za-z])(?<!usage_)[pP]ieces?(?![a-z])": "subgraph, graph break",  # one is a name of click's
    r"\bcapture[sd]? ((it|them|one) )?(again|anew)\b": "recompiled",
    r"`(Standing|Together|Offer)`|(?<![A-Za-z])lows(?![a-z])": "ChangeDetector, RankCoordinator, low_weights",
    r"\bnumbers that are no data\b": "sizes, indices, positions, angles",
    r"\b[lL]ess than 1 is better\b": "lower is better",
}


def files(*suffixes: str) -> list[Path]:
    paths = (path for room in SOURCES for path in room.rglob("*") if path.suffix in suffixes)
    return sorted(path for path in paths if "page_libraries" not in path.parts and "vendor" not in path.parts)


def names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Every name that a file binds or reads, the fields of classes among them, but for methods and `given` of tests."""
    methods = {id(one) for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for one in node.body}
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    drawn = {one.name for node in imports if node.module == "hypothesis" for one in node.names}
    for node in ast.walk(tree):
        if id(node) in methods or (isinstance(node, ast.Name) and node.id in drawn):
            continue
        if isinstance(node, ast.Name):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute):
            yield node.attr, node.lineno
        elif isinstance(node, ast.arg | ast.keyword):
            yield node.arg or "", node.lineno
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node.lineno


@pytest.mark.parametrize("room", [*SOURCES, ROOT / "tests"], ids=lambda room: room.name)
def test_names_say_what_a_thing_is(room: Path) -> None:
    wrong = {
        f"{path.relative_to(ROOT)}:{line}: {name}, say {NAMES[name]}"
        for path in sorted(room.rglob("*.py"))
        for name, line in names(ast.parse(path.read_text(encoding="utf-8")))
        if name in NAMES
    }
    assert not wrong


@pytest.mark.parametrize(("pattern", "instead"), TEXTS.items(), ids=TEXTS.values())
def test_texts_use_the_words_of_the_field(pattern: str, instead: str) -> None:
    tests = [path for path in sorted((ROOT / "tests").rglob("*.py")) if path != Path(__file__)]
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}; say {instead}"
        for path in [*files(*SUFFIXES), *tests, *sorted(ROOT.glob("*.md")), *LONE]
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(pattern, line)
    ]
    assert not wrong


def snippets(path: Path) -> list[str]:
    """The Python blocks of a page, or what the docstrings of a file have a reader type."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        docs = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
        return [one.source for doc in docs for one in doctest.DocTestParser().get_examples(doc)]
    return re.findall(r"^```python[^\n]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_names_in_snippets_say_what_a_thing_is() -> None:
    wrong = {
        f"{path.relative_to(ROOT)}: {name}, say {NAMES[name]}"
        for path in [*files(".md", ".py"), *sorted(ROOT.glob("*.md"))]
        for block in snippets(path)
        for name, _ in names(ast.parse(block))
        if name in NAMES
    }
    assert not wrong
