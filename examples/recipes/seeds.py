"""Whether what BF16 by default costs seed by seed is chance: more seeds, of the two recipes that take seconds each.

The seeds are none of those of the recipes, and their number was fixed before the first was run. `torch.autocast` stands
beside, which computes the same as BF16 by default but for the last bits.

    python examples/recipes/seeds.py               # --short: a few steps of two seeds, and nothing is written
"""

import argparse
import json
import statistics

import dcgan
import detector
import torch
from common import AUTOCAST, DEFAULT, FOLDER, FP32, SHORT, Recipe, machine, paired, standard_error, train
from rich import box
from rich.console import Console
from rich.table import Table

RESULT = FOLDER / "trials" / "seeds.json"
FIRST = 200
PLAN = {dcgan.RECIPE: 24, detector.RECIPE: 8}
WAYS = {FP32: {"enabled": False}, AUTOCAST: {"autocast": torch.bfloat16}, DEFAULT: {"dtype": "bf16"}}
HEADINGS = ("recipe", "seeds", "way", "mean", "difference to FP32, seed by seed", "better by its standard errors")


def measured(recipe: Recipe, length: int, count: int) -> dict[str, object]:
    """The quality at the end of each way, seed by seed."""
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for seed in range(FIRST, FIRST + count):
        for way, options in WAYS.items():
            found[way].append(train(recipe.start(seed, options), length, points=1)["quality"][-1])
        print(f"{recipe.name}, seed {seed}: {[values[-1] for values in found.values()]}", flush=True)
    facts = {"title": recipe.title, "measure": recipe.measure, "higher": recipe.higher, "steps": length}
    return {**facts, "quality": found}


def rows(results: dict) -> list[tuple[str, ...]]:
    """As the table has them."""
    made = []
    for one in results["recipes"].values():
        exact = one["quality"][FP32]
        for way, values in one["quality"].items():
            each = [a - b for a, b in zip(values, exact, strict=True)]
            apart = (f"{statistics.fmean(each):+.3g} ± {standard_error(each):.2g}",
                     f"{paired(values, exact, one['higher']):+.1f}")  # fmt: skip
            mean = f"{statistics.fmean(values):.4g} ± {standard_error(values):.2g}"
            title = f"{one['title']}: {one['measure']}"
            made.append((title, str(len(values)), way, mean, *(("", "") if way == FP32 else apart)))
    return made


def main(arguments: list[str] | None = None) -> dict:
    """Run all, print the table, and write what was measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="a few steps of two seeds, and nothing is written")
    short = parser.parse_args(arguments).short
    recipes = {
        recipe.name: measured(recipe, SHORT if short else recipe.length, 2 if short else count)
        for recipe, count in PLAN.items()
    }
    results = {**machine(), "recipes": recipes}
    table = Table(title="More seeds", box=box.SIMPLE_HEAD)
    for number, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if number else "left")
    for row in rows(results):
        table.add_row(*row)
    Console().print(table)
    if not short:
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return results


if __name__ == "__main__":
    main()
