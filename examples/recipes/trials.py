"""Where the dates of `seq2seq.py` fail in FP16 without a loss scale and masters, and where they do not.

Each setting is trained once in FP32 and once in FP16 with neither; its FP32 run is profiled. The seed is none of those
of the recipe.

    python examples/recipes/trials.py              # --short: a few steps
"""

import argparse
import functools
import json

import torch
from common import FOLDER, FP32, NEITHER, SHORT, four_ways, machine, measured_ranges, train
from rich import box
from rich.console import Console
from rich.table import Table
from seq2seq import ADAM, BATCH, DATES_OF_ALL, RECIPE, WRITTEN, start

RESULT = FOLDER / "trials" / "seq2seq.json"
SEED = 100
SGD = torch.optim.SGD
MANY, MORE = 8_192, 40_960  # dates: of 82 thousand letters, and of 410 thousand
SETTINGS = {
    "Adam": (ADAM, BATCH),
    "SGD, rate 1": (functools.partial(SGD, lr=1.0), BATCH),
    "SGD with momentum, rate 0.2": (functools.partial(SGD, lr=0.2, momentum=0.9), BATCH),
    "the same, a rate as many times as large": (functools.partial(SGD, lr=0.2 * MORE / BATCH, momentum=0.9), MORE),
    "Adam on a larger batch": (ADAM, MANY),
    "Adam on a yet larger batch": (ADAM, MORE),
    "Adam on the recipe's": (ADAM, DATES_OF_ALL),
}
HEADINGS = ("optimizer", "letters in the mean", FP32, NEITHER, "gradients of weights zero", "updates lost")


def measured(length: int) -> dict[str, object]:
    """Of each setting the quality in both ways, and what the profile counts."""
    rows = {}
    for name, (optimizer_of, dates) in SETTINGS.items():
        begin = functools.partial(start, SEED, optimizer_of=optimizer_of, dates_of_all=dates)
        profiles: list = []
        quality = {FP32: train(begin(options={"enabled": False}), length, profiles)["quality"][-1]}
        quality[NEITHER] = train(begin(options=four_ways(1.0)[NEITHER]), length)["quality"][-1]
        ranges = measured_ranges(profiles, RECIPE.low)
        rows[name] = {
            "letters": dates * WRITTEN,
            "quality": quality,
            "zero": ranges["zero"]["weight gradient"],
            "lost": ranges["updates lost"],
        }
    return {"measure": RECIPE.measure, "steps": length, **machine(), "rows": rows}


def rows(results: dict) -> list[tuple[str, ...]]:
    """As the table has them."""
    return [
        (
            name,
            f"{row['letters']:,}",
            *(f"{row['quality'][way]:.1f}" for way in (FP32, NEITHER)),
            f"{row['zero']:.1%}",
            f"{row['lost']:.1%}",
        )
        for name, row in results["rows"].items()
    ]


def main(arguments: list[str] | None = None) -> dict:
    """Run all, print the table, and write what was measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="a few steps, and nothing is written")
    short = parser.parse_args(arguments).short
    results = measured(SHORT if short else RECIPE.length)
    table = Table(title=f"{RECIPE.title}: {RECIPE.measure}", box=box.SIMPLE_HEAD)
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
