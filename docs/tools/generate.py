"""Writes what is made from the code: pictures, the references of passes, commands and errors, the stages of a step.

python docs/tools/generate.py           # `--check` only compares, `--pages` prints the table of pages
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import command_line
import error_catalogue
import pages
import passes_page
import rooms
import stages
import svg
import way

from amp_compiler.ir.run_file import read_run
from amp_compiler.report.plots import draw_runs

ROOT = Path(__file__).parents[2]
ARCHITECTURE = ROOT / "docs" / "architecture.md"
PICTURES = ROOT / "docs" / "pictures"


def draw_recorded() -> str:
    """The runs that `examples/08_watch_a_run.py` wrote, which stand beside the picture."""
    runs = {name: read_run(PICTURES / f"{name}.jsonl").records for name in ("scaled", "unscaled")}
    with tempfile.TemporaryDirectory() as folder:
        draw_runs(runs, Path(folder) / "runs.svg")
        return svg.darken((Path(folder) / "runs.svg").read_text(encoding="utf-8"))


FILES: dict[Path, Callable[[], str]] = {
    PICTURES / "rooms.svg": rooms.draw,
    PICTURES / "way.svg": way.draw,
    PICTURES / "way_narrow.svg": way.draw_narrow,
    PICTURES / "runs.svg": draw_recorded,
    ROOT / "passes" / "README.md": passes_page.page,
    ROOT / "docs" / "cli.md": command_line.page,
    ROOT / "docs" / "errors.md": error_catalogue.page,
    ARCHITECTURE: lambda: stages.fill(ARCHITECTURE.read_text(encoding="utf-8"), "mlp"),
}


def main() -> int:
    """Write the files, or compare them; 1 where one is not current."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit with 1 where a file is not current")
    parser.add_argument("--pages", action="store_true", help="print the table of pages, and write nothing")
    options = parser.parse_args()
    if options.pages:
        print(pages.table())
        return 0
    stale = []
    for path, make in FILES.items():
        new = make()
        if not path.exists() or path.read_text(encoding="utf-8") != new:
            stale.append(path.relative_to(ROOT).as_posix())
            if not options.check:
                path.write_text(new, encoding="utf-8")
    if stale:
        print(f"{'not current' if options.check else 'written'}: {', '.join(stale)}")
    return int(options.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
