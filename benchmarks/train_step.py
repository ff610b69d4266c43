"""Time and memory of whole training steps: eager FP32, torch.autocast, torch.compile, and `amp.training_step`.

Every variant trains with AdamW; the torch ones with `fused=True`, and in FP16 with `GradScaler`. Each model comes with
a large batch, where matrix products take the time, and with a small one, where the update does. The variants take
turns, one step each, so that what else runs on the machine slows all of them; the time is the median, with the 10% and
90% quantiles. Memory and the time of the first step are measured in a process of their own per variant:
peak = bytes of the tensors that live between two steps + growth of the resident pages during a step.

    python benchmarks/train_step.py --models gpt2 lstm --steps 20
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import train_step_runs as runs
from machine import machine_facts
from rich.console import Console
from rich.table import Table

from amp_compiler.report.table import human_bytes

RESULTS = Path(__file__).parent / "results"
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}  # freed tensors leave the process


def measure(name: str, bound: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per variant."""
    memory = {variant: _apart(variant, name, bound, options) for variant in options.variants}
    torch._dynamo.reset()
    variants = {v: runs.Variant(v, name, bound, options.dtype, options.device) for v in options.variants}
    parameters = next(iter(variants.values())).parameters
    times = runs.interleaved(variants, options.steps, options.device)
    del variants
    gc.collect()
    base = times.get(runs.COMPILED, next(iter(times.values())))[0]
    base_memory = memory.get(runs.COMPILED, next(iter(memory.values())))
    return [
        {
            "model": name,
            "bound": bound,
            "parameters": parameters,
            "items": runs.items(name, bound),
            "variant": variant,
            "step_ms": median,
            "step_ms_10": low,
            "step_ms_90": high,
            "time_ratio": median / base,
            "items_per_s": 1000 * runs.items(name, bound) / median,
            **asdict(memory[variant]),
            "peak_bytes": memory[variant].peak_bytes,
            "memory_ratio": memory[variant].peak_bytes / base_memory.peak_bytes,
        }
        for variant, (median, low, high) in times.items()
    ]


def _apart(variant: str, name: str, bound: str, options: argparse.Namespace) -> runs.Memory:
    command = [sys.executable, __file__, "--apart", variant, name, bound]
    command += ["--dtype", options.dtype, "--device", options.device, "--threads", str(options.threads)]
    environment = {**os.environ, **MALLOC}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{variant} of {name}: {done.stderr[-2000:]}")
    return runs.Memory(**json.loads(done.stdout.splitlines()[-1]))


def table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """One line per model, batch and variant; ratios are to torch.compile."""
    made = Table(title=title, title_justify="left")
    for column in ("model", "bound by", "variant"):
        made.add_column(column, no_wrap=True)
    columns = ("step\nms", "10 to 90 %", "ratio", "tokens or\nimages / s", "peak\nmemory", "ratio", "of it\nstate")
    for column in (*columns, "first\nstep s"):
        made.add_column(column, justify="right")
    for number, row in enumerate(rows):
        last = number + 1 == len(rows) or (rows[number + 1]["model"], rows[number + 1]["bound"]) != (
            row["model"],
            row["bound"],
        )
        made.add_row(
            row["model"],
            row["bound"],
            row["variant"],
            f"{row['step_ms']:.1f}",
            f"{row['step_ms_10']:.0f} to {row['step_ms_90']:.0f}",
            _coloured(row["time_ratio"]),
            f"{row['items_per_s']:,.0f}",
            human_bytes(row["peak_bytes"]),
            _coloured(row["memory_ratio"]),
            human_bytes(row["state_bytes"]),
            f"{row['first_call_s']:.1f}",
            end_section=last,
        )
    return made


def _coloured(value: float) -> str:
    return f"[{'green' if value <= 1.0 else 'red'}]{value:.2f}[/]"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=runs.SHAPES, default=list(runs.SHAPES), metavar="NAME")
    parser.add_argument("--bounds", nargs="+", choices=runs.BOUNDS, default=list(runs.BOUNDS))
    parser.add_argument("--variants", nargs="+", choices=runs.VARIANTS, default=list(runs.VARIANTS))
    parser.add_argument("--dtype", choices=tuple(runs.TORCH_TYPES), default="bf16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="where the numbers go; those of a default run go to results/")
    parser.add_argument("--apart", nargs=3, metavar=("VARIANT", "MODEL", "BOUND"), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options = parse(argv)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(options.threads)
    if options.apart:
        step = runs.Variant(*options.apart, options.dtype, options.device)
        print(json.dumps(asdict(runs.measure_memory(step, options.device))))
        return 0
    console = Console(width=140)
    default = options.models == list(runs.SHAPES) and options.bounds == list(runs.BOUNDS)
    path = options.json or (RESULTS / f"train_step_{options.device}.json" if default else None)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        for name in options.models:
            for bound in options.bounds:
                with console.status(f"{name}, {bound}"):
                    rows += measure(name, bound, options)
                _write(path, rows, options)
    console.print(table(rows, f"training steps in {options.dtype} on {options.device}, ratios to torch.compile"))
    return 0


def _write(path: Path | None, rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    settings = {key: getattr(options, key) for key in ("dtype", "device", "steps", "threads")}
    facts = {"benchmark": "train_step", **machine_facts(options.device), "settings": settings, "rows": rows}
    path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
