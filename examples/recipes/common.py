"""What the recipes share: the ways of training, the seeds, the table with its standard errors, the results as JSON.

A recipe says how a training starts and how its quality is measured. `main` trains it in four ways: in FP32; in FP16
with neither a loss scale nor FP32 master weights, and with both; and as `amp.training_step` does by default. The FP32
run of the first seed is profiled on its way: `amp.profile` counts the gradients that FP16 would make zero and the
updates that a 16-bit weight would not notice, and names the loss scale that the other runs take.
"""

import argparse
import datetime
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

import amp_compiler as amp
from amp_compiler.diagnose.exponents import Histogram
from amp_compiler.forward.settings import make_settings
from amp_compiler.ops.exponents import LOWEST

FOLDER = Path(__file__).parent / "results"
FP32, NEITHER, MASTERS, SCALED, BOTH, BF16, BF16_MASTERS, HEADS, AUTOCAST, DEFAULT = (
    "FP32",
    "FP16, neither",
    "FP16, masters alone",
    "FP16, scale alone",
    "FP16, scale and masters",
    "BF16, no masters",
    "BF16, masters",
    "BF16, heads in FP32",
    "BF16, torch.autocast",
    "by default",
)
GOOD = (BOTH, BF16_MASTERS, HEADS, DEFAULT)  # the ways that have to come out as FP32 does
NO_MASTERS = {"version": 1, "extends": "default", "weights": {"master": "low"}}
KINDS = ("activation", "activation gradient", "weight gradient", "weight")
PROFILED = (0.0, 0.25, 0.5, 0.75)  # parts of a training behind which a step is profiled
HEADINGS = (
    "way",
    "{measure}",
    "difference to FP32",
    "better by standard errors",
    "seed by seed",
    "better by its standard errors",
    "steps skipped",
)
POINTS = 12  # of a curve
SHORT = 2  # steps of a short run

Options = dict[str, Any]


@dataclass(frozen=True)
class Training:
    """A training that has not begun.

    Args:
        steps: called one after the other with each batch; a GAN has two.
        optimizers: whose learning rates fall to zero in a straight line.
        batch: gives the batch of a step by its number.
        quality: measures what has been learned, in FP32.
    """

    steps: Sequence["amp.TrainingStep | Autocast"]
    optimizers: Sequence[torch.optim.Optimizer]
    batch: Callable[[int], tuple[Any, ...]]
    quality: Callable[[], float]


class Autocast:
    """A step by `torch.autocast` and `torch.optim` alone, to compare with.

    Args:
        model: as of `amp.training_step`.
        loss_fn: likewise.
        optimizer: likewise.
        dtype: of autocast.
    """

    loss_scale, skipped_steps = 1.0, 0

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Callable[..., torch.Tensor],
        optimizer: torch.optim.Optimizer,
        dtype: torch.dtype,
    ) -> None:
        self.model, self.loss_fn, self.optimizer, self.dtype = model, loss_fn, optimizer, dtype

    def __call__(self, *batch: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        with torch.autocast("cpu", self.dtype):
            loss = self.loss_fn(self.model, *batch)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


@dataclass(frozen=True)
class Recipe:
    """What is trained, for how long, and what has to come out.

    Args:
        name: of its file of results.
        title: one line for people.
        measure: what its quality is called.
        start: makes a training of a seed and the options of `amp.training_step`.
        length: steps of a full run.
        higher: whether a greater quality is a better one.
        fails: the ways that come out worse by at least three standard errors.
        ways: the options of each way by its name, given the loss scale of the profile.
        low: the type whose losses are told.
        seeds: how many of a full run.
    """

    name: str
    title: str
    measure: str
    start: Callable[[int, Options], Training]
    length: int
    higher: bool = True
    fails: tuple[str, ...] = ()
    ways: Callable[[float], dict[str, Options]] = field(default=lambda scale: four_ways(scale))
    low: str = "fp16"
    seeds: int = 3


def four_ways(scale: float) -> dict[str, Options]:
    """The options of `amp.training_step` by the name of the way; the first is FP32."""
    return {
        FP32: {"enabled": False},
        NEITHER: {"dtype": "fp16", "loss_scale": None, "rules": NO_MASTERS},
        BOTH: {"dtype": "fp16", "loss_scale": scale},
        DEFAULT: {},
    }


def five_ways(scale: float) -> dict[str, Options]:
    """The four, and FP16 with masters alone."""
    return four_ways(scale) | {MASTERS: {"dtype": "fp16", "loss_scale": None}}


def six_ways(scale: float) -> dict[str, Options]:
    """The four, and FP16 with one of the two alone."""
    return five_ways(scale) | {SCALED: {"dtype": "fp16", "loss_scale": scale, "rules": NO_MASTERS}}


def train(
    training: Training, length: int, profiles: list[amp.Profile] | None = None, points: int = POINTS
) -> dict[str, Any]:
    """Run a training: its curve as plain data. Steps whose profiles are asked for train as they would otherwise."""
    looked = sorted({max(round(length * point / points), 1) for point in range(1, points + 1)})
    counted = {int(length * part) for part in PROFILED} if profiles is not None else set()
    schedules = [torch.optim.lr_scheduler.LinearLR(one, 1.0, 0.0, length) for one in training.optimizers]
    curve: dict[str, Any] = {"at": [], "quality": [], "loss_scale": [], "stopped": ""}
    for number in range(length):
        try:
            for step in training.steps:
                if number in counted:
                    profiles.append(amp.profile(step, [training.batch(number)]))
                else:
                    step(*training.batch(number))
            for schedule in schedules:
                schedule.step()
        except amp.LossScaleError as error:
            curve["stopped"] = str(error).splitlines()[0]
        if number + 1 in looked or curve["stopped"]:
            curve["at"].append(number + 1)
            curve["quality"].append(training.quality())
            curve["loss_scale"].append(float(training.steps[0].loss_scale))
        if curve["stopped"]:
            break
    return curve | {"skipped": sum(int(step.skipped_steps) for step in training.steps)}


def shares(histogram: Histogram) -> dict[str, float]:
    """Which part of the numbers that are not zero has an exponent, by the exponent."""
    counts = histogram.numbers.tolist()
    return {str(LOWEST + place): round(count / sum(counts), 6) for place, count in enumerate(counts) if count}


def measured_ranges(profiles: list[amp.Profile], low: str) -> dict[str, Any]:
    """What the profiles of a training say together: exponents of each kind, what the low type loses, a loss scale."""
    histograms = {kind: [row.histogram for profile in profiles for row in profile.of(kind)] for kind in KINDS}
    sums = {kind: sum(parts[1:], parts[0]) for kind, parts in histograms.items()}
    scale = min(profile.loss_scale("fp16").scale for profile in profiles)
    updates = [row for profile in profiles for row in profile.updates]
    gradients = ("activation gradient", "weight gradient")
    return {
        "exponents": {kind: shares(histogram) for kind, histogram in sums.items()},
        "scale": scale,
        "zero": {kind: sums[kind].fractions(low).zero for kind in gradients},
        "zero with the scale": {kind: sums[kind].fractions(low, scale).zero for kind in gradients},
        "updates lost": sum(row.lost[low] for row in updates) / max(sum(row.changed for row in updates), 1),
    }


def standard_error(values: Sequence[float]) -> float:
    """Of the mean of some values; 0 of one alone."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def advantage(way: Sequence[float], reference: Sequence[float], higher: bool = True) -> float:
    """How much better the mean of one list is than that of another, in standard errors of their difference."""
    better = (statistics.fmean(way) - statistics.fmean(reference)) * (1 if higher else -1)
    error = math.hypot(standard_error(way), standard_error(reference))
    return better / error if error else math.copysign(math.inf, better) if better else 0.0


def paired(way: Sequence[float], reference: Sequence[float], higher: bool = True) -> float:
    """How much better one list is than another seed by seed, in standard errors of the mean of the differences."""
    return advantage([a - b for a, b in zip(way, reference, strict=True)], [0.0], higher)


def measure(recipe: Recipe, length: int, seeds: Sequence[int], console: Console) -> dict[str, Any]:
    """Train every way with every seed: the results as plain data. The first seed's FP32 run is profiled."""
    profiles: list[amp.Profile] = []
    runs: dict[str, list[dict[str, Any]]] = {}
    began = time.time()
    first = train(recipe.start(seeds[0], {"enabled": False}), length, profiles)
    ranges = measured_ranges(profiles, recipe.low)
    for name, options in recipe.ways(ranges["scale"]).items():
        runs[name] = [first] if name == FP32 else []
        for seed in seeds[len(runs[name]) :]:
            runs[name].append(train(recipe.start(seed, options), length))
        console.print(f"{recipe.name}: {name}: {[round(run['quality'][-1], 4) for run in runs[name]]}", style="dim")
    facts = {
        "title": recipe.title,
        "measure": recipe.measure,
        "higher": recipe.higher,
        "steps": length,
        "low": recipe.low,
    }
    return {**facts, "fails": recipe.fails, **machine(), "seconds": time.time() - began, "ranges": ranges, "runs": runs}


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    default = make_settings().low(torch.device("cpu")).short
    return {"date": datetime.date.today().isoformat(), "cpu": name, "default": default, "versions": versions}


def last(results: dict[str, Any], way: str) -> list[float]:
    """The quality of each seed at the end."""
    return [run["quality"][-1] for run in results["runs"][way]]


def rows(results: dict[str, Any]) -> list[tuple[str, ...]]:
    """Of each way: name, quality, the difference to FP32, how many standard errors better that is, steps skipped.

    Behind a mean and a difference stands the standard error, 0 of one seed alone. "Seed by seed" is the mean of the
    differences of runs with the same seed; behind it that in standard errors of its own, where the seeds do not agree.
    """
    reference, lines = last(results, FP32), []
    for way, runs in results["runs"].items():
        values = last(results, way)
        name = f"{way} ({results['default'].upper()})" if way == DEFAULT else way
        quality = f"{statistics.fmean(values):.4g} ± {standard_error(values):.2g}"
        difference = statistics.fmean(values) - statistics.fmean(reference)
        error = math.hypot(standard_error(values), standard_error(reference))
        higher, each = results["higher"], [a - b for a, b in zip(values, reference, strict=True)]
        apart = (
            f"{difference:+.3g} ± {error:.2g}",
            f"{advantage(values, reference, higher):+.1f}",
            f"{statistics.fmean(each):+.3g} ± {standard_error(each):.2g}",
            f"{paired(values, reference, higher):+.1f}" if standard_error(each) else "",
        )
        skipped = str(sum(run["skipped"] for run in runs))
        lines.append((name, quality, *(("",) * len(apart) if way == FP32 else apart), skipped))
    return lines


def why(results: dict[str, Any]) -> str:
    """What the profile says of the ways that fail."""
    ranges, low = results["ranges"], results["low"].upper()
    zero, kept = ranges["zero"], ranges["zero with the scale"]
    scaled = (
        f"; with a loss scale of {ranges['scale']:g}, "
        f"{kept['weight gradient']:.1%} and {kept['activation gradient']:.1%}"
    )
    return (
        f"{low} makes {zero['weight gradient']:.1%} of the gradients of weights zero and "
        f"{zero['activation gradient']:.1%} of those of activations{scaled if low == 'FP16' else ''}. "
        f"A weight in {low} would not notice {ranges['updates lost']:.1%} of the updates."
    )


def table(results: dict[str, Any]) -> Table:
    """The results for the terminal."""
    seeds = len(next(iter(results["runs"].values())))
    result = Table(title=f"{results['title']}: {results['steps']} steps, {seeds} seeds", box=box.SIMPLE_HEAD)
    for number, name in enumerate(HEADINGS):
        result.add_column(name.format(**results), justify="right" if number else "left")
    for row in rows(results):
        result.add_row(*row)
    return result


def main(*recipes: Recipe, arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run recipes from the command line: print each table, write what was measured and the picture of it."""
    from pictures import picture  # which reads this module

    parser = argparse.ArgumentParser(description="; ".join(recipe.title for recipe in recipes))
    parser.add_argument("--short", action="store_true", help="a few steps of one seed, and nothing is written")
    parser.add_argument("--seeds", type=int, help="how many seeds (default: the recipe's, 3 of most)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0, as the docs have it)")
    parser.add_argument("--only", choices=[recipe.name for recipe in recipes], help="one of several recipes")
    parser.add_argument("--into", type=Path, default=FOLDER, help="the folder of the results (default: results/)")
    args = parser.parse_args(arguments)
    console, measured = Console(), []
    for recipe in [one for one in recipes if args.only in (None, one.name)]:
        length, seeds = (SHORT, 1) if args.short else (recipe.length, args.seeds or recipe.seeds)
        results = measure(recipe, length, range(args.first, args.first + seeds), console)
        console.print(table(results), why(results))
        if not args.short:
            args.into.mkdir(exist_ok=True)
            (args.into / f"{recipe.name}.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            (args.into / f"{recipe.name}.svg").write_bytes(picture(results))
        measured.append(results)
    return measured
