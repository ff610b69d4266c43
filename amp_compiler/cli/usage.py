"""What commands share: what is wrong with a command line, and where its answer goes."""

from __future__ import annotations

import difflib
from pathlib import Path

import typer

from amp_compiler.errors import AmpError

ALL, CAPTURED = "all", "capture"  # what `--print-after` takes beside the names of passes
NODE_BY_NODE = "eager"  # the backend for reading stages: nothing is compiled


class UsageError(AmpError):
    """An option cannot be what it is, or does not go with another one; the command ends with exit code 2."""


def check_pass(name: str, option: str) -> None:
    """Refuse the name of no pass; quick, because it needs no torch.

    Args:
        name: what was given.
        option: the option that it was given with.

    Raises:
        UsageError: with the nearest name.
    """
    from amp_compiler.passes import PASSES  # here, so that help does not wait

    if name not in PASSES:
        near = difflib.get_close_matches(name, PASSES, 1)
        mend = f"did you mean '{near[0]}'?" if near else "`amp-compiler passes` lists them"
        raise UsageError(f"there is no pass '{name}'", where=option, mend=mend)


def check_place(option: str, path: Path | None) -> None:
    """Refuse a place that nothing can be written to, before the work is done.

    Raises:
        UsageError: it is a folder, or in none.
    """
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        what = "it is a folder" if path.is_dir() else f"there is no folder '{path.parent}'"
        raise UsageError(what, where=f"{option} {path}", mend="name a file in a folder that exists")


def emit(text: str, output: Path | None) -> None:
    """Write a text to the standard output, or to a file as a whole.

    Raises:
        AmpError: the file cannot be written.
    """
    if output is None:
        typer.echo(text, nl=False)
        return
    from amp_compiler.ir.files import write_atomically

    write_atomically(output, text)
