"""The optimizer phase alone: AdamW by the kernels of `amp_compiler`, fused, foreach and compiled by torch, and a copy.

The phase begins with gradients as the backward's products leave them and ends with the weights that the next forward
reads. With 16-bit gradients torch's ways therefore include what torch.autocast does at its two ends: casting gradients
to FP32 and weights to 16 bits (the row `casts alone` has these apart). Ours always checks the gradients for inf and NaN
and takes their norm. In FP16 all unscale the gradients, clip them to a global norm and skip on overflow; torch with
`GradScaler` and `clip_grad_norm_`. All start from the same weights and do the same arithmetic.

Bytes per parameter are those that the calls must read and write, by count; the formula stands beside them. GB/s are
these bytes over the measured time, and the last column compares that with a copy of FP32 tensors (8 bytes per element
read and written) that takes its turn among the others. A copy of large arrays reads its target before it writes it on
some processors, an update in place never does, so more than 100% is possible.

On CUDA the tensors are made on the device, ours is replayed as one CUDA graph, as in a step, and the time is that of an
update among 20 in a row, by the device's clock.

    python benchmarks/update.py --models transformer --parameters 20000000
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import measuring
import torch
from measuring import coloured
from processes import CACHE
from rich.console import Console
from rich.table import Table
from update_runs import CASTS, COPY, FUSED, MIXES, VARIANTS, bytes_per_parameter, formula, make

PARAMETERS = {"cpu": 20_000_000, "cuda": 350_000_000}
GRADIENTS = ("bf16", "fp32", "fp16")
BURST = 20  # updates in a row on a GPU


def measure(mix: str, dtype: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per variant, for gradients of one type."""
    shapes = MIXES[mix](options.parameters)
    count = sum(torch.Size(shape).numel() for shape in shapes)
    chosen = [v for v in options.variants if v != CASTS or dtype != "fp32"]
    torch._dynamo.reset()
    phases: dict[str, Callable[[], object]] = {v: make(v, shapes, dtype, options.device) for v in chosen}
    if options.device == "cuda":
        bursts = -(-options.steps // BURST)
        times = measuring.interleaved_bursts(phases, bursts, BURST, options.seconds)
    else:
        times = measuring.interleaved(phases, options.steps, options.device, options.seconds)
    phases.clear()
    gc.collect()
    base = times.get(FUSED, next(iter(times.values())))[0]
    speeds = {v: bytes_per_parameter(v, dtype) * count / time[0] / 1e6 for v, time in times.items()}
    return [
        {
            "model": mix,
            "parameters": count,
            "tensors": len(shapes),
            "gradients": dtype,
            "variant": variant,
            "step_ms": time[0],
            "step_ms_10": time[1],
            "step_ms_90": time[2],
            "time_ratio": time[0] / base,
            "bytes_per_parameter": bytes_per_parameter(variant, dtype),
            "formula": formula(variant, dtype),
            "gb_per_s": speeds[variant],
            "copy_share": speeds[variant] / speeds[COPY] if COPY in speeds else None,
        }
        for variant, time in times.items()
    ]


def table(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    """One line per model, gradient type and variant."""
    result = Table(title=title, title_justify="left")
    for column in ("tensors of", "gradients", "variant"):
        result.add_column(column, no_wrap=True)
    for column in ("ms", "10 to 90 %", "ratio", "bytes per\nparameter", "GB/s", "of a\ncopy's"):
        result.add_column(column, justify="right")
    result.add_column("bytes: read and written")
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        result.add_row(
            row["model"],
            row["gradients"],
            row["variant"],
            f"{row['step_ms']:.2f}",
            f"{row['step_ms_10']:.2f} to {row['step_ms_90']:.2f}",
            coloured(row["time_ratio"]),
            str(row["bytes_per_parameter"]),
            f"{row['gb_per_s']:.1f}",
            "" if row["copy_share"] is None else f"{row['copy_share']:.0%}",
            row["formula"],
            end_section=following is None or following["gradients"] != row["gradients"],
        )
    return result


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    measuring.add_arguments(parser, MIXES, ["transformer"])
    parser.add_argument("--dtype", nargs="+", choices=GRADIENTS, default=list(GRADIENTS), help="of the gradients")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--parameters", type=int, help=f"about how many; default {PARAMETERS}")
    if parser.parse_known_args(argv)[0].device == "cuda":
        parser.set_defaults(steps=5 * BURST, seconds=10.0)
    options = parser.parse_args(argv)
    options.default = options.parameters is None and tuple(options.variants) == VARIANTS
    options.parameters = options.parameters or PARAMETERS[options.device]
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options = parse(argv)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(options.threads)
    default = options.default and options.models == ["transformer"] and tuple(options.dtype) == GRADIENTS
    path = options.json or (measuring.RESULTS / f"update_{options.device}.json" if default else None)
    rows: list[dict[str, Any]] = []
    console = Console(width=150)
    try:
        with tempfile.TemporaryDirectory() as cache:
            os.environ[CACHE] = cache
            for mix in options.models:
                for dtype in options.dtype:
                    with console.status(f"{mix}, {dtype}"):
                        rows += measure(mix, dtype, options)
                    measuring.write_results(path, "update", options, rows)
    finally:  # also where it is interrupted
        if rows:
            title = f"the update of {rows[0]['parameters']:,} parameters on {options.device}, ratios to fused AdamW"
            console.print(table(rows, title))
    return 0


if __name__ == "__main__":
    sys.exit(main())
