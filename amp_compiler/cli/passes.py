"""The catalogue of passes, made of their docstrings: what `amp-compiler passes` prints and `passes/README.md` holds."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import textwrap
from typing import Any

from rich import box
from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table
from rich.text import Text

from amp_compiler.passes import find_pass
from amp_compiler.passes.base import InPlacePass, Pass
from amp_compiler.passes.pipeline import PIPELINES, Pipeline

COLUMNS = ("pass", "works", "numbers", "skip", "what it does")
HEAD = """\
<!-- made by `make docs` from the docstrings; edit those -->
# Passes

Every rewrite of a graph is a pass, and stands in a pipeline, in the order in which a graph goes through them. Each is
described once, where it first stands. `amp-compiler passes` prints this too.
[architecture.md](../docs/architecture.md) shows a training step after each pass;
[pipelines.md](../docs/pipelines.md) how to print the stages, leave a pass out or put one in;
[extending.md](../docs/extending.md) how to add one to the project.

"""


def run_passes(name: str = "", *, markdown: bool = False, console: Console | None = None) -> None:
    """Print the catalogue, a line for each pass of each pipeline, or all about one pass; rendered on a terminal.

    Args:
        name: of the pass; empty for the catalogue.
        markdown: as Markdown, on a terminal too.
        console: where to; the standard output by default.

    Raises:
        PassError: no pass has this name.
    """
    console = console or Console()
    if markdown:
        sys.stdout.write(f"{entry(name)}\n" if name else catalogue_markdown())
        return
    if name:
        text = entry(name, level="#")
        console.print(Markdown(text) if console.is_terminal else Text(text), soft_wrap=not console.is_terminal)
        return
    for pipeline in filled():
        console.print(Text.assemble((pipeline.name, "bold cyan"), f": {pipeline.about}"), soft_wrap=True)
        rows = [(one, *traits(find_pass(one)), summary(find_pass(one))) for one in pipeline.names]
        if console.is_terminal:
            table = Table(box=box.SIMPLE_HEAD)
            for column in COLUMNS:
                table.add_column(column, overflow="fold", no_wrap=column != COLUMNS[-1])
            for row in rows:
                table.add_row(*map(Text, row))
            console.print(table)
            continue
        for one, works, numbers, skip, about in rows:
            line = f"  {one:<22} {works:<9}  {numbers:<7}  {skip:<6}  {about}"
            console.print(Text(line), soft_wrap=True, highlight=False)


def filled() -> list[Pipeline]:
    """The pipelines that have passes, in the order of the run."""
    return [pipeline for pipeline in PIPELINES if pipeline.names]


def traits(kind: type[Pass[Any]]) -> tuple[str, str, str]:
    """How a pass works on its subject, whether it keeps the numbers, and whether it may be left out."""
    return (
        "in place" if issubclass(kind, InPlacePass) else "makes new",
        "kept" if kind.exact else "changed",
        "may be" if kind.skippable else "",
    )


def summary(kind: type[Pass[Any]]) -> str:
    """The first line of its docstring."""
    return (inspect.getdoc(kind) or "").partition("\n")[0]


def catalogue_markdown() -> str:
    """The text of `passes/README.md`."""
    rows = [f"| {one.name} | {', '.join(f'[{name}](#{name})' for name in one.names)} |" for one in filled()]
    parts = [HEAD, "\n".join(["| pipeline | passes |", "|---|---|", *rows]), "\n\n"]
    described: set[str] = set()
    for pipeline in filled():
        own = [name for name in pipeline.names if name not in described]
        described.update(own)
        if own:
            parts += [f"## {pipeline.name}\n\n{pipeline.about}\n\n", *(f"{entry(name)}\n\n" for name in own)]
    return "".join(parts).rstrip() + "\n"


def entry(name: str, level: str = "###") -> str:
    """What one pass says of itself, as Markdown.

    Args:
        name: a key of `PASSES`.
        level: the marks of the heading.

    Raises:
        PassError: no pass has this name.
    """
    kind = find_pass(name)
    promises = [
        f"- {word}: {said}"
        for word, said in (("needs", _first(kind, "requires")), ("gives", _first(kind, "ensures")))
        if said
    ]
    parts = [f"{level} {name}", facts(kind), _markdown(inspect.getdoc(kind) or ""), "\n".join(promises)]
    return "\n\n".join(part for part in parts if part)


def facts(kind: type[Pass[Any]]) -> str:
    """The file, the traits, and those options that the docstring leaves out."""
    works, numbers, skip = traits(kind)
    docstring = inspect.getdoc(kind) or ""
    words = [
        f"`{kind.__module__.removeprefix('amp_compiler.').replace('.', '/')}.py`",
        "in place" if works == "in place" else "gives a new object",
        "changes no number" if numbers == "kept" else "changes numbers",
        *(["may be skipped"] if skip else []),
        *(f"option `{one}`" for one in _options(kind) if f"\n    {one.partition(':')[0]}:" not in docstring),
    ]
    return " · ".join(words)


def _options(kind: type[Pass[Any]]) -> list[str]:
    """The fields of a pass as `name: type = default`."""
    options = []
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]  # every pass is a dataclass
        plain = isinstance(field.default, str | int | float | bool | tuple | None)
        default = f" = {field.default!r}" if field.default is not dataclasses.MISSING and plain else ""
        options.append(f"{field.name}: {field.type}{default}")
    return options


def _first(kind: type[Pass[Any]], method: str) -> str:
    """The first paragraph of the docstring of a method that the pass itself writes; nothing where it inherits it."""
    own = vars(kind).get(method)
    text = inspect.cleandoc(own.__doc__ or "").partition("\n\n")[0] if own else ""
    return " ".join(text.split())


def _markdown(docstring: str) -> str:
    """A docstring in Google style as Markdown: indented text becomes a code block, `Args:` a list."""
    text, _, arguments = docstring.partition("\nArgs:\n")
    arguments, _, rest = arguments.partition("\n\n")
    done = [_block(block) for block in re.split(r"\n{2,}(?=\S)", text)]
    if arguments:
        items = re.split(r"\n(?=\S)", textwrap.dedent(arguments))
        pairs = (one.partition(":") for one in items)
        done.append("\n".join(f"- `{name}`: {' '.join(about.split())}" for name, _, about in pairs))
    return "\n\n".join(done + ([_markdown(rest)] if rest.strip() else []))


def _block(block: str) -> str:
    """A paragraph, and the indented text behind it as a code block."""
    words, _, code = block.partition("\n    ")
    words = re.sub(r"::$", ":", words.strip())
    if not code:
        return words
    return f"{words}\n\n```text\n{textwrap.dedent('    ' + code).rstrip()}\n```"
