"""What a training step should cost on an H200, by a model, for `amp.training_step` and for torch.compile. Not measured.

    python benchmarks/cuda_model.py --models gpt2 vit
    python benchmarks/cuda_model.py --models gpt2 --check 4      # are layers linear?
    python benchmarks/cuda_model.py --models bert --kernels 30   # the dearest kernels of each side, at the lower depth

Every kernel of a step counts: those that Inductor writes, forward and backward, the update, the gradient scaler,
clipping. Its time is the longer of its bytes over 4.8 TB/s and its operations over 989 TFLOP/s (16 bits), and 2.5 µs a
kernel in a CUDA graph, 5 µs outside of one. So it is a floor, as if every kernel ran as fast as the chip allows; what
a GPU makes of it is another matter, and no figure here was measured on one. torch.compile stands in the mode
`reduce-overhead`, with `AdamW(fused=True)`; `max-autotune` has the same kernels but where a product of Triton's beats
cuBLAS, which only a device can tell. Ours in that mode (`--mode max-autotune`) has epilogues of cuBLASLt wherever they
fit, as if every trial on a device had succeeded.

Matrix products, convolutions and attention are needed whoever writes the loops around them. The lesser of what both
sides' take is the floor of a row: of what lies above it, the last column says which share of theirs ours is.

BF16 runs without loss scale and clipping, and neither side looks whether gradients are finite; FP16 with a dynamic loss
scale and clipping to a norm (`GradScaler` and `clip_grad_norm_` there). Sizes are `CUDA_SIZES` of `models.py`. Deep
models are counted at two depths, and each layer more costs what the layers between them do.

It needs a CUDA build of torch and a GPU of any kind, on which almost nothing is run: programs are written, and neither
compiled nor run. Elements are never read; memory is taken for weights and states of the two depths.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # what is written here is not for others to find

import cases
import cuda_model_runs as runs
import measuring
import models
import torch
from kernel_costs import CLASSES, H200, Cost, Kernel, at_depth
from measuring import coloured
from rich.console import Console
from rich.table import Table

OURS, THEIRS = VARIANTS = ("amp_compiler", "torch.compile")
SETTINGS = {"bf16": False, "fp16": True}  # with a loss scale and clipping
DEPTHS = (1, 2)
MODES = (DEFAULT, TUNED) = "default", "max-autotune"
_DEEP = ("gpt2", "bert", "llama", "t5", "vit")
# What cuDNN keeps of a sequence for the backward it tells only where it has a device.
COUNTED = [name for name in models.CUDA_SIZES if name not in cases.RECURRENT]
Row = dict[str, Any]


def counted(variant: str, name: str, size: models.Size, dtype: str, options: argparse.Namespace) -> list[Kernel]:
    """The kernels of one step, ours in the mode and without the passes that the options say."""
    runs.forget()
    try:
        if variant == OURS:
            return runs.ours(name, size, dtype, SETTINGS[dtype], options.skip, options.mode == TUNED)
        return runs.compiled(name, size, dtype, SETTINGS[dtype])
    finally:
        runs.forget()


def at_depths(
    variant: str, name: str, dtype: str, depths: Sequence[int], options: argparse.Namespace
) -> dict[int, Cost]:
    """The cost of one step at each depth."""
    sizes = {one: runs.with_layers(models.size_of(name, models.CUDA), one) for one in depths}
    return {one: Cost.of(counted(variant, name, size, dtype, options), H200) for one, size in sizes.items()}


def rows_of(name: str, dtype: str, options: argparse.Namespace) -> list[Row]:
    """One row per variant."""
    made: list[Row] = []
    floors: list[float] = []
    layers = models.size_of(name, models.CUDA).layers
    depths = options.depths if name in _DEEP else [layers]
    for variant in options.variants:
        found = at_depth(at_depths(variant, name, dtype, depths, options), layers)
        made.append(
            {"model": name, "dtype": dtype, "variant": variant, "layers": layers, "depths": depths, **found.facts()}
        )
        floors.append(1000 * found.product_seconds)
    base, floor = made[-1]["milliseconds"], min(floors)
    return [{**row, **_beside(row["milliseconds"], base, floor)} for row in made]


def _beside(milliseconds: float, base: float, floor: float) -> Row:
    above = (milliseconds - floor) / (base - floor)
    return {"ratio": milliseconds / base, "floor_milliseconds": floor, "ratio_above_floor": above}


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """One line per model, type and variant; below it the geometric means."""
    title = f"a training step on an {H200.name} by a model, not measured; ratios to torch.compile"
    deep = sorted({depth for row in rows for depth in row["depths"] if row["layers"] not in row["depths"]})
    caption = f"deep models from {' and '.join(map(str, deep))} layers" if deep else None
    made = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for column in ("model", "type", "variant"):
        made.add_column(column, no_wrap=True)
    for column in ("launches", "GB", "TFLOP", "ms", "ratio", "above\nfloor", *(f"{kind},\nms" for kind in CLASSES)):
        made.add_column(column, justify="right")
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        made.add_row(
            row["model"],
            row["dtype"],
            row["variant"],
            f"{row['launches']:,.0f}",
            f"{row['bytes'] / 1e9:.2f}",
            f"{row['flops'] / 1e12:.2f}",
            f"{row['milliseconds']:.3f}",
            coloured(row["ratio"]),
            coloured(row["ratio_above_floor"]),
            *(f"{1000 * row['seconds'].get(kind, 0.0):.3f}" for kind in CLASSES),
            end_section=following is None or (row["model"], row["dtype"]) != (following["model"], following["dtype"]),
        )
    for dtype, mean in means(rows).items():
        above = means(rows, "ratio_above_floor")[dtype]
        blank = [""] * len(CLASSES)
        made.add_row("geometric mean", dtype, OURS, *[""] * 4, coloured(mean), coloured(above), *blank)
    return made


def means(rows: Sequence[Mapping[str, Any]], ratio: str = "ratio") -> dict[str, float]:
    """Geometric mean of our ratios, by type."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row["variant"] == OURS:
            found.setdefault(row["dtype"], []).append(row[ratio])
    return {dtype: statistics.geometric_mean(ratios) for dtype, ratios in found.items()}


def check_depth(name: str, dtype: str, options: argparse.Namespace) -> Table:
    """How far the cost of a third depth is from what two depths say of it."""
    made = Table(title=f"{name}, {dtype}: {options.check} layers counted, over what {options.depths} say of them")
    for column in ("variant", "launches", "bytes", "operations", "time"):
        made.add_column(column, justify="right")
    for variant in options.variants:
        costs = at_depths(variant, name, dtype, [*options.depths, options.check], options)
        seen = costs.pop(options.check)
        said = at_depth(costs, options.check)
        pairs = [(getattr(seen, one), getattr(said, one)) for one in ("launches", "bytes", "flops", "total_seconds")]
        made.add_row(variant, *(f"{one / other:.5f}" for one, other in pairs))
    return made


def dearest(title: str, kernels: Sequence[Kernel], count: int) -> Table:
    """The kernels that take longest by the model, those of equal name and bytes in one line."""
    groups: dict[tuple[str, int, int], list[Kernel]] = {}
    for one in kernels:
        groups.setdefault((one.name, one.read, one.written), []).append(one)
    total = sum(one.seconds(H200) for one in kernels)
    made = Table(title=title, title_justify="left")
    made.add_column("kernel", max_width=90, no_wrap=True)
    for column in ("times", "MB read", "MB written", "GFLOP", "µs in all", "share"):
        made.add_column(column, justify="right")
    ordered = sorted(groups.values(), key=lambda group: sum(one.seconds(H200) for one in group), reverse=True)
    for group in ordered[:count]:
        first, seconds = group[0], sum(one.seconds(H200) for one in group)
        sizes = (f"{value / 1e6:,.1f}" for value in (first.read, first.written))
        rest = (f"{first.flops / 1e9:,.0f}", f"{1e6 * seconds:,.1f}", f"{seconds / total:.1%}")
        made.add_row(first.name, str(len(group)), *sizes, *rest)
    return made


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(models.CUDA_SIZES), default=COUNTED)
    parser.add_argument("--dtype", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--depths", nargs="+", type=int, default=list(DEPTHS), help="of deep models, in layers")
    parser.add_argument(
        "--check", type=int, help="count at this depth too, and say how far it is from what is expected"
    )
    parser.add_argument("--kernels", type=int, help="only list so many of the dearest kernels of each variant")
    parser.add_argument(
        "--skip", nargs="+", default=[], metavar="PASS", help="leave passes of ours out, to see their worth"
    )
    parser.add_argument(
        "--mode", choices=MODES, default=DEFAULT, help="of ours, as if every trial on a device succeeded"
    )
    parser.add_argument("--json", type=Path, help="where the numbers go; those of a default run go to results/")
    options = parser.parse_args(argv)
    options.device, options.threads = "cpu", torch.get_num_threads()  # no GPU has a part in the figures
    everything = {"models": COUNTED, "variants": list(VARIANTS), "dtype": list(SETTINGS), "skip": [], "mode": DEFAULT}
    options.default = all(getattr(options, one) == value for one, value in everything.items())
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Count, print, write."""
    options = parse(argv)
    if not torch.cuda.is_available():
        print("no GPU: programs for one are written only where torch finds one, whatever it is", file=sys.stderr)
        return 2
    warnings.filterwarnings("ignore")
    console = Console(width=190)
    if options.check:
        for name in options.models:
            for dtype in options.dtype:
                console.print(check_depth(name, dtype, options))
        return 0
    if options.kernels:
        for name in options.models:
            size = models.size_of(name, models.CUDA)
            size = runs.with_layers(size, options.depths[0]) if name in _DEEP else size
            for dtype in options.dtype:
                for variant in options.variants:
                    found = counted(variant, name, size, dtype, options)
                    console.print(dearest(f"{name}, {dtype}, {variant}", found, options.kernels))
        return 0
    path = options.json or (measuring.RESULTS / "cuda_model.json" if options.default else None)
    rows: list[Row] = []
    for name in options.models:
        for dtype in options.dtype:
            with console.status(f"{name}, {dtype}"):
                rows += rows_of(name, dtype, options)
            measuring.write_results(path, "cuda_model", options, rows)
    console.print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
