"""Reads the recorded stages of a small model (tests/pipelines/*.txt), which tests hold to what the code does."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

RECORDED = Path(__file__).parents[2] / "tests" / "pipelines"
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? ")
_NODE = re.compile(
    r"(?P<name>\w+)(?:: \(?(?P<dtype>\w+)[^=]*)? = (?P<target>[\w.]+)\((?P<arguments>.*)\)(?:  # (?P<marks>.*))?$"
)


@dataclass(frozen=True)
class Line:
    """One node of a stage.

    Args:
        name: of the node.
        op: its operator without namespace and overload, as `linear`.
        namespace: `aten`, `amp_compiler`, or nothing.
        dtype: of its (first) result, as `bf16`; empty where it gives none.
        cast: whether it does nothing but change the element type.
        phase: `forward`, `backward`, `update`, or nothing.
    """

    name: str
    op: str
    namespace: str
    dtype: str
    cast: bool
    phase: str


def stages(model: str) -> dict[str, list[str]]:
    """The text of each stage, line by line, by the name of the pass; a stage that changed nothing is that before it.

    Args:
        model: a name in tests/pipelines, as `mlp`.
    """
    texts: dict[str, list[str]] = {}
    last: list[str] = []
    graph: list[str] = []
    for block in (RECORDED / f"{model}.txt").read_text(encoding="utf-8").split("=== ")[1:]:
        title, *lines = block.rstrip("\n").split("\n")
        name, _, note = title.partition(", ")
        last = last if note == "nothing changed" else _changed(graph, lines) if note == "changes" else lines
        graph = last if any(line.startswith("return") for line in last) else graph
        texts.setdefault(name, last)
    return texts


def _changed(before: list[str], diff: list[str]) -> list[str]:
    """The lines behind a unified diff that has no lines around its changes."""
    after, place = [], 0
    for line in diff:
        if hunk := _HUNK.match(line):
            start = int(hunk[1]) - (hunk[2] != "0")  # behind the line that it names where nothing is taken away
            after += before[place:start]
            place = start
        elif line.startswith("-"):
            place += 1
        else:
            after.append(line[1:])
    return after + before[place:]


def nodes(stage: list[str]) -> list[Line]:
    """The nodes of a stage's graph without its inputs."""
    matches = (_NODE.match(line) for line in stage)
    return [_line(match) for match in matches if match]


def _line(match: re.Match[str]) -> Line:
    target, marks = match["target"], match["marks"] or ""
    namespace, _, rest = target.partition(".")
    op = rest.partition(".")[0] or target
    cast = target in ("aten.to.dtype", "aten._to_copy.default")
    phase = re.search(r"phase=(\w+)", marks)
    return Line(match["name"], op, namespace if rest else "", match["dtype"] or "", cast, phase[1] if phase else "")
