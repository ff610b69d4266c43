"""The zoo of gradients: what the recipes measured, as one picture each and as the tables of docs/zoo.md.

python examples/recipes/zoo.py                 # or: make zoo
"""

import json
import re
from pathlib import Path
from typing import Any

import seeds
import trials as tried
from common import FOLDER, FP32, GOOD, HEADINGS, last, paired, rows, why
from pictures import picture

DOCS = Path(__file__).parents[2] / "docs"


def section(results: dict[str, Any]) -> str:
    """The table of a recipe, and what its profile says, in Markdown."""
    lines = ["| " + " | ".join(HEADINGS).format(**results) + " |", "|---" * len(HEADINGS) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows(results)]
    return "\n".join([*lines, "", why(results)])


def trials() -> str:
    """The table of the settings in which the dates were tried."""
    lines = ["| " + " | ".join(tried.HEADINGS) + " |", "|---" * len(tried.HEADINGS) + "|"]
    results = json.loads(tried.RESULT.read_text(encoding="utf-8"))
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in tried.rows(results))])


def more_seeds() -> str:
    """The table of the recipes that were trained with more seeds."""
    lines = ["| " + " | ".join(seeds.HEADINGS) + " |", "|---" * len(seeds.HEADINGS) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in seeds.rows(seeds.load()))])


def machines(recipes: list[dict[str, Any]]) -> str:
    """Where it was measured."""
    one, cpus = recipes[0], " and ".join(sorted({results["cpu"] for results in recipes}))
    seconds = sum(results["seconds"] for results in recipes)
    return (
        f"Measured on {cpus}, one thread, torch {one['versions']['torch']}, Python {one['versions']['python']}, "
        f"{one['date']}: {seconds / 60:.0f} minutes for all, other work beside it."
    )


def chance(recipes: list[dict[str, Any]]) -> str:
    """How the ways that have to come out as FP32 does lie about it, over all recipes."""
    apart = [
        paired(last(results, way), last(results, FP32), results["higher"])
        for results in recipes
        for way in results["runs"]
        if way in GOOD
    ]
    worse, better = sum(one < -1 for one in apart), sum(one > 1 for one in apart)
    return (
        f"Of all {len(apart)} ways that have to come out as FP32 does, {worse} are worse seed by seed by more than one "
        f"standard error, and {better} better. Chance alone would put about a fifth on each side, of so few seeds."
    )


def render(text: str, recipes: dict[str, dict[str, Any]]) -> str:
    """The page with every table made anew, between `<!-- recipe: NAME -->` and `<!-- end -->`."""
    every = list(recipes.values())
    parts = {name: section(results) for name, results in recipes.items()}
    parts |= {"machine": machines(every), "chance": chance(every), "trials": trials(), "seeds": more_seeds()}
    for name, content in parts.items():
        block = f"<!-- recipe: {name} -->\n{content}\n<!-- end -->"
        text = re.sub(rf"<!-- recipe: {name} -->.*?<!-- end -->", lambda _, block=block: block, text, flags=re.DOTALL)
    return text


def load() -> dict[str, dict[str, Any]]:
    """The results of the full runs by the name of the recipe."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))}


def main() -> None:
    recipes = load()
    (DOCS / "pictures" / "zoo").mkdir(exist_ok=True)
    for name, results in recipes.items():
        (DOCS / "pictures" / "zoo" / f"{name}.svg").write_bytes(picture(results))
    page = DOCS / "zoo.md"
    page.write_text(render(page.read_text(encoding="utf-8"), recipes), encoding="utf-8")
    print(f"{len(recipes)} pictures in docs/pictures/zoo/, and the tables of docs/zoo.md")


if __name__ == "__main__":
    main()
