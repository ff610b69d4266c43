"""Writes the catalogue of all passes from their docstrings: passes/README.md."""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

from amp_compiler.passes import PASSES, find_pass
from amp_compiler.passes.base import Pass
from amp_compiler.passes.pipeline import PIPELINES

ROOT = Path(__file__).parents[2]
ABOUT = {
    "CAPTURE": "From a captured graph to its normal form. Run by every call.",
    "PLAN": "From the neutral graph and rules to a plan. Run by every call, for FX and ONNX.",
    "FORWARD": "The plan carried out where gradients are wanted: `amp.compile` in training, and `amp.training_step`.",
    "INFERENCE": "The plan carried out where gradients are not wanted: `amp.compile` under `no_grad`.",
    "STEP": "From the rewritten forward to a graph of the whole training step.",
    "DEVICE": "The step fitted to the device that runs it.",
    "PIECE": "On each piece of a graph that a compiler is given.",
    "ONNX_CAPTURE": "From a captured graph to the normal form that is exported: `amp.export_onnx`.",
    "ONNX_EXPORT": "The plan carried out, and the graph fitted to ONNX: `amp.export_onnx`.",
}
HEAD = """\
<!-- made by `python docs/tools/generate.py` from the docstrings; edit those -->
# Passes

Every rewrite of a graph is a pass, and stands in a pipeline, in the order in which a graph goes through them. Each is
described once, where it first stands. [architecture.md](../docs/architecture.md) shows a training step after each pass;
[pipelines.md](../docs/pipelines.md) how to print the stages, leave a pass out or put one in;
[errands.md](../docs/errands.md) how to add one to the project.

"""


def write() -> str:
    """The text of the catalogue."""
    parts, told = [HEAD, contents()], set[str]()
    for pipeline in PIPELINES:
        new = [name for name in pipeline.names if name not in told]
        told.update(new)
        if new:
            if pipeline.name not in ABOUT:
                raise SystemExit(f"say in ABOUT of {Path(__file__).name} what the pipeline {pipeline.name} is for")
            parts.append(f"## {pipeline.name}\n\n{ABOUT[pipeline.name]}\n\n")
            parts += [entry(name) for name in new]
    missing = sorted(set(PASSES) - told)
    if missing:
        raise SystemExit(f"{', '.join(missing)}: in PASSES and in no pipeline")
    return "".join(parts).rstrip() + "\n"


def contents() -> str:
    """A line for each pipeline with links to its passes."""
    rows = [
        f"| {pipeline.name} | {', '.join(f'[{name}](#{name})' for name in pipeline.names)} |"
        for pipeline in PIPELINES
        if pipeline.names
    ]
    return "\n".join(["| pipeline | passes |", "|---|---|", *rows]) + "\n\n"


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
