"""`plot`: recorded runs as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from amp_compiler.cli.usage import check_place
from amp_compiler.ir.run_file import read_run
from amp_compiler.report.plots import draw_runs


def run_plot(sources: Sequence[Path], output: Path | None) -> None:
    """Draw runs over each other; what was passed over in their files is told.

    Args:
        sources: files of `amp.callbacks.JSONLines`.
        output: the picture; by default beside the first file, as PNG.

    Raises:
        AmpError: a file cannot be read, or the picture not be drawn.
    """
    runs = {}
    for name, source in zip(_names(sources), sources, strict=True):
        run = read_run(source)
        for note in run.notes:
            typer.echo(f"note: {source}: {note}", err=True)
        runs[name] = run.records
    target = sources[0].with_suffix(".png") if output is None else output
    check_place("--output", target, {str(source): source for source in sources})
    draw_runs(runs, target)
    typer.echo(f"{target}: {', '.join(f'{name} ({len(records)} records)' for name, records in runs.items())}")


def _names(sources: Sequence[Path]) -> list[str]:
    """What the legend calls them: the name of the file, and where several share one, the path."""
    stems = [source.stem for source in sources]
    named = [stem if stems.count(stem) == 1 else str(source) for stem, source in zip(stems, sources, strict=True)]
    return [name if named.count(name) == 1 else f"{name} ({place})" for place, name in enumerate(named, 1)]
