"""What it costs to look for weights that were written past their version counters, of a step and of a call.

    python benchmarks/look_cost.py          # GPT-2 (148 parameters, 124 million elements), an MLP of 1,000 parameters
    python benchmarks/look_cost.py --models mlp-20 --turns 5

Steps and calls with the look and without it run in turns, in one process with one thread, and CPU time is counted, so
that others on the machine take part of none. A turn is too noisy to tell one part in a hundred of a step; so the look
itself is timed within each of them as well, with the caches as the step has left them: that is the part printed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import cases
import models
import torch
from machine import cpu_name
from measuring import RESULTS, write_results
from torch import Tensor, nn

import amp_compiler as amp
from amp_compiler.ops.stale_copies import CopyWatch

GPT2 = models.Size(50257, 768, 12, 12, batch=1, tokens=128, image=0, widening=4)
WIDTH, ROWS = 64, 256
MOST_PERCENT = 2.0  # of a step, the aim
Run = Callable[[], Any]


def gpt2() -> tuple[nn.Module, Run, Run]:
    """The model, a step in BF16 with AdamW, and a call without gradients."""
    model, batch = models.build_of("gpt2", GPT2)
    step = _step(model, cases.loss_of, batch)
    fast = amp.compile(model, dtype="bf16")
    return model, lambda: step(batch), lambda: fast(**batch)


def mlp(layers: int) -> tuple[nn.Module, Run, Run]:
    """The same of an MLP of two parameters a layer."""
    model, x = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)]), torch.randn(ROWS, WIDTH)
    step = _step(model, lambda m, x: m(x).square().mean(), x)
    fast = amp.compile(model, dtype="bf16")
    return model, lambda: step(x), lambda: fast(x)


def _step(model: nn.Module, loss: Callable[..., Tensor], batch: Any) -> amp.TrainingStep:
    return amp.training_step(model, loss, torch.optim.AdamW(model.parameters(), 1e-4), dtype="bf16")


def timed(run: Run, turns: int) -> tuple[float, float, float]:
    """Median CPU milliseconds of a run with the look, of one without, and of the look itself."""
    look, looked = CopyWatch.look, 0.0

    def counted(watch: CopyWatch, turn: int = 0) -> list[int]:
        nonlocal looked
        start = time.process_time()
        stale = look(watch, turn)
        looked += time.process_time() - start
        return stale

    rows = []
    for _ in range(turns + 2):
        row = []
        for instead in (counted, lambda watch, turn=0: []):
            with mock.patch.object(CopyWatch, "look", instead):
                start, looked = time.process_time(), 0.0
                run()
                row += [time.process_time() - start, looked]
        rows.append((row[0], row[2], row[1]))
    with_look, without, alone = (1000 * statistics.median(column) for column in zip(*rows[2:], strict=True))
    return with_look, without, alone


def measured(name: str, turns: int) -> list[dict[str, Any]]:
    """One row for a step, and one for a call in eval mode."""
    model, step, call = gpt2() if name == "gpt2" else mlp(int(name.partition("-")[2]))
    facts = {"model": name, "parameters": sum(1 for _ in model.parameters())}

    def row(kind: str, run: Run) -> dict[str, Any]:
        for _ in range(4):
            run()
        with_look, without, alone = timed(run, turns)
        return {**facts, "kind": kind, "ms": with_look, "without_ms": without, "look_ms": alone,
                "percent": 100 * alone / with_look}  # fmt: skip

    rows = [row("step", step)]
    model.eval()
    with torch.no_grad():
        return [*rows, row("call", call)]


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["gpt2", "mlp-500"], help="gpt2, mlp-LAYERS")
    parser.add_argument("--turns", type=int, default=25, help="of a run with the look and one without")
    parser.add_argument("--json", type=Path, default=RESULTS / "look_cost_cpu.json", help="where the numbers go")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    print(f"{cpu_name()}; CPU milliseconds, medians of {options.turns}; aim: at most {MOST_PERCENT:g}%")
    print(f"{'model':8} {'parameters':>10}  kind {'with':>9} {'without':>9} {'look':>8}    part")
    for row in (row for name in options.models for row in measured(name, options.turns)):
        rows.append(row)
        print(
            f"{row['model']:8} {row['parameters']:10,}  {row['kind']} {row['ms']:9.2f} {row['without_ms']:9.2f}"
            f" {row['look_ms']:8.3f} {row['percent']:6.2f}%",
            flush=True,
        )
    options.device, options.steps, options.threads = "cpu", options.turns, 1
    write_results(options.json, "look_cost", options, rows)


if __name__ == "__main__":
    main()
