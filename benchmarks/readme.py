"""Write the README's tables from benchmarks/results/*.json: `python benchmarks/readme.py` (`--check` only compares).

Every table stands between `<!-- table: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"


def _load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def parity_table() -> str:
    """Accuracy and cast traffic beside torch.autocast, per model."""
    data = _load("autocast_parity")
    lines = [
        "| model | output error, autocast | ours / autocast | gradient error, autocast | ours / autocast"
        " | cast MB, autocast | ours / autocast |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in data["models"]:
        lines.append(
            f"| {row['model']} | {row['autocast_output_error']:.2e} | {row['output_ratio']:.2f} "
            f"| {row['autocast_grad_error']:.2e} | {row['grad_ratio']:.2f} "
            f"| {row['autocast_bytes'] / 1e6:.1f} | {row['bytes_ratio']:.2f} |"
        )
    return "\n".join(lines)


def plan_table() -> str:
    """Planning time against graph size."""
    rows = _load("plan")["rows"]
    lines = ["| rules | nodes | seconds | µs per node |", "|---|---|---|---|"]
    lines += [f"| {r['rules']} | {r['nodes']:,} | {r['seconds']:.2f} | {r['us_per_node']:.0f} |" for r in rows]
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {"parity": parity_table, "plan": plan_table}


def render(text: str) -> str:
    """The README's text with every table made anew."""
    for name, make in TABLES.items():
        block = f"<!-- table: {name} -->\n{make()}\n<!-- end -->"
        text = re.sub(rf"<!-- table: {name} -->.*?<!-- end -->", lambda _, block=block: block, text, flags=re.DOTALL)
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit with 1 where the README is not current")
    options = parser.parse_args()
    old = README.read_text(encoding="utf-8")
    new = render(old)
    if options.check:
        return int(old != new)
    README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
