"""The catalogue of passes, made of their docstrings: `passes/README.md`."""

from __future__ import annotations

import inspect
import re
import textwrap
from typing import Any

from amp_compiler.cli.passes import facts
from amp_compiler.passes import find_pass
from amp_compiler.passes.base import Pass
from amp_compiler.passes.pipeline import PIPELINES

HEAD = """\
<!-- made by `make docs` from the docstrings; edit those -->
# Passes

Every rewrite of a graph is a pass, and stands in a pipeline, in the order in which a graph goes through them. Each is
described once, where it first stands. `amp-compiler passes` prints this too.
[architecture.md](../docs/architecture.md) shows a training step after each pass;
[pipelines.md](../docs/pipelines.md) how to print the stages, leave a pass out or put one in;
[extending.md](../docs/extending.md) how to add one to the project.

"""


def page() -> str:
    """The text of `passes/README.md`."""
    rows = [f"| {one.name} | {', '.join(f'[{name}](#{name})' for name in one.names)} |" for one in PIPELINES]
    parts = [HEAD, "\n".join(["| pipeline | passes |", "|---|---|", *rows]), "\n\n"]
    described: set[str] = set()
    for pipeline in PIPELINES:
        own = [name for name in pipeline.names if name not in described]
        described.update(own)
        if own:
            parts += [f"## {pipeline.name}\n\n{pipeline.about}\n\n", *(f"{entry(name)}\n\n" for name in own)]
    return "".join(parts).rstrip() + "\n"


def entry(name: str) -> str:
    """What one pass says of itself, as Markdown."""
    kind = find_pass(name)
    promises = [
        f"- {word}: {said}"
        for word, said in (("needs", _first(kind, "requires")), ("gives", _first(kind, "ensures")))
        if said
    ]
    parts = [f"### {name}", facts(kind), _markdown(inspect.getdoc(kind) or ""), "\n".join(promises)]
    return "\n\n".join(part for part in parts if part)


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
