"""Whether what BF16 by default costs seed by seed is chance: more seeds, of the two recipes that take seconds each.

The seeds are none of those of the recipes, and their number is fixed before the first is run. `torch.autocast` stands
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
    quality: dict[str, list[float]] = {way: [] for way in WAYS}
    for seed in range(FIRST, FIRST + count):
        for way, options in WAYS.items():
            quality[way].append(train(recipe.start(seed, options), length, points=1)["quality"][-1])
        print(f"{recipe.name}, seed {seed}: {[values[-1] for values in quality.values()]}", flush=True)
    facts = {"title": recipe.title, "measure": recipe.measure, "higher": recipe.higher, "steps": length}
    return {**facts, **machine(), "quality": quality}


def load() -> dict[str, dict]:
    """What was measured, by the name of the recipe."""
    results: dict[str, dict] = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}
    return results


def rows(results: dict[str, dict]) -> list[tuple[str, ...]]:
    """As the table has them."""
    lines = []
    for one in results.values():
        exact = one["quality"][FP32]
        for way, values in one["quality"].items():
            each = [a - b for a, b in zip(values, exact, strict=True)]
            difference = f"{statistics.fmean(each):+.3g} ± {standard_error(each):.2g}"
            apart = (difference, f"{paired(values, exact, one['higher']):+.1f}")
            mean = f"{statistics.fmean(values):.4g} ± {standard_error(values):.2g}"
            title = f"{one['title']}: {one['measure']}"
            lines.append((title, str(len(values)), way, mean, *(("", "") if way == FP32 else apart)))
    return lines


def main(arguments: list[str] | None = None) -> dict[str, dict]:
    """Run them, print the table, and write what was measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="a few steps of two seeds, and nothing is written")
    parser.add_argument("--only", choices=[recipe.name for recipe in PLAN], help="one of them")
    args = parser.parse_args(arguments)
    results = {} if args.short else load()
    for recipe, count in PLAN.items():
        if args.only in (None, recipe.name):
            length, seeds = (SHORT, 2) if args.short else (recipe.length, count)
            results[recipe.name] = measured(recipe, length, seeds)
            if not args.short:
                RESULT.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    table = Table(title="More seeds", box=box.SIMPLE_HEAD)
    for number, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if number else "left")
    for row in rows(results):
        table.add_row(*row)
    Console().print(table)
    return results


if __name__ == "__main__":
    main()
