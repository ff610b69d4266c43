"""What the first training step costs, cold and warm: CPU seconds of `torch.compile` and of `amp.training_step`.

Both run BF16 with fused AdamW, each first step in a process of its own. `cold` starts from caches that hold no code of
the model; `warm` is a second process, with what the first left in torch's caches and in ours. What is compiled once per
machine (headers, our native loops) is there before either. Counted are CPU seconds of the process and its children,
because seconds on the clock depend on what else runs: of the whole process, imports included, and of making and taking
the step alone, behind the imports. Numbers are medians of `--runs`.

    python benchmarks/first_step.py --models mlp gpt2 --runs 3
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import measuring
from first_step_run import NAMES, OURS, SMALLEST, THEIRS, VARIANTS
from measuring import coloured
from rich.console import Console
from rich.table import Table

_RUN = Path(__file__).parent / "first_step_run.py"
COLD, WARM = STARTS = ("cold", "warm")
_MEASURED = ("cpu_s", "s", "total_cpu_s")


def first_step(variant: str, name: str, caches: Path, threads: int) -> dict[str, Any]:
    """Take one first step in a process of its own; what it prints.

    Args:
        variant: one of `VARIANTS`.
        name: the model.
        caches: folder of all caches; the file in it that lists what to import is written by the model `smallest`.
        threads: of the process.

    Raises:
        SystemExit: the process failed; it has said why.
    """
    settings = {
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "torch"),
        "AMP_COMPILER_CACHE": str(caches / "amp_compiler"),
        "OMP_NUM_THREADS": str(threads),
    }
    command = [sys.executable, str(_RUN), variant, name, str(caches / "imports.json")]
    done = subprocess.run(command, env={**os.environ, **settings}, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{variant}, {name}: the process ended with code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def measure(name: str, variant: str, prepared: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for the cold and one for the warm start of a model.

    Args:
        name: the model.
        variant: one of `VARIANTS`.
        prepared: caches that hold what is compiled once per machine.
        options: the command line.
    """
    by_start: dict[str, list[dict[str, Any]]] = {start: [] for start in STARTS}
    for number in range(options.runs):
        with tempfile.TemporaryDirectory() as folder:
            caches = Path(folder) / "caches"
            shutil.copytree(prepared, caches)
            by_start[COLD].append(first_step(variant, name, caches, options.threads))
            by_start[WARM].append(first_step(variant, name, caches, options.threads))
            if number == 0:  # the cold start takes minutes: once unless asked for more
                for _ in range(options.warm_runs - 1):
                    by_start[WARM].append(first_step(variant, name, caches, options.threads))
    return [
        {
            "model": name,
            "variant": variant,
            "start": start,
            "runs": len(runs),
            **{key: statistics.median(run[key] for run in runs) for key in _MEASURED},
            "misses": max(run["looked"]["miss"] + run["looked"]["bypass"] for run in runs),
        }
        for start, runs in by_start.items()
    ]


def table(rows: list[dict[str, Any]]) -> Table:
    """One line per model and start."""
    result = Table(title="first training step, CPU seconds, ours / theirs", title_justify="left")
    for column in ("model", "start"):
        result.add_column(column, no_wrap=True)
    for column in (THEIRS, OURS, "ratio", "with imports\n" + THEIRS, OURS, "ratio"):
        result.add_column(column, justify="right")
    by_case = {(row["model"], row["start"], row["variant"]): row for row in rows}
    for name, start in dict.fromkeys((row["model"], row["start"]) for row in rows):
        pair = [by_case.get((name, start, variant)) for variant in (THEIRS, OURS)]
        cells = []
        for key in ("cpu_s", "total_cpu_s"):
            numbers = [row[key] if row else None for row in pair]
            ratio = "" if None in numbers else coloured(numbers[1] / numbers[0])
            cells += ["" if number is None else f"{number:.1f}" for number in numbers] + [ratio]
        result.add_row(name, start, *cells, end_section=start == WARM)
    return result


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=NAMES, default=list(NAMES), metavar="NAME")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--runs", type=int, default=1, help="cold starts, each with a warm one behind it")
    parser.add_argument("--warm-runs", type=int, default=3, help="warm starts behind the first cold one")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="where the numbers go; those of a default run go to results/")
    options = parser.parse_args(argv)
    options.device = "cpu"
    default = (options.models, options.variants) == (list(NAMES), list(VARIANTS))
    path = options.json or (measuring.RESULTS / "first_step_cpu.json" if default else None)
    rows: list[dict[str, Any]] = []
    console = Console(width=120)
    with tempfile.TemporaryDirectory() as folder:
        for variant in options.variants:
            with console.status(f"{variant}, what is compiled once per machine"):
                first_step(variant, SMALLEST, Path(folder) / variant, options.threads)
        for name in options.models:
            for variant in options.variants:
                with console.status(f"{name}, {variant}"):
                    rows += measure(name, variant, Path(folder) / variant, options)
                measuring.write_results(path, "first_step", options, rows)
    console.print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
