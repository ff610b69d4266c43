"""What commands share: what is wrong with a command line, and where its answer goes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import typer

from amp_compiler.errors import AmpError
from amp_compiler.passes import PASSES
from amp_compiler.policy.marks import nearest

ALL, CAPTURED = "all", "capture"  # what `--print-after` takes beside the names of passes


class UsageError(AmpError):
    """An option cannot be what it is, or does not go with another one; the command ends with exit code 2."""


def read_type(text: str) -> str:
    """What `--dtype` takes, by its short name.

    Raises:
        typer.BadParameter: it is no 16-bit type, nor `auto`.
    """
    from amp_compiler.ir.dtypes import low_name

    try:
        return low_name(text)
    except AmpError as wrong:
        raise typer.BadParameter(str(wrong)) from wrong


def read_stored_type(text: str) -> str:
    """What `convert --dtype` takes, by its short name: a file is not made for one device.

    Raises:
        typer.BadParameter: it is no 16-bit type.
    """
    if (name := read_type(text)) == "auto":
        raise typer.BadParameter("a file is not made for one device; use fp16 or bf16")
    return name


def check_pass(name: str, option: str) -> None:
    """Refuse the name of no pass; quick, because it needs no torch.

    Args:
        name: what was given.
        option: the option that it was given with.

    Raises:
        UsageError: with the nearest name.
    """
    if name not in PASSES:
        hint = nearest(name, PASSES, "`amp-compiler passes` lists them")
        raise UsageError(f"there is no pass '{name}'", where=option, hint=hint)


def check_place(option: str, path: Path | None, others: Mapping[str, Path | None] = MappingProxyType({})) -> None:
    """Refuse a place that nothing can be written to, before the work is done.

    Args:
        option: the option that names the place.
        path: the place; `None` where the option was not given.
        others: what else the command line names, by what it is called: files that must not be overwritten.

    Raises:
        UsageError: it is a folder or another thing that is no file, or in no folder; or it is one of the others.
    """
    if path is None:
        return
    where, hint = f"{option} {path}", "name a file in a folder that exists"
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder '{path.parent}'", where=where, hint=hint)
    from amp_compiler.ir.files import output_file  # here, so that help does not wait

    try:
        target = output_file(path)
    except AmpError as wrong:
        raise UsageError(wrong.what, where=where, hint=hint) from wrong
    for name, other in others.items():
        if other is not None and _same(target, other):
            raise UsageError(f"it is {name}, which it would overwrite", where=where, hint="name another file")


def check_data_files(model: str, places: Mapping[str, Path | None]) -> None:
    """Refuse a place where an ONNX file keeps its data.

    Args:
        model: names the model; nothing is done where that is no ONNX file.
        places: by option, what would be written; `None` where the option was not given.

    Raises:
        UsageError: one of them is a data file of the model.
        OnnxError: the model cannot be read.
    """
    if not model.endswith(".onnx") or not any(places.values()):
        return
    from amp_compiler.onnx.model.external import external_files
    from amp_compiler.onnx.model.model import open_model

    opened = open_model(model)
    for file in external_files(opened.proto, opened.folder or Path()):
        for option, place in places.items():
            check_place(option, place, {"a data file of the model": file})


def _same(target: Path, other: Path) -> bool:
    try:
        return target.samefile(other)
    except OSError:  # one of them is not there yet
        return target == other.resolve()


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


def print_error(error: AmpError) -> None:
    """Tell an error on the standard error: what and where, the hint, and where the catalogue has its kind."""
    lines = [f"error: {f'{error.where}: ' if error.where else ''}{error.what}"]
    if error.hint:
        lines.append(f"  hint: {error.hint}")
    lines.append(f"  see:  docs/errors.md#{error.section()}")
    typer.echo("\n".join(lines), err=True)
