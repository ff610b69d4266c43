"""Variants of a step on a GPU: a few compile at the same time, then each runs bursts of steps, the GPU its own.

A single step that is waited for would show what the host does before the first kernel, which a training hides behind
the step before. So 10 to 20 steps run in a row, timed by the GPU's own clock from their first kernel to their last.
What chooses its kernels by timing them has the GPU for itself from the beginning, behind all others.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from measuring import Spread, spread
from processes import Memory, Process

_ROOM = 50e9  # bytes of a GPU for each of the processes that lie there at the same time
_LEAST_WAIT = 45.0  # seconds that a variant's first call has, however late it begins


@dataclass
class Found:
    """What was measured of each variant, by its name.

    Args:
        first: seconds of the first call, beside the first calls of others.
        times: median, 10% and 90% quantile of the milliseconds of a step, over bursts.
        memory: what it needs.
        failed: why it is in none of these.
    """

    first: dict[str, float] = field(default_factory=dict)
    times: dict[str, Spread] = field(default_factory=dict)
    memory: dict[str, Memory] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def fit_together() -> int:
    """How many variants find room on the GPU at the same time."""
    return max(1, int(torch.cuda.get_device_properties(0).total_memory // _ROOM))


def measure(
    start: Callable[[str], Process],
    variants: Sequence[str],
    together: int,
    limit: float,
    bursts: int,
    length: int,
    tuned: Callable[[str], bool] = lambda variant: False,
) -> Iterator[Found]:
    """Measure variants, `together` at a time, and tell what is known after a first round and at the end of each group.

    Args:
        start: begins the process of a variant, without waiting for it.
        variants: in the order in which they are begun.
        together: how many of them compile at the same time, and then take turns.
        limit: after so many seconds no first call is waited for any more, but for some seconds each.
        bursts: of each variant that count; one before them does not.
        length: steps in a burst.
        tuned: which variants time kernels in their first call. They come last, one by one, and not at all where too
            little of the limit is left.
    """
    measured, end = Found(), time.perf_counter() + limit
    plain, last = ([variant for variant in variants if tuned(variant) is kind] for kind in (False, True))
    groups = [plain[place : place + together] for place in range(0, len(plain), together)]
    for group in [*groups, *([variant] for variant in last)]:
        if group[0] in last and time.perf_counter() + _LEAST_WAIT > end:
            measured.failed[group[0]] = f"not begun, the time for this model's first calls was spent ({limit:.0f} s)"
            yield measured
            continue
        with contextlib.ExitStack() as stack:
            begun = {variant: stack.enter_context(start(variant)) for variant in group}
            until = max(end, time.perf_counter() + _LEAST_WAIT)
            running = {}
            for variant, process in begun.items():
                try:
                    measured.first[variant] = process.wait(until)
                    measured.memory[variant] = process.memory()
                    running[variant] = process
                except SystemExit as ended:
                    measured.failed[variant] = str(ended)
                    print(ended, file=sys.stderr)
            before = measured.times
            for times in taking_turns(running, bursts, length, measured.failed):
                measured.times = before | times
                yield measured


def taking_turns(
    running: Mapping[str, Process], bursts: int, length: int, failed: dict[str, str]
) -> Iterator[dict[str, Spread]]:
    """Median, 10% and 90% quantile of the milliseconds of a step over bursts, the processes taking turns.

    Told after the first round that counts, and after the last.

    Args:
        running: processes whose first call is done.
        bursts: of each that count; one before them does not.
        length: steps in a burst.
        failed: gets those that fail meanwhile, with the reason.
    """
    times: dict[str, list[float]] = {variant: [] for variant in running}
    for number in range(1 + bursts):
        for variant, process in running.items():
            if variant in failed:
                continue
            try:
                took = process.burst(length)
            except SystemExit as ended:
                failed[variant] = str(ended)
                continue
            if number:
                times[variant].append(took)
        if number in (1, bursts):
            yield {variant: spread(values) for variant, values in times.items() if values and variant not in failed}
