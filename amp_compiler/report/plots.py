"""Recorded runs as a picture, by matplotlib: the same records give the same file."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amp_compiler.errors import AmpError
from amp_compiler.ir.files import write_atomically
from amp_compiler.ir.run_file import StepRecord

KINDS = ("png", "svg", "pdf")
_MIB = 1 << 20
_ACROSS = 2
_COLOURS = 10  # that matplotlib has one after the other
_SIZE = (4.8, 2.5)  # inches of a panel
# No time of day, and names of parts that are drawn from a fixed seed: two drawings of one run are one file.
_NO_DATE = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None, "ModDate": None}}
# What lies below other curves is wider, so that none hides another; curves of one run, of one colour, are paler too.
_THIN, _WIDER, _WIDEST = 1.2, 1.2, 4.8
_STEPS = "steps"  # a style: it stays until it changes
_SETTINGS: Any = {
    "svg.hashsalt": "amp_compiler", "svg.fonttype": "none", "font.family": "DejaVu Sans", "font.size": 8,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3,
    "lines.linewidth": _THIN, "axes.titlesize": 9, "axes.titlelocation": "left", "legend.frameon": False,
    "path.simplify": True,
}  # fmt: skip


@dataclass(frozen=True)
class _Line:
    """One quantity: how it is called and drawn in its panel, and what it is of a record; `None` leaves it out."""

    value: Callable[[StepRecord], float | None]
    name: str = ""
    style: str = "-"


@dataclass(frozen=True)
class _Panel:
    """What stands in one panel, and how its numbers are spaced."""

    title: str
    lines: tuple[_Line, ...]
    scale: Callable[[Any], None] = lambda axes: None


def draw_runs(runs: Mapping[str, Sequence[StepRecord]], path: str | Path) -> None:
    """Write a picture of runs over each other: loss, gradient norm, loss scale, what is lost, milliseconds, memory.

    Args:
        runs: the records of each, by the name that stands in the legend.
        path: a file that ends in `.png`, `.svg` or `.pdf`.

    Raises:
        AmpError: matplotlib is not installed, the ending is another, or the file cannot be written.
    """
    kind = Path(path).suffix.lstrip(".").lower()
    if kind not in KINDS:
        raise AmpError(
            f"'{kind}' is no kind of picture that is drawn",
            where=str(path),
            hint=f"end it in one of {', '.join(KINDS)}",
        )
    panels = [
        panel for panel in _panels(runs) if any(_points(line, run) for run in runs.values() for line in panel.lines)
    ]
    down = math.ceil(len(panels) / _ACROSS)

    def draw(figure: Any) -> None:
        from matplotlib.lines import Line2D

        figure.set_size_inches(_ACROSS * _SIZE[0], down * _SIZE[1])
        for place, panel in enumerate(panels):
            axes = figure.add_subplot(down, _ACROSS, place + 1)
            _draw(axes, panel, runs)
            if place >= len(panels) - _ACROSS:
                axes.set_xlabel("step")
        if len(runs) > 1:
            handles = [Line2D([], [], color=f"C{number % _COLOURS}") for number in range(len(runs))]
            figure.legend(handles, [_plain(name) for name in runs], loc="outside upper left", ncols=min(len(runs), 4))

    write_atomically(path, drawing(draw, kind))


def drawing(draw: Callable[[Any], None], kind: str) -> bytes:
    """The bytes of a picture in the style of the project's, whatever a user has set: one drawing is always one file.

    Args:
        draw: draws on a `matplotlib.figure.Figure` that is empty.
        kind: one of `KINDS`.

    Raises:
        AmpError: matplotlib is not installed.

    Example:
        >>> drawing(lambda figure: figure.add_subplot().plot([1, 2, 4]), "png")[1:4]
        b'PNG'
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as cause:
        raise AmpError("matplotlib is not installed, which draws runs", hint="pip install matplotlib") from cause
    with matplotlib.rc_context(), io.BytesIO() as buffer:
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        figure = Figure(layout="constrained")
        draw(figure)
        figure.savefig(buffer, format=kind, metadata=_NO_DATE[kind], dpi=150)
        return buffer.getvalue()


def _panels(runs: Mapping[str, Sequence[StepRecord]]) -> list[_Panel]:
    dtypes = sorted({record.dtype for run in runs.values() for record in run})
    aux = sorted({name for run in runs.values() for record in run for name in record.aux})

    def of_aux(name: str) -> Callable[[StepRecord], float | None]:
        return lambda record: record.aux.get(name)

    return [
        _Panel("loss", (_Line(lambda record: record.loss),)),
        *(_Panel(_plain(name), (_Line(of_aux(name)),)) for name in aux),
        _Panel("gradient norm", (_Line(lambda record: record.grad_norm or None),), lambda axes: axes.set_yscale("log")),
        _Panel(
            "loss scale, ▾ behind skipped steps",
            (_Line(lambda record: record.loss_scale, style=_STEPS),),
            lambda axes: axes.set_yscale("log", base=2),
        ),
        _Panel(
            f"gradients in {' and '.join(dtypes)}, % of all elements",
            (
                _Line(lambda record: 100 * record.zero, "zero"),
                _Line(lambda record: 100 * record.subnormal, "subnormal", "--"),
                _Line(lambda record: 100 * record.infinite, "infinite or NaN", ":"),
            ),
        ),
        _Panel("milliseconds a step", (_Line(lambda record: record.milliseconds),), _from_zero),
        _Panel(
            "most memory so far, MiB",
            (_Line(lambda record: None if record.memory is None else record.memory / _MIB),),
            _from_zero,
        ),
    ]  # fmt: skip


def _plain(name: str) -> str:
    """A name that matplotlib takes for no formula."""
    return name.replace("$", r"\$")


def _from_zero(axes: Any) -> None:
    axes.set_ylim(0, 1.1 * axes.dataLim.y1)


def _points(line: _Line, run: Sequence[StepRecord]) -> list[tuple[int, float]]:
    """What there is of a quantity; what is not finite leaves a gap."""
    values = [(record.step, line.value(record)) for record in run]
    points = [(step, math.nan if not math.isfinite(value) else value) for step, value in values if value is not None]
    return points if any(not math.isnan(value) for _, value in points) else []


def _lone(points: Sequence[tuple[int, float]]) -> list[int]:
    """The places of points to which no line leads."""
    gaps = [True, *(math.isnan(value) for _, value in points), True]
    return [at for at in range(len(points)) if not gaps[at + 1] and gaps[at] and gaps[at + 2]]


def _draw(axes: Any, panel: _Panel, runs: Mapping[str, Sequence[StepRecord]]) -> None:
    axes.set_title(panel.title)
    axes.locator_params(axis="x", integer=True)
    for number, run in enumerate(runs.values()):
        wider = min(_WIDER, _WIDEST / len(runs)) * (len(runs) - 1 - number)
        for place, line in enumerate(panel.lines):
            points = _points(line, run)
            stepped, lone = line.style == _STEPS, _lone(points)
            axes.plot(
                [step for step, _ in points], [value for _, value in points], "-" if stepped else line.style,
                drawstyle="steps-post" if stepped else "default", color=f"C{number % _COLOURS}",
                marker="." if lone else None, markevery=lone or None, label=line.name if number == 0 else None,
                linewidth=_THIN + wider + (len(panel.lines) - 1 - place) * _WIDER / 2,
                alpha=(place + 1) / len(panel.lines),
            )  # fmt: skip
            if stepped:
                _mark_skips(axes, run, f"C{number % _COLOURS}", 5 + 2 * wider)
    panel.scale(axes)
    if len(panel.lines) > 1:
        axes.legend()


def _mark_skips(axes: Any, run: Sequence[StepRecord], colour: str, size: float) -> None:
    """A mark at each record before which steps were skipped."""
    before = 0
    for record in run:
        if record.skipped_steps > before:
            axes.plot(record.step, record.loss_scale, "v", color=colour, markersize=size)
        before = record.skipped_steps
