"""How long the page of a large plan takes to open in Chromium, and what one does on it.

python benchmarks/page.py           # 500 and 5,000 nodes; writes results/page.json

Times are of the browser's own clock, the median of several openings: to open is from the start of loading until the
script has run and all is laid out. It ends with 1 where a page of 5,000 nodes takes two seconds or more to open.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import machine_facts
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "tools"), str(ROOT / "tests")]
import chromium  # noqa: E402
import page_plans  # noqa: E402

BOUND_MS = 2000  # to open a page of 5,000 nodes
LAID_OUT = "document.body.getBoundingClientRect(); "
OPENED = LAID_OUT + "return performance.now();"
ACT = "const begun = performance.now(); {act}; " + LAID_OUT + "return performance.now() - begun;"
ACTS = {
    "search": "const field = document.getElementById('search'); field.value = 'softmax';"
    "field.dispatchEvent(new Event('input'))",
    "unfold": "document.querySelector('.module.folded').dispatchEvent(new MouseEvent('click', {bubbles: true}))",
    "unfold_all": "document.getElementById('unfold').click()",
}


def measure(window: Any, page: Path, repeats: int) -> dict[str, float]:
    """Milliseconds to open a page, to search, to unfold one module and to unfold all: medians."""
    times_of: dict[str, list[float]] = {name: [] for name in ("open", *ACTS)}
    for _ in range(repeats):
        window.open(page)
        times_of["open"].append(window.run(OPENED))
        for name, act in ACTS.items():
            times_of[name].append(window.run(ACT.replace("{act}", act)))
    return {f"{name}_ms": round(statistics.median(times), 1) for name, times in times_of.items()}


def main() -> int:
    """Measure, print a table, write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="500,5000", help="numbers of nodes")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "page.json")
    options = parser.parse_args()
    if lacking := chromium.missing():
        print(lacking, file=sys.stderr)
        return 2
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, chromium.window() as window:
        browser = window.driver.capabilities["browserVersion"]
        for size in map(int, options.sizes.split(",")):
            page = Path(folder) / f"{size}.html"
            page_plans.transformer(size).to_html(page)
            kilobytes = page.stat().st_size // 1000
            rows.append({"nodes": size, "kilobytes": kilobytes, **measure(window, page, options.repeats)})
    table = Table("nodes", "page, kB", "open, ms", "search, ms", "unfold a module, ms", "unfold all, ms")
    for row in rows:
        table.add_row(*(f"{value:,.0f}" for value in row.values()))
    Console().print(table)
    results = {"what": "the page of a plan in Chromium", "chromium": browser, "repeats": options.repeats, "rows": rows}
    options.json.write_text(json.dumps({**machine_facts(), **results}, indent=1) + "\n", encoding="utf-8")
    return int(any(row["nodes"] <= 5000 and row["open_ms"] >= BOUND_MS for row in rows))


if __name__ == "__main__":
    sys.exit(main())
