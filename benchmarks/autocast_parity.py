"""Accuracy and cast traffic of amp.compile beside torch.autocast, on random-initialised models.

Per model: one forward and backward in FP32, under torch.autocast and with amp.compile. The errors are relative L2
distances to FP32 of the outputs (loss and logits) and of all parameter gradients; the cast bytes are those of one
forward, counted in the dispatcher for autocast and read from the plan for amp.compile.

Exits with 1 where amp.compile's error is more than 1.2 times autocast's, or its cast bytes are more than autocast's.

    python benchmarks/autocast_parity.py --models bert llama --seeds 3
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import models
import torch
from machine import machine_facts
from rich.console import Console
from rich.table import Table
from torch import nn

import amp_compiler as amp
from amp_compiler.report.autocast_counter import CastCounter, count_autocast
from amp_compiler.report.table import human_bytes

ERROR_BOUND = 1.2
RESULTS = Path(__file__).parent / "results" / "autocast_parity.json"
TORCH_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Settings:
    """What is measured: rules, 16-bit type, device, backend, model size and the seeds to average over."""

    rules: str = "default"
    dtype: str = "bf16"
    device: str = "cpu"
    backend: str = "eager"
    size: str = "small"
    seeds: int = 3


@dataclass(frozen=True)
class Parity:
    """The measurements of one model; errors are means over the seeds, bytes are of one forward.

    `counted_bytes` are the casts that the dispatcher sees when the rewritten graph runs node by node: a check of the
    plan's own number. `worst_grad_ratio` compares the two errors of the parameter where amp.compile does worst.
    """

    model: str
    autocast_output_error: float
    amp_output_error: float
    autocast_grad_error: float
    amp_grad_error: float
    worst_grad_ratio: float
    worst_grad: str
    autocast_bytes: int
    amp_bytes: int
    counted_bytes: int
    low_nodes: int
    fp32_nodes: int
    keep_nodes: int
    casts: int

    @property
    def output_ratio(self) -> float:
        return ratio(self.amp_output_error, self.autocast_output_error)

    @property
    def grad_ratio(self) -> float:
        return ratio(self.amp_grad_error, self.autocast_grad_error)

    @property
    def bytes_ratio(self) -> float:
        return ratio(self.amp_bytes, self.autocast_bytes)

    def broken(self) -> list[str]:
        """What is out of bounds, in words."""
        found = []
        if not self.output_ratio <= ERROR_BOUND:
            found.append(f"output error {self.output_ratio:.2f} times autocast's")
        if not self.grad_ratio <= ERROR_BOUND:
            found.append(f"gradient error {self.grad_ratio:.2f} times autocast's")
        if self.amp_bytes > self.autocast_bytes:
            found.append(f"{self.amp_bytes} bytes cast, autocast {self.autocast_bytes}")
        return found


@dataclass(frozen=True)
class Run:
    """What one forward and backward gave: loss and logits as one vector, and the gradient of each parameter."""

    outputs: torch.Tensor
    grads: dict[str, torch.Tensor]


def ratio(ours: float, theirs: float) -> float:
    """`ours / theirs`, where nothing to nothing is 1."""
    if theirs == 0:
        return 1.0 if ours == 0 else float("inf")
    return ours / theirs


def forward_backward(model: nn.Module, call: Callable[[], Any]) -> Run:
    """Run `call` (a forward of `model`) and its backward."""
    model.zero_grad(set_to_none=True)
    loss, logits = models.loss_and_logits(call())
    loss.backward()
    outputs = torch.cat([loss.detach().double().reshape(1), logits.detach().double().flatten()])
    grads = {name: p.grad.double().clone() for name, p in model.named_parameters() if p.grad is not None}
    return Run(outputs, grads)


def relative_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """L2 distance over the L2 norm of `exact`."""
    return float((got - exact).norm() / exact.norm())


def all_grads(run: Run, names: Sequence[str]) -> torch.Tensor:
    return torch.cat([run.grads[name].flatten() for name in names])


def measure(name: str, settings: Settings) -> Parity:
    """Measure one model over all seeds."""
    seeds = [_measure_seed(name, seed, settings) for seed in range(settings.seeds)]
    first, plan = seeds[0].counts, seeds[0].plan
    worst = max(seeds[0].grad_ratios, key=lambda key: statistics.mean(seed.grad_ratios[key] for seed in seeds))
    precisions = [node.precision for node in plan.nodes]
    return Parity(
        model=name,
        autocast_output_error=statistics.mean(seed.output_errors[0] for seed in seeds),
        amp_output_error=statistics.mean(seed.output_errors[1] for seed in seeds),
        autocast_grad_error=statistics.mean(seed.grad_errors[0] for seed in seeds),
        amp_grad_error=statistics.mean(seed.grad_errors[1] for seed in seeds),
        worst_grad_ratio=statistics.mean(seed.grad_ratios[worst] for seed in seeds),
        worst_grad=worst,
        autocast_bytes=first[0],
        amp_bytes=plan.cast_bytes,
        counted_bytes=first[1],
        low_nodes=precisions.count("low"),
        fp32_nodes=precisions.count("fp32"),
        keep_nodes=precisions.count("keep"),
        casts=len(plan.casts),
    )


@dataclass(frozen=True)
class _Seed:
    """One seed's numbers; pairs are (autocast, amp.compile)."""

    output_errors: tuple[float, float]
    grad_errors: tuple[float, float]
    grad_ratios: dict[str, float]
    counts: tuple[int, int]
    plan: amp.PrecisionPlan


def _measure_seed(name: str, seed: int, settings: Settings) -> _Seed:
    low = TORCH_TYPES[settings.dtype]
    model, kwargs = models.build(name, settings.size, seed)
    model.to(settings.device)
    kwargs = {key: value.to(settings.device) for key, value in kwargs.items()}
    compiled = amp.compile(model, rules=settings.rules, dtype=settings.dtype, backend=settings.backend)

    def under_autocast() -> Any:
        with torch.autocast(settings.device, dtype=low):
            return model(**kwargs)

    exact = forward_backward(model, lambda: model(**kwargs))
    theirs = forward_backward(model, under_autocast)
    ours = forward_backward(model, lambda: compiled(**kwargs))
    names = list(exact.grads)
    if missing := [key for key in names if key not in ours.grads]:
        raise SystemExit(f"{name}: amp.compile gave no gradient for {', '.join(missing)}")
    counted = CastCounter()
    if settings.backend == "eager":
        with counted:
            compiled(**kwargs)
    return _Seed(
        output_errors=(
            relative_error(theirs.outputs, exact.outputs),
            relative_error(ours.outputs, exact.outputs),
        ),
        grad_errors=(
            relative_error(all_grads(theirs, names), all_grads(exact, names)),
            relative_error(all_grads(ours, names), all_grads(exact, names)),
        ),
        grad_ratios={
            key: ratio(float((ours.grads[key] - grad).norm()), float((theirs.grads[key] - grad).norm()))
            for key, grad in exact.grads.items()
        },
        counts=(
            count_autocast(lambda: model(**kwargs), device=settings.device, dtype=low).cast_bytes,
            counted.cast_bytes,
        ),
        plan=compiled.plan,
    )


def table(rows: Sequence[Parity], settings: Settings) -> Table:
    """One line per model."""
    made = Table(
        title=f"amp.compile beside torch.autocast, {settings.dtype}, {settings.device}, {settings.size} models"
    )
    made.add_column("model")
    for column in ("output error\nautocast", "\nours", "\nratio", "gradient error\nautocast", "\nours", "\nratio"):
        made.add_column(column, justify="right")
    for column in ("bytes cast\nautocast", "\nours", "\nratio", "nodes\nlow", "\nfp32", "\nkeep"):
        made.add_column(column, justify="right")
    for row in rows:
        made.add_row(
            row.model,
            f"{row.autocast_output_error:.2e}",
            f"{row.amp_output_error:.2e}",
            _coloured(row.output_ratio, ERROR_BOUND),
            f"{row.autocast_grad_error:.2e}",
            f"{row.amp_grad_error:.2e}",
            _coloured(row.grad_ratio, ERROR_BOUND),
            human_bytes(row.autocast_bytes),
            human_bytes(row.amp_bytes),
            _coloured(row.bytes_ratio, 1.0),
            str(row.low_nodes),
            str(row.fp32_nodes),
            str(row.keep_nodes),
        )
    return made


def _coloured(value: float, bound: float) -> str:
    return f"[{'green' if value <= bound else 'bold red'}]{value:.2f}[/]"


def report(rows: Sequence[Parity], settings: Settings) -> dict[str, Any]:
    """The rows and what is needed to understand them, ready for JSON."""
    return {
        "benchmark": "autocast_parity",
        **machine_facts(settings.device),
        "settings": asdict(settings),
        "bounds": {"error_ratio": ERROR_BOUND, "bytes_ratio": 1.0},
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


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 where a bound is broken."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=models.NAMES, default=list(models.NAMES), metavar="NAME")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--size", choices=tuple(models.SIZES), default="small")
    parser.add_argument("--rules", default="default")
    parser.add_argument("--dtype", choices=tuple(TORCH_TYPES), default="bf16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--json", type=Path, help=f"where the numbers go; those of all models go to {RESULTS.name}")
    options = parser.parse_args(argv)
    settings = Settings(
        options.rules, options.dtype, options.device, options.backend, options.size, max(1, options.seeds)
    )
    warnings.filterwarnings("ignore")
    console = Console(width=150)
    rows = []
    for name in options.models:
        rows.append(measure(name, settings))
        console.log(f"{name}: {', '.join(rows[-1].broken()) or 'within bounds'}")
    console.print(table(rows, settings))
    path = options.json or (RESULTS if set(options.models) == set(models.NAMES) else None)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report(rows, settings), indent=1) + "\n", encoding="utf-8")
    return 1 if any(row.broken() for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
