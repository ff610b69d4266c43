"""The reference of `amp-compiler` from the commands themselves, for `docs/cli.md`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from amp_compiler.cli.main import app

HEAD = """# Command line

`amp-compiler COMMAND --help` prints the same. `amp-compiler --install-completion` adds completion to your shell.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | an error, as [errors](errors.md) lists them; `diff`: the plans differ; `rules check`: a file is wrong |
| 2 | wrong usage |
| 3 | `convert`: the verification failed; `find-nonfinite`: it found an inf or a NaN; `tune`: it was stopped |
"""


def page() -> str:
    """The page of the reference."""
    root = typer.main.get_command(app)
    sections = [_section(name, command) for name, command in _commands("amp-compiler", root)]
    return "\n\n".join([HEAD.strip(), *sections]) + "\n"


def _commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """A command, or in the place of a group all in it."""
    if not hasattr(command, "commands"):
        yield name, command
        return
    for child, one in command.commands.items():
        yield from _commands(f"{name} {child}", one)


def _section(name: str, command: Any) -> str:
    """Its text, and a table of its arguments and options."""
    context = command.context_class(command, info_name=name)
    usage = " ".join(command.collect_usage_pieces(context))
    rows = [row for one in command.params if (row := one.get_help_record(context))]
    table = [f"| `{_cell(word)}` | {_cell(text)} |" for word, text in rows]
    about = (command.help or "").replace("\b", "").strip()
    text = f"## {name.removeprefix('amp-compiler ')}\n\n{about}\n\n```\n{name} {usage}\n```"
    return "\n".join([text, "", "| option | meaning |", "|---|---|", *table]) if table else text


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
