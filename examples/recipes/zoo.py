"""The zoo of gradients: what the recipes measured, as one picture each and as the tables of docs/zoo.md.

    python examples/recipes/zoo.py                 # or: make zoo

A picture shows which binary exponents the FP32 training has, and which of them FP16 has; the loss scale; the quality of
every way, with a band of one standard error to both sides.
"""

import json
import re
import statistics
from pathlib import Path
from typing import Any

from common import BOTH, DEFAULT, FOLDER, HEADINGS, KINDS, rows, standard_error, why

from amp_compiler.ir.ranges import RANGES
from amp_compiler.report.plots import drawing

DOCS = Path(__file__).parents[2] / "docs"
SIZE = (10.5, 2.6)  # inches
LEFT, RIGHT = -60, 20  # exponents that are shown


def ranges(axes: Any, results: dict[str, Any]) -> None:
    """The exponents of the FP32 training, and where the low type has subnormal numbers or none."""
    limits = RANGES[results["low"]]
    axes.axvspan(LEFT, limits.least - 1, color="C3", alpha=0.15, lw=0)
    axes.axvspan(limits.least - 1, limits.normal, color="C1", alpha=0.12, lw=0)
    axes.axvspan(min(limits.greatest + 1, RIGHT), RIGHT, color="C3", alpha=0.15, lw=0)
    for kind in KINDS:
        parts = results["ranges"]["exponents"][kind]
        axes.step(
            range(LEFT, RIGHT), [100 * parts.get(str(at), 0) for at in range(LEFT, RIGHT)], label=kind, where="mid"
        )
    axes.set(title=f"exponents in FP32, %; {results['low'].upper()} has not the red ones", xlim=(LEFT, RIGHT))
    axes.set_xlabel("exponent")
    axes.legend(fontsize=6)


def scales(axes: Any, results: dict[str, Any]) -> None:
    """The loss scale of the first seed."""
    for way, runs in results["runs"].items():
        if way in (BOTH, DEFAULT):
            axes.plot(runs[0]["at"], runs[0]["loss_scale"], drawstyle="steps-post", color=colour(results, way))
    axes.set_yscale("log", base=2)
    axes.set(title="loss scale", xlabel="step")


def qualities(axes: Any, results: dict[str, Any]) -> None:
    """The mean over the seeds at each step."""
    for way, runs in results["runs"].items():
        at = min((run["at"] for run in runs), key=len)
        found = list(zip(*(run["quality"] for run in runs), strict=False))
        means, errors = [statistics.fmean(values) for values in found], [standard_error(values) for values in found]
        axes.plot(at, means, color=colour(results, way), label=way)
        lower, upper = ([mean + sign * error for mean, error in zip(means, errors, strict=True)] for sign in (-1, 1))
        axes.fill_between(at, lower, upper, color=colour(results, way), alpha=0.2, lw=0)
    axes.set(title=results["measure"], xlabel="step")


def colour(results: dict[str, Any], way: str) -> str:
    return f"C{list(results['runs']).index(way)}"


def picture(results: dict[str, Any]) -> bytes:
    """As SVG."""

    def draw(figure: Any) -> None:
        figure.set_size_inches(*SIZE)
        panels = figure.subplots(1, 3)
        for axes, part in zip(panels, (ranges, scales, qualities), strict=True):
            part(axes, results)
        figure.legend(*panels[2].get_legend_handles_labels(), loc="outside upper center", ncols=6, fontsize=7)

    return drawing(draw, "svg")


def section(results: dict[str, Any]) -> str:
    """The table of a recipe, and what its profile says, in Markdown."""
    lines = ["| " + " | ".join(HEADINGS).format(**results) + " |", "|---" * len(HEADINGS) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows(results)]
    return "\n".join([*lines, "", why(results)])


def machines(found: list[dict[str, Any]]) -> str:
    """Where it was measured."""
    one = found[0]
    seconds = sum(results["seconds"] for results in found)
    return (
        f"Measured on {one['cpu']}, one thread, torch {one['versions']['torch']}, Python {one['versions']['python']}, "
        f"{one['date']}: {seconds / 60:.0f} minutes for all, other work beside it."
    )


def render(text: str, found: dict[str, dict[str, Any]]) -> str:
    """The page with every table made anew, between `<!-- recipe: NAME -->` and `<!-- end -->`."""
    parts = {name: section(results) for name, results in found.items()} | {"machine": machines(list(found.values()))}
    for name, made in parts.items():
        block = f"<!-- recipe: {name} -->\n{made}\n<!-- end -->"
        text = re.sub(rf"<!-- recipe: {name} -->.*?<!-- end -->", lambda _, block=block: block, text, flags=re.DOTALL)
    return text


def load() -> dict[str, dict[str, Any]]:
    """The results of the full runs by the name of the recipe."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))}


def main() -> None:
    found = load()
    (DOCS / "pictures" / "zoo").mkdir(exist_ok=True)
    for name, results in found.items():
        (DOCS / "pictures" / "zoo" / f"{name}.svg").write_bytes(picture(results))
    page = DOCS / "zoo.md"
    page.write_text(render(page.read_text(encoding="utf-8"), found), encoding="utf-8")
    print(f"{len(found)} pictures in docs/pictures/zoo/, and the tables of docs/zoo.md")


if __name__ == "__main__":
    main()
