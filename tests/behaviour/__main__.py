"""Print the table: `python tests/behaviour [part of a name] [--door DOOR]`."""

from __future__ import annotations

import argparse
import importlib
import os
from pathlib import Path

from doors import run
from table import DOORS, ROWS


def main() -> None:
    """Run the rows and print what each comes to, door by door."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="?", default="", help="rows whose name has this in it")
    parser.add_argument("--door", choices=DOORS, action="append", help="doors; all where none is given")
    options = parser.parse_args()
    for path in sorted(Path(__file__).parent.glob("rows_*.py")):
        importlib.import_module(path.stem)
    totals = {door: [0, 0, 0, 0] for door in options.door or DOORS}
    print(f"{'row':70}{'door':11}{'right':9}{'graph':8}{'builds':>6}{'first ms':>10}{'warm ms':>9}  what falls short")
    for name, row in ROWS.items():
        for door in [one for one in row.doors if options.part in name and one in totals]:
            outcome = run(row, door)
            right = "refused" if outcome.refused else "no" if outcome.faults else "yes"
            graph = "one" if outcome.one_graph else "-"
            counted = (True, right == "yes", right == "refused", outcome.one_graph and right == "yes")
            totals[door] = [now + more for now, more in zip(totals[door], counted, strict=True)]
            said = "; ".join([*outcome.faults[:2], outcome.refused])[:150].replace("\n", " ")
            times = f"{1e3 * outcome.first:10.1f}{1e3 * outcome.warm:9.2f}"
            print(f"{name:70}{door:11}{right:9}{graph:8}{outcome.builds:6}{times}  {said}".rstrip(), flush=True)
    for door, (rows, right, refused, one) in totals.items():
        print(f"{door}: {rows} rows, {right} right, {refused} refused, {one} right as one graph")


if __name__ == "__main__":
    os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")
    main()
