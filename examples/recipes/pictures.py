"""The picture of a recipe's results.

It shows which binary exponents the FP32 training has, and which of them the low type has; the loss scale; the quality
of every way, with a band of one standard error to both sides.
"""

import statistics
import sys
from pathlib import Path
from typing import Any

from common import GOOD, KINDS, standard_error

from amp_compiler.ir.ranges import RANGES
from amp_compiler.report.plots import drawing

sys.path.append(str(Path(__file__).parents[2] / "docs" / "tools"))
from svg import darken

SIZE = (10.5, 2.9)  # inches
LEFT, RIGHT = -60, 20  # exponents that are shown


def ranges(axes: Any, results: dict[str, Any]) -> None:
    """The exponents of the FP32 training, and where the low type has subnormal numbers or none."""
    least, normal, greatest = RANGES[results["low"]].exponents
    axes.axvspan(LEFT, least - 1, color="C3", alpha=0.15, lw=0)
    axes.axvspan(least - 1, normal, color="C1", alpha=0.12, lw=0)
    axes.axvspan(min(greatest + 1, RIGHT), RIGHT, color="C3", alpha=0.15, lw=0)
    for kind in KINDS:
        parts = results["ranges"]["exponents"][kind]
        axes.step(
            range(LEFT, RIGHT), [100 * parts.get(str(at), 0) for at in range(LEFT, RIGHT)], label=kind, where="mid"
        )
    axes.set(title=f"exponents in FP32, %; red: none in {results['low'].upper()}", xlim=(LEFT, RIGHT))
    axes.set_xlabel("exponent")
    axes.legend(fontsize=6)


def scales(axes: Any, results: dict[str, Any]) -> None:
    """The loss scale of the first seed."""
    for way, runs in results["runs"].items():
        if way in GOOD:
            axes.plot(runs[0]["at"], runs[0]["loss_scale"], drawstyle="steps-post", **style(results, way))
    axes.set_yscale("log", base=2)
    axes.set(title="loss scale", xlabel="step")


def qualities(axes: Any, results: dict[str, Any]) -> None:
    """The mean over the seeds at each step."""
    for way, runs in results["runs"].items():
        at = min((run["at"] for run in runs), key=len)
        by_step = list(zip(*(run["quality"] for run in runs), strict=False))
        means, errors = [statistics.fmean(values) for values in by_step], [standard_error(values) for values in by_step]
        axes.plot(at, means, label=way, **style(results, way))
        lower, upper = ([mean + sign * error for mean, error in zip(means, errors, strict=True)] for sign in (-1, 1))
        axes.fill_between(at, lower, upper, color=style(results, way)["color"], alpha=0.2, lw=0)
    axes.set(title=results["measure"], xlabel="step")


def style(results: dict[str, Any], way: str) -> dict[str, Any]:
    """A colour for each way; one that lies below others is wider, so that none hides another."""
    ways = list(results["runs"])
    return {
        "color": f"C{ways.index(way)}",
        "linewidth": 1.2 + min(0.8, 3 / len(ways)) * (len(ways) - 1 - ways.index(way)),
    }


def picture(results: dict[str, Any]) -> bytes:
    """As SVG."""

    def draw(figure: Any) -> None:
        figure.set_size_inches(*SIZE)
        panels = figure.subplots(1, 3)
        for axes, part in zip(panels, (ranges, scales, qualities), strict=True):
            part(axes, results)
        figure.legend(*panels[2].get_legend_handles_labels(), loc="outside upper left", ncols=2, fontsize=7)

    return darken(drawing(draw, "svg").decode()).encode()
