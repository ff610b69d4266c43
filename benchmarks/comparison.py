"""What `train_step.py` and `inference.py` share: variants of a step, side by side on the models of `cases.py`."""

from __future__ import annotations

import argparse
import contextlib
import functools
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import bursts
import cases
import measuring
import torch
from measuring import Gemm, Spread, coloured
from processes import FREEING, Measured, Memory, Process, taking_turns
from rich.console import Console
from rich.table import Table

import amp_compiler as amp
from amp_compiler.report.table import human_bytes

FP32, AUTOCAST, COMPILED, OURS = VARIANTS = ("fp32", "autocast", "torch.compile", "amp_compiler")
TUNED, FP8 = f"{OURS} max-autotune", f"{OURS} fp8"  # measured only where they are asked for
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_ON_CUDA = {  # what is measured there unless it is asked for otherwise: one model in under 4 minutes
    "variants": [OURS, COMPILED, AUTOCAST],
    "modes": list(MODES[:3]),
    "steps": 60,
    "turn": 12,
}
# Dynamo leaves recurrent layers out of what it compiles unless it is told to take them, unrolled; see `compiled`.
RECURRENT = f"{COMPILED} allow_rnn"
_GEMM = "large GEMM"
_LIMIT = 190.0  # seconds for the first calls of a model on a GPU


def mode_of_ours(variant: str) -> str | None:
    """The mode of `amp.compile` and `amp.training_step` of a variant, None where it is not ours."""
    return {OURS: "default", FP8: "default", TUNED: "max-autotune"}.get(variant)


def compiled_name(mode: str) -> str:
    """The variant that is torch.compile in a mode."""
    return COMPILED if mode == MODES[0] else f"{COMPILED} {mode}"


def compiled_mode(variant: str) -> str | None:
    """The mode of a variant, None where it is not torch.compile."""
    if variant == RECURRENT:
        return MODES[0]
    return next((mode for mode in MODES if variant == compiled_name(mode)), None)


def _is_tuned(variant: str) -> bool:
    """Whether the variant's first call times kernels on the device."""
    return "max-autotune" in variant


def compiled(function: Callable[..., Any], variant: str) -> Callable[..., Any]:
    """The function as a variant of torch.compile runs it, in the variant's own process; itself for other variants."""
    mode = compiled_mode(variant)
    if mode is None:
        return function
    torch._dynamo.config.allow_rnn = variant == RECURRENT
    return torch.compile(function, mode=mode)


@dataclass(frozen=True)
class Comparison:
    """One benchmark.

    Args:
        name: of the benchmark and of its results file.
        title: what is measured, for the table.
        description: first line of the help text.
        make: a variant from its name, model, bound, dtype and device.
        bounds: the names of the large and of the small batch: what a step spends its time on.
        backward: whether a step trains.
    """

    name: str
    title: str
    description: str
    make: Callable[[str, str, str, str, str], Measured]
    bounds: tuple[str, str]
    backward: bool

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Measure, print, write."""
        options = self.parse(argv)
        warnings.filterwarnings("ignore")
        torch.set_num_threads(options.threads)
        path = options.json or (measuring.RESULTS / f"{self.name}_{options.device}.json" if options.all else None)
        done: list[dict[str, Any]] = []
        left_out: list[str] = []
        console = Console(width=170)
        rows: list[dict[str, Any]] = []
        failed: Mapping[str, str] = {}
        wanted = [(name, bound) for name in options.models for bound in options.bounds]
        end = time.perf_counter() + options.limit
        try:
            while wanted:
                name, bound = wanted[0]
                limit = (end - time.perf_counter()) / len(wanted)
                with console.status(f"{name}, {bound}"):
                    for rows, failed in self.measure(name, bound, options, limit):  # noqa: B007 - the last ones count
                        measuring.write_results(path, self.name, options, done + rows)
                done, rows = done + rows, []
                left_out += _told(name, bound, failed)
                failed = {}
                del wanted[0]
        finally:  # also where it is interrupted
            left_out += [line for name, bound in wanted[:1] for line in _told(name, bound, failed)]
            left_out += [f"{name}, {bound}: not measured, or not to its end" for name, bound in wanted]
            title = f"{self.title} in {options.dtype} on {options.device}, ratios to torch.compile"
            if done + rows:
                console.print((short_table if options.device == "cuda" else table)(done + rows, title))
            console.print(*left_out, sep="\n", end="\n" if left_out else "", markup=False)
        return 1 if left_out else 0

    def parse(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """The command line."""
        parser = argparse.ArgumentParser(description=self.description)
        measuring.add_arguments(parser, dict.fromkeys((*cases.SHAPES, *cases.names("cuda"))), None)
        parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
        parser.add_argument("--bounds", nargs="+", choices=self.bounds, help="both on a CPU, else the first")
        parser.add_argument("--variants", nargs="+", choices=(*VARIANTS, TUNED, FP8), default=list(VARIANTS))
        parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES[:1]), help="of torch.compile")
        parser.add_argument("--least", type=float, default=10.0, help="on a CPU rounds go on for so many seconds")
        parser.add_argument("--turn", type=int, default=5, help="steps in a row that a variant is timed for")
        parser.add_argument("--together", type=int, help="variants on the GPU at a time; default: one for every 50 GB")
        parser.add_argument("--limit", type=float, help="seconds for first calls on CUDA; default: 190 for each model")
        on_cuda = parser.parse_known_args(argv)[0].device == "cuda"
        parser.set_defaults(**(_ON_CUDA if on_cuda else {}))
        options = parser.parse_args(argv)
        models, bounds = list(cases.names(options.device)), list(self.bounds[:1] if on_cuda else self.bounds)
        options.models, options.bounds = options.models or models, options.bounds or bounds
        options.all = options.models == models and options.bounds == bounds
        options.limit = options.limit or _LIMIT * len(options.models) * len(options.bounds)
        if on_cuda:
            options.together = options.together or bursts.fit_together()
        return options

    def measure(
        self, name: str, bound: str, options: argparse.Namespace, limit: float
    ) -> Iterator[tuple[list[dict[str, Any]], dict[str, str]]]:
        """One row per variant, and why others have none; on a GPU told again whenever there are more.

        Args:
            name: of the model.
            bound: which batch.
            options: of the command line.
            limit: seconds for first calls on a GPU.
        """
        if options.device != "cuda":
            first, warm, times, memory = self._in_processes(name, bound, options)
            gemm = times.pop(_GEMM)[0]
            yield self._rows(name, bound, options.device, gemm, bursts.Found(first, times, memory), warm), {}
            return
        with tempfile.TemporaryDirectory() as folder:
            caches = {variant: Path(folder) / str(place) for place, variant in enumerate(_variants(options, name))}
            with Process(Gemm, (options.dtype,), options.device, None, Path(folder)) as process:
                *_, times = bursts.taking_turns({_GEMM: process}, 3, options.turn, {})
                product = times[_GEMM][0]

            def start(variant: str) -> Process:
                return self._start(variant, name, bound, options, caches[variant], wait=False)

            count = -(-options.steps // options.turn)
            groups = bursts.measure(start, list(caches), options.together, limit, count, options.turn, _is_tuned)
            for measured in groups:
                rows = self._rows(name, bound, options.device, product, measured, {}) if measured.times else []
                yield rows, measured.failed

    def _start(
        self,
        variant: str,
        name: str,
        bound: str,
        options: argparse.Namespace,
        cache: Path,
        settings: Mapping[str, str] | None = None,
        wait: bool = True,
    ) -> Process:
        arguments = (variant, name, bound, options.dtype)
        ours = mode_of_ours(variant) is not None
        prepare = warm_ours if ours else warm_torch if compiled_mode(variant) is not None else None
        return Process(self.make, arguments, options.device, prepare, cache, settings, wait)

    def _rows(
        self,
        name: str,
        bound: str,
        device: str,
        gemm: float,
        measured: bursts.Found,
        warm: Mapping[str, float],
    ) -> list[dict[str, Any]]:
        first, times, memory = measured.first, measured.times, measured.memory
        flops, items = _facts(name, bound, self.backward, device)
        rate = Gemm.flops(device) / gemm  # per ms
        base = _base(times)
        parameters = _parameters(name, bound, device)
        return [
            {
                "model": name,
                "bound": bound,
                "parameters": parameters,
                "items": items,
                "variant": variant,
                "best_of_torch": variant == base,
                **_time_facts(step, times[base], items),
                "matmul_flops": flops,
                "gemm_tflops": rate / 1e9,
                "gemm_floor_ms": flops / rate,
                "gemm_share": flops / rate / step[0],
                **asdict(memory[variant]),
                "peak_bytes": memory[variant].peak_bytes,
                "memory_ratio": memory[variant].peak_bytes / memory[base].peak_bytes,
                "first_call_s": first[variant],
                "first_call_ratio": first[variant] / first[base],
                **({"warm_call_s": warm[variant], "warm_call_ratio": warm[variant] / warm[base]} if warm else {}),
            }
            for variant, step in times.items()
        ]

    def _in_processes(
        self, name: str, bound: str, options: argparse.Namespace
    ) -> tuple[dict[str, float], dict[str, float], dict[str, Spread], dict[str, Memory]]:
        """Seconds of the first call, cold and warm, times of a step, memory of every variant but the product."""
        first, warm, memory = {}, {}, {}
        with tempfile.TemporaryDirectory() as folder:
            caches = {variant: Path(folder) / str(place) for place, variant in enumerate(_variants(options, name))}

            def start(variant: str, settings: Mapping[str, str]) -> Process:
                return self._start(variant, name, bound, options, caches[variant], settings)

            with contextlib.ExitStack() as stack:
                running: dict[str, Process] = {}
                for variant in caches:
                    running[variant] = stack.enter_context(start(variant, {}))
                    first[variant] = running[variant].first_call_s
                product = Process(Gemm, (options.dtype,), options.device, None, Path(folder))
                running[_GEMM] = stack.enter_context(product)
                times = taking_turns(running, options.steps, options.turn, options.seconds, options.least)
            for variant in caches:  # what is compiled is there by now
                with start(variant, FREEING) as process:
                    warm[variant] = process.first_call_s
                    memory[variant] = process.memory()
        return first, warm, times, memory


def warm_torch(device: str) -> None:
    """Pay for what any first compilation in a process and its cache costs: imports, precompiled headers."""
    torch.compile(lambda x: torch.relu(x) + 1)(torch.ones(64, device=device))
    torch._dynamo.reset()


def warm_ours(device: str) -> None:
    """The same for what we compile: on a CPU our 16-bit code has headers of its own, for a flag of the compiler."""
    warm_torch(device)
    amp.compile(torch.nn.ReLU(), dtype="bf16")(torch.ones(64, device=device, dtype=torch.bfloat16))


def _variants(options: argparse.Namespace, name: str) -> list[str]:
    # On a GPU a recurrent layer is one call of cuDNN's: unrolled it takes minutes to compile, and is slower.
    unrolled = name in cases.RECURRENT and options.device != "cuda"
    modes = [compiled_name(mode) for mode in options.modes] + [RECURRENT] * unrolled
    return [one for variant in options.variants for one in (modes if variant == COMPILED else [variant])]


def _base(times: Mapping[str, Spread]) -> str:
    """The fastest mode of torch.compile; without any the first variant."""
    modes = [variant for variant in times if compiled_mode(variant)]
    return min(modes, key=lambda variant: times[variant][0]) if modes else next(iter(times))


@functools.cache
def _facts(name: str, bound: str, backward: bool, device: str) -> tuple[int, int]:
    """Floating-point operations of a step's products, and its images or tokens."""
    return cases.matmul_flops(name, bound, backward, device), cases.items(name, bound, device)


@functools.cache
def _parameters(name: str, bound: str, device: str) -> int:
    place = "meta" if device == "cuda" else device
    return sum(p.numel() for p in cases.build(name, bound, device, place)[0].parameters())


def _told(name: str, bound: str, failed: Mapping[str, str]) -> list[str]:
    return [f"{name}, {bound}, {variant}: {reason}" for variant, reason in failed.items()]


def _time_facts(step: Spread, base: Spread, items: int) -> dict[str, float]:
    return {
        "step_ms": step[0],
        "step_ms_10": step[1],
        "step_ms_90": step[2],
        "time_ratio": step[0] / base[0],
        "items_per_s": 1000 * items / step[0],
    }


def _empty(title: str, columns: Sequence[str]) -> Table:
    """A table of cases, with columns of numbers behind them."""
    result = Table(title=title, title_justify="left")
    for column in ("model", "bound by", "variant"):
        result.add_column(column, no_wrap=True)
    for column in columns:
        result.add_column(column, justify="right")
    return result


def table(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    """One line per model, batch and variant."""
    columns = ("step\nms", "10 to 90 %", "ratio", "tokens or\nimages / s", "GEMM\nfloor", "peak\nmemory", "ratio")
    result = _empty(title, (*columns, "of it\nstate", "first\ncall s", "ratio", "with full\ncaches s", "ratio"))
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        result.add_row(
            row["model"],
            row["bound"],
            row["variant"],
            f"{row['step_ms']:.1f}",
            f"{row['step_ms_10']:.1f} to {row['step_ms_90']:.1f}",
            coloured(row["time_ratio"]),
            f"{row['items_per_s']:,.0f}",
            f"{row['gemm_share']:.0%}",
            human_bytes(row["peak_bytes"]),
            coloured(row["memory_ratio"]),
            human_bytes(row["state_bytes"]),
            f"{row['first_call_s']:.1f}",
            coloured(row["first_call_ratio"]),
            f"{row['warm_call_s']:.1f}",
            coloured(row["warm_call_ratio"]),
            end_section=following is None or (following["model"], following["bound"]) != (row["model"], row["bound"]),
        )
    return result


def short_table(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    """The same in 110 columns: one line per model, batch and variant."""
    columns = ("step\nms", "10 to 90 %", "ratio", "TFLOP/s", "of a\nGEMM's", "peak\nGB", "ratio", "first\ncall s")
    result = _empty(title, columns)
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        result.add_row(
            row["model"],
            row["bound"],
            row["variant"],
            f"{row['step_ms']:.2f}",
            f"{row['step_ms_10']:.2f} to {row['step_ms_90']:.2f}",
            coloured(row["time_ratio"]),
            f"{row['matmul_flops'] / row['step_ms'] / 1e9:.0f}",
            f"{row['gemm_share']:.0%}",
            f"{row['peak_bytes'] / 1e9:.1f}",
            coloured(row["memory_ratio"]),
            f"{row['first_call_s']:.0f}",
            end_section=following is None or (following["model"], following["bound"]) != (row["model"], row["bound"]),
        )
    return result
