"""Writes the catalogue of all passes from their docstrings: passes/README.md."""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from importlib import import_module
from pathlib import Path
from typing import Any

from amp_compiler.passes import PASSES, find_pass
from amp_compiler.passes.base import Pass

ROOT = Path(__file__).parents[2]
ORDER = ("capture", "plan", "precision", "step", "device", "onnx_export")  # the way of a graph
HEAD = """\
<!-- made by `python docs/tools/generate.py` from the docstrings; edit those -->
# Passes

Every rewrite of a graph is a pass. They are listed here by folder, in the order in which a graph goes through them.
[docs/architecture.md](../docs/architecture.md) shows one training step after each;
[docs/errands.md](../docs/errands.md) says how to add one. `PASSES` in `passes/__init__.py` is the table of all.

"""


def write() -> str:
    """The text of the catalogue."""
    groups: dict[str, list[str]] = {}
    for name, where in PASSES.items():
        groups.setdefault(where.split(".")[2], []).append(name)
    order = sorted(groups, key=lambda one: (ORDER.index(one) if one in ORDER else len(ORDER), one))
    parts = [HEAD, contents(order, groups)]
    for group in order:
        about = (import_module(f"amp_compiler.passes.{group}").__doc__ or "").partition("\n")[0]
        parts.append(f"## {group}\n\n{about}\n\n")
        parts += [entry(name) for name in groups[group]]
    return "".join(parts).rstrip() + "\n"


def contents(order: list[str], groups: dict[str, list[str]]) -> str:
    """A line for each folder with links to its passes."""
    rows = [f"| {group} | {', '.join(f'[{name}](#{name})' for name in groups[group])} |" for group in order]
    return "\n".join(["| folder | passes |", "|---|---|", *rows]) + "\n\n"


def entry(name: str) -> str:
    """What one pass says of itself."""
    kind = find_pass(name)
    path = Path(inspect.getsourcefile(kind) or "").resolve().relative_to(ROOT.resolve())
    told = inspect.getdoc(kind) or ""
    undocumented = [one for one in options(kind) if f"\n    {one.partition(':')[0]}:" not in told]
    facts = [f"`{path.as_posix()}`", *traits(kind), *(f"option `{one}`" for one in undocumented)]
    promises = [
        f"- {word}: {said}"
        for word, said in (("needs", first(kind, "requires")), ("gives", first(kind, "ensures")))
        if said
    ]
    parts = [f"### {name}", " · ".join(facts), markdown(told), "\n".join(promises)]
    return "\n\n".join(part for part in parts if part) + "\n\n"


def traits(kind: type[Pass[Any]]) -> list[str]:
    """What the class itself says of how it works, in words."""
    base = next((one.__name__ for one in kind.__mro__ if one.__name__ in ("InPlacePass", "FunctionalPass")), "")
    words = {"InPlacePass": ["in place"], "FunctionalPass": ["gives a new object"]}.get(base, [])
    exact = getattr(kind, "exact", None)
    if isinstance(exact, bool):
        words.append("changes no number" if exact else "changes numbers")
    return [*words, *(["may be skipped"] if getattr(kind, "skippable", False) is True else [])]


def options(kind: type[Pass[Any]]) -> list[str]:
    """The fields of a pass as `name: type = default`."""
    if not dataclasses.is_dataclass(kind):
        return []
    found = []
    for field in dataclasses.fields(kind):
        plain = isinstance(field.default, str | int | float | bool | tuple | None)
        default = f" = {field.default!r}" if field.default is not dataclasses.MISSING and plain else ""
        found.append(f"{field.name}: {field.type}{default}")
    return found


def first(kind: type[Pass[Any]], method: str) -> str:
    """The first paragraph of the docstring of a method that the pass itself writes; nothing where it inherits it."""
    own = vars(kind).get(method)
    text = inspect.cleandoc(own.__doc__ or "").partition("\n\n")[0] if own else ""
    return " ".join(text.split())


def markdown(docstring: str) -> str:
    """A docstring in Google style as Markdown: indented text becomes a code block, `Args:` a list."""
    text, _, arguments = docstring.partition("\nArgs:\n")
    arguments, _, rest = arguments.partition("\n\n")
    blocks = re.split(r"\n{2,}(?=\S)", text)
    done = [_block(block) for block in blocks]
    if arguments:
        items = re.split(r"\n(?=\S)", textwrap.dedent(arguments))
        pairs = (one.partition(":") for one in items)
        done.append("\n".join(f"- `{name}`: {' '.join(about.split())}" for name, _, about in pairs))
    return "\n\n".join(done + ([markdown(rest)] if rest.strip() else []))


def _block(block: str) -> str:
    """A paragraph, and the indented text behind it as a code block."""
    words, mark, code = re.match(r"(.*?)(\n\n?(?=    )|\Z)(.*)", block, re.DOTALL).groups()  # type: ignore[union-attr]
    words = re.sub(r"::$", ":", words.strip())
    if not mark:
        return str(words)
    return f"{words}\n\n```text\n{textwrap.dedent(code).rstrip()}\n```"
