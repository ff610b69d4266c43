"""Accuracy and cast traffic of amp.compile beside torch.autocast, on random-initialised models.

Per model: one forward and backward in FP32, under torch.autocast and with amp.compile. The errors are relative L2
distances to FP32 of the outputs (loss and logits) and of all parameter gradients.

Cast bytes are those of one forward. Autocast's are counted in the dispatcher; amp.compile's are given twice, as the
plan says and as the same counter sees them (that includes casts inside composite ops, which no plan knows of).
amp.compile returns the types that the FP32 model returns, while autocast may return 16-bit tensors; so that both end
alike, the bytes of bringing these to FP32 are added to autocast's, and kept apart in the JSON file.

Exits with 1 where amp.compile's error is more than 1.2 times autocast's, or its cast bytes are more than autocast's.

    python benchmarks/autocast_parity.py --models bert llama --seeds 3
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import models
import torch
from machine import machine_facts
from parity import BYTES_BOUND, ERROR_BOUND, TORCH_TYPES, Parity, Settings, measure
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from amp_compiler.report.table import human_bytes

RESULTS = Path(__file__).parent / "results" / "autocast_parity.json"


def table(rows: Sequence[Parity], settings: Settings) -> Table:
    """One line per model."""
    result = Table(
        title=f"amp.compile ({settings.rules}, {settings.backend}) beside torch.autocast: "
        f"{settings.dtype} on {settings.device}, {settings.size} models, {settings.seeds} seeds"
    )
    result.add_column("model")
    for column in ("output error\nautocast", "\nours", "\nratio", "gradient error\nautocast", "\nours", "\nratio"):
        result.add_column(column, justify="right")
    for column in ("bytes cast\nautocast", "\nplan", "\ncounted", "\nratio", "nodes\nlow", "\nfp32", "\nkeep"):
        result.add_column(column, justify="right")
    for row in rows:
        result.add_row(
            row.model,
            f"{row.autocast_output_error:.2e}",
            f"{row.amp_output_error:.2e}",
            _coloured(row.output_ratio, ERROR_BOUND),
            f"{row.autocast_grad_error:.2e}",
            f"{row.amp_grad_error:.2e}",
            _coloured(row.grad_ratio, ERROR_BOUND),
            human_bytes(row.autocast_bytes),
            human_bytes(row.amp_bytes),
            human_bytes(row.amp_counted_bytes),
            _coloured(row.bytes_ratio, BYTES_BOUND),
            str(row.low_nodes),
            str(row.fp32_nodes),
            str(row.keep_nodes),
        )
    return result


def _coloured(value: float, bound: float) -> str:
    return f"[{'green' if value <= bound else 'bold red'}]{value:.2f}[/]"


def report(rows: Sequence[Parity], settings: Settings) -> dict[str, Any]:
    """The rows and what is needed to understand them, ready for JSON."""
    return {
        "benchmark": "autocast_parity",
        **machine_facts(settings.device),
        "settings": asdict(settings),
        "bounds": {"error_ratio": ERROR_BOUND, "bytes_ratio": BYTES_BOUND},
        "models": [
            {
                **asdict(row),
                "output_ratio": row.output_ratio,
                "grad_ratio": row.grad_ratio,
                "bytes_ratio": row.bytes_ratio,
            }
            for row in rows
        ],
    }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=models.NAMES, default=list(models.NAMES), metavar="NAME")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--size", choices=tuple(models.SIZES), default="small")
    parser.add_argument("--rules", default="default")
    parser.add_argument("--dtype", choices=tuple(TORCH_TYPES), default="bf16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--threads", type=int, default=1, help="the models are small: more threads are seldom faster")
    parser.add_argument("--json", type=Path, help="where the numbers go; those of a default run go to results/")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 where a bound is broken."""
    options = parse(argv)
    settings = Settings(
        rules=options.rules,
        dtype=options.dtype,
        device=options.device,
        backend=options.backend,
        size=options.size,
        seeds=max(1, options.seeds),
    )
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore")
    console = Console(width=160)
    rows = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=len(options.models))
        for name in options.models:
            progress.update(task, description=name)
            rows.append(measure(name, settings))
            progress.advance(task)
    console.print(table(rows, settings))
    broken = [f"{row.model}: {'; '.join(row.broken())}" for row in rows if row.broken()]
    console.print("\n".join(broken) or "every model is within the bounds")
    path = options.json
    if path is None and settings == Settings() and options.models == list(models.NAMES):
        path = RESULTS
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report(rows, settings), indent=1) + "\n", encoding="utf-8")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
