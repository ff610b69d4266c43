"""A short table of what pytest wrote with `--junitxml`: how many passed, which failed and why, what they measured.

python tools/test_table.py kernels.xml training.xml --json tests.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

WIDTH = 150  # of a line with a reason


def read(path: Path) -> list[dict[str, Any]]:
    """One entry for each test of a file: name, outcome, seconds, the first line of the reason, what it measured."""
    return [entry(case) for case in ElementTree.parse(path).getroot().iter("testcase")]


def entry(case: ElementTree.Element) -> dict[str, Any]:
    """One test."""
    outcome, reason = "passed", ""
    for kind in ("skipped", "error", "failure"):
        element = case.find(kind)
        if element is not None:
            outcome, reason = kind, (element.get("message") or "").partition("\n")[0]
    measured = {one.get("name", ""): one.get("value", "") for one in case.iter("property")}
    place = case.get("classname", "").rpartition(".")[2]
    name = f"{place}: {case.get('name', '')}"
    return {"test": name, "outcome": outcome, "seconds": float(case.get("time", 0)), "reason": reason, **measured}


def main() -> int:
    """Print and write; 1 where a file is missing or holds no test."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tables: dict[str, list[dict[str, Any]]] = {}
    for path in options.files:
        try:
            tables[path.stem] = read(path)
        except (OSError, ElementTree.ParseError) as cause:
            print(f"{path.name}: {cause}", file=sys.stderr)
            tables[path.stem] = []
    plain = {"test", "outcome", "seconds", "reason"}
    for tests in tables.values():
        for one in tests:
            measured = ", ".join(f"{key} {value}" for key, value in one.items() if key not in plain)
            if one["outcome"] != "passed" or measured:
                print(f"{one['outcome']:8} {one['seconds']:6.1f} s  {one['test']}  {measured or one['reason']}"[:WIDTH])
    for name, tests in tables.items():
        counts = Counter(one["outcome"] for one in tests)
        summary = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())) or "nothing ran"
        print(f"{name:10} {summary}, {sum(one['seconds'] for one in tests):.0f} s")
    if options.json:
        options.json.write_text(json.dumps(tables, indent=1) + "\n", encoding="utf-8")
    return 0 if all(tables.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
