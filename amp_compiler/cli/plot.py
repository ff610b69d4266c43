"""The command `amp-compiler plot`: recorded runs as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from amp_compiler.cli.usage import check_place


def plot(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN.jsonl...", help="Files of amp.callbacks.JSONLines, drawn over each other."),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The picture, .png, .svg or .pdf; by default the first RUN with .png."),
    ] = None,
) -> None:
    """Draw recorded runs: loss, gradient norm, loss scale, what is lost in 16 bits, milliseconds and memory."""
    from amp_compiler.ir.run_file import read_run
    from amp_compiler.report.plots import draw_runs

    records = {}
    for name, source in zip(_names(runs), runs, strict=True):
        run = read_run(source)
        for note in run.notes:
            typer.echo(f"note: {source}: {note}", err=True)
        records[name] = run.records
    target = runs[0].with_suffix(".png") if output is None else output
    check_place("--output", target, {str(source): source for source in runs})
    draw_runs(records, target)
    typer.echo(f"{target}, records drawn: {', '.join(f'{name} {len(known)}' for name, known in records.items())}")


def _names(sources: Sequence[Path]) -> list[str]:
    """What the legend calls them: the name of the file, and where several share one, the path."""
    stems = [source.stem for source in sources]
    named = [stem if stems.count(stem) == 1 else str(source) for stem, source in zip(stems, sources, strict=True)]
    return [name if named.count(name) == 1 else f"{name} ({place})" for place, name in enumerate(named, 1)]
