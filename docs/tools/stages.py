"""Puts what each stage changes of a small model's graph into a page, from the recorded stages.

Every block stands between `<!-- stage: NAME -->` and `<!-- end -->`. `<!-- stage: NAME only PATTERN -->` shows those
lines alone that the regular expression finds; how many others changed is said below them.
"""

from __future__ import annotations

import difflib
import re

from pipelines import stages

WIDEST = 132
_BLOCK = re.compile(r"(<!-- stage: (\w+)(?: only (.*?))? -->\n).*?(<!-- end -->)", re.DOTALL)


def fill(text: str, model: str) -> str:
    """The page with every block made anew.

    Args:
        text: of the page.
        model: a name in tests/pipelines.
    """
    texts = stages(model)
    order = list(texts)

    def block(match: re.Match[str]) -> str:
        name = match[2]
        if name not in texts:
            raise SystemExit(f"tests/pipelines/{model}.txt has no stage '{name}'; there are {', '.join(order)}")
        graphs = [texts[one] for one in order[: order.index(name)] if is_graph(texts[one])]
        before = graphs[-1] if graphs and is_graph(texts[name]) else []
        return f"{match[1]}{changes(before, texts[name], match[3])}{match[4]}"

    return _BLOCK.sub(block, text)


def is_graph(stage: list[str]) -> bool:
    """Whether a stage is the text of a graph; those of the plan are lists of decisions, labels and casts."""
    return any(line.startswith("return") for line in stage)


def changes(before: list[str], after: list[str], only: str | None) -> str:
    """What differs between two stages as a code block; all of the second where there is none before it."""
    lines = list(difflib.unified_diff(before, after, n=0, lineterm="")) if before else after
    changed = [line for line in lines if not before or not line.startswith(("---", "+++", "@@"))]
    shown = [line for line in changed if not only or re.search(only, line)]
    if not shown:
        raise SystemExit(f"nothing in this stage changes and matches '{only}': correct the marker of the page")
    short = [without_path(line) for line in shown]
    if len({line[1:] for line in short}) == len(short):  # else the paths are what changed
        shown = short
    text = [f"```{'diff' if before else 'text'}", *(shorten(line) for line in shown), "```"]
    left = len(changed) - len(shown)
    if left:
        text += ["", f"({left} more line{'s' if left > 1 else ''}.)"]
    return "\n".join(text) + "\n"


def without_path(line: str) -> str:
    """A line without the module path behind it."""
    return re.sub(r"  # (phase=\w+ )?at=\S+$", lambda match: f"  # {match[1].strip()}" if match[1] else "", line)


def shorten(line: str) -> str:
    """A line no longer than a page is wide."""
    return line if len(line) <= WIDEST else line[: WIDEST - 1].rstrip() + "…"
