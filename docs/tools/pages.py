"""The pages of the docs: their kind by mkdocs.yml, their words, and the Python blocks that a test runs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/results/notes_cpu.md": "notes_cpu.md",
    "benchmarks/results/notes_gpu.md": "notes_gpu.md",
    "passes/README.md": "passes.md",
    "rules/README.md": "rules.md",
}
KINDS = ("Home", "Getting started", "How-to guides", "Reference", "Explanation", "Contributing")
_ENTRY = re.compile(r"^( +)- ([^:]+):(?: (\S+\.md))?$", re.MULTILINE)
_GENERATED = re.compile(r"<!-- (?:stage|table|recipe|sweep)\b.*?<!-- end -->", re.DOTALL)
_CODE = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Page:
    """One page of the site."""

    name: str
    title: str
    kind: str
    path: Path

    @property
    def text(self) -> str:
        """As it stands in the repository."""
        return self.path.read_text(encoding="utf-8")

    @property
    def words(self) -> int:
        """Those that somebody wrote: code and what a command makes are left out."""
        return len(_CODE.sub("", _GENERATED.sub("", self.text)).split())

    @property
    def snippets(self) -> list[str]:
        """The blocks that a test runs; what is shown only is marked `py`."""
        return re.findall(r"^```python(?: needs=\S+)?\n(.*?)^```$", self.text, re.DOTALL | re.MULTILINE)

    @property
    def files(self) -> dict[str, str]:
        """By name, what the page says that a file holds."""
        return dict(re.findall(r"`(\S+)` holds:\n\n```\w+\n(.*?)^```$", self.text, re.DOTALL | re.MULTILINE))

    @property
    def commands(self) -> list[str]:
        """Lines for the shell that call `amp-compiler`."""
        blocks = re.findall(r"^```(.*?)\n(.*?)^```$", self.text, re.DOTALL | re.MULTILINE)
        shell = "\n".join(block for language, block in blocks if not language)
        lines = shell.replace("&& amp-", "\namp-").splitlines()
        return [line for line in lines if line.startswith("amp-compiler ") and " > " not in line]


def pages() -> list[Page]:
    """All of the navigation, in its order."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    outside = {inside: source for source, inside in PAGES.items()}
    results, kind = [], ""
    for indent, title, name in _ENTRY.findall(text):
        kind = title if len(indent) == 2 else kind
        if name:
            results.append(Page(name, title, kind, ROOT / outside.get(name, f"docs/{name}")))
    return results


def table() -> str:
    """Words, kind and snippets of each page."""
    rows = [f"| {one.kind} | {one.title} | {one.name} | {one.words:,} | {len(one.snippets)} |" for one in pages()]
    return "\n".join(["| kind | page | file | words | snippets run |", "|---|---|---|---:|---:|", *rows])
