"""Print the table: `python tests/behaviour [part of a name …] [--door DOOR]`."""

from __future__ import annotations

import argparse
import importlib
import os
from pathlib import Path

from doors import Outcome, run
from table import DOORS, ROWS

HEAD = f"{'row':70}{'door':11}{'right':9}{'graph':8}{'builds':>6}{'first ms':>10}{'warm ms':>9}  what falls short"


def line(name: str, door: str, outcome: Outcome) -> str:
    """What a row came to through a door."""
    graph = "one" if outcome.one_graph else "-"
    said = "; ".join([*outcome.faults[:2], outcome.refused])[:160].replace("\n", " ").strip("; ")
    times = f"{1e3 * outcome.first:10.1f}{1e3 * outcome.warm:9.2f}"
    return f"{name:70}{door:11}{verdict(outcome):9}{graph:8}{outcome.builds:6}{times}  {said}".rstrip()


def verdict(outcome: Outcome) -> str:
    """Whether it is right."""
    return "no" if outcome.faults else "refused" if outcome.refused else "yes"


def sums(outcomes: dict[tuple[str, str], Outcome]) -> str:
    """How many rows are right, door by door."""
    lines = []
    for door in DOORS:
        found = [one for (_, through), one in outcomes.items() if through == door]
        right = [one for one in found if verdict(one) == "yes"]
        refused = sum(verdict(one) == "refused" for one in found)
        whole = sum(one.one_graph for one in right)
        lines.append(f"{door}: {len(found)} rows, {len(right)} right, {refused} refused, {whole} right as one graph")
    return "\n".join(lines)


def main() -> None:
    """Run the rows and print what each comes to, door by door."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=[""], help="rows whose name has one of these in it")
    parser.add_argument("--door", choices=DOORS, action="append", help="doors; all where none is given")
    options = parser.parse_args()
    for path in sorted(Path(__file__).parent.glob("rows_*.py")):
        importlib.import_module(path.stem)
    print(HEAD)
    outcomes = {}
    for name, row in ROWS.items():
        for door in row.doors:
            if door in (options.door or DOORS) and any(part in name for part in options.parts):
                outcomes[name, door] = run(row, door)
                print(line(name, door, outcomes[name, door]), flush=True)
    print(sums(outcomes))


if __name__ == "__main__":
    os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")
    main()
