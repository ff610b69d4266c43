"""What `amp.profile` costs: a training step alone and with its exponents counted, in turns.

    python benchmarks/range_profile.py
    python benchmarks/range_profile.py --models gpt2 --dtype fp16

Times are of this process alone (CPU time), in milliseconds: the median of some steps, after the first few. The batch is
the large one of `train_step.py`. Both are the same step object, so that what is timed differs by the counting alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import Any

import cases
import torch
from measuring import RESULTS, add_arguments, write_results

import amp_compiler as amp

MODELS = ("mlp", "digits", "gpt2", "bert")
WARM_UPS = 3


def measured(name: str, dtype: str, steps: int) -> dict[str, Any]:
    """One row: the step alone, and profiled."""
    model, batch = cases.build(name, cases.LARGE, "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    step = amp.training_step(model, cases.loss_of, optimizer, dtype=dtype)
    times: dict[str, list[float]] = {"plain": [], "profiled": []}

    def batches() -> Iterator[Any]:
        for number in range(steps + WARM_UPS):
            begin = time.process_time()
            step(batch)
            between = time.process_time()
            yield (batch,)  # the profiled step runs until the next one is asked for
            if number >= WARM_UPS:
                times["plain"].append(1000 * (between - begin))
                times["profiled"].append(1000 * (time.process_time() - between))

    profile = amp.profile(step, batches())
    counted = sum(row.histogram.total for row in profile.rows if row.kind != "weight") // profile.batches
    plain, profiled = (statistics.median(times[kind]) for kind in ("plain", "profiled"))
    return {
        "model": name, "dtype": dtype, "parameters": sum(one.numel() for one in model.parameters()), "counted": counted,
        "step_ms": plain, "profiled_ms": profiled, "ratio": profiled / plain,
    }  # fmt: skip


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, cases.SHAPES, MODELS)
    parser.add_argument("--dtype", choices=("bf16", "fp16"), nargs="+", default=["bf16", "fp16"])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(
        f"{'model':10} {'dtype':5} {'parameters':>11} {'counted':>11} {'step':>8} {'profiled':>9} {'ratio':>6}   CPU ms"
    )
    rows = []
    for name in options.models:
        for dtype in options.dtype:
            row = measured(name, dtype, options.steps)
            rows.append(row)
            print(
                f"{name:10} {dtype:5} {row['parameters']:11,} {row['counted']:11,} {row['step_ms']:8.1f}"
                f" {row['profiled_ms']:9.1f} {row['ratio']:6.2f}",
                flush=True,
            )
    default = tuple(options.models) == MODELS and options.dtype == ["bf16", "fp16"]
    path = options.json or (RESULTS / "range_profile_cpu.json" if default else None)
    write_results(path, "range_profile", options, rows)


if __name__ == "__main__":
    main()
