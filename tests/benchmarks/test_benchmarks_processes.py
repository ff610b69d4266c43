"""Variants of a benchmark take turns, in processes of their own; what these measure, and how they fail."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
import torch
from benchmark_modules import BENCHMARKS


def test_variants_take_turns_and_warm_ups_are_not_timed(bench):
    calls = []
    variants = {name: lambda name=name: calls.append(name) for name in "AB"}
    times = bench["measuring"].interleaved(variants, 4, "cpu", 60.0)
    assert calls == ["A", "B"] * 7
    assert set(times) == {"A", "B"}
    calls.clear()
    bench["measuring"].interleaved(variants, 100, "cpu", 0.0)
    assert calls == ["A", "B"] * 8  # three warm-ups, and no fewer than five timed rounds


class Countdown:
    """Stands for a process: the first step of every turn takes 100 ms, the others 1, 2, ... ms."""

    def __init__(self, log, name):
        self.log, self.name, self.made = log, name, 0

    def times(self, steps):
        self.log.append((self.name, steps))
        made, self.made = self.made, self.made + steps - 1
        return [100.0, *[float(made + number) for number in range(1, steps)]]


def test_processes_take_turns_of_several_steps_and_the_first_is_not_timed(bench):
    log = []
    processes = {name: Countdown(log, name) for name in "AB"}
    times = bench["processes"].taking_turns(processes, 4, 2, 60.0)
    assert log == [("A", 3), ("B", 3)] * 3
    assert times["A"] == times["B"] == bench["measuring"].spread([3.0, 4.0, 5.0, 6.0])
    log.clear()
    bench["processes"].taking_turns(processes, 100, 2, 0.0)
    assert log == [("A", 3), ("B", 3)] * 3  # one round that is not timed, and no fewer than two that are


def test_short_steps_are_timed_for_some_seconds(bench, monkeypatch):
    clock = itertools.count()  # a second a round
    monkeypatch.setattr(bench["processes"].time, "perf_counter", lambda: float(next(clock)))
    log = []
    bench["processes"].taking_turns({"A": Countdown(log, "A")}, 4, 2, 60.0, 7.0)
    assert log == [("A", 3)] * 7
    log.clear()
    bench["processes"].taking_turns({"A": Countdown(log, "A")}, 10, 2, 60.0, 1.0)
    assert log == [("A", 3)] * 6
    log.clear()
    bench["processes"].taking_turns({"A": Countdown(log, "A")}, 10, 2, 4.0, 7.0)
    assert log == [("A", 3)] * 5


class Hoarder:
    """Keeps 2^20 elements between steps, and needs as many again within one."""

    def __init__(self, device):
        self.kept = torch.ones(1 << 20, device=device)

    def __call__(self):
        return (self.kept + 1).sum()

    def idle(self):
        """Nothing is left over between two steps."""


@pytest.fixture
def importable(monkeypatch):
    """Lets a process of its own import the benchmarks and this file."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


class Fragile(Hoarder):
    """Ends its process at the twelfth step: one when it is made, three that are timed, six for memory, one more."""

    def __init__(self, device):
        super().__init__(device)
        self.left = 11

    def __call__(self):
        self.left -= 1
        if self.left < 0:
            sys.exit(3)
        return super().__call__()


@pytest.mark.long
@pytest.mark.usefixtures("importable")
def test_a_process_measures_times_and_memory_and_is_named_when_it_ends(bench, tmp_path):
    freeing = bench["processes"].FREEING
    with bench["processes"].Process(Fragile, (), "cpu", None, tmp_path, freeing) as process:
        assert 0 < process.first_call_s < 60
        assert len(process.times(3)) == 3
        memory = process.memory()
        process.times(1)
        for _ in range(2):  # in the middle of an order, and before one
            with pytest.raises(SystemExit, match="ended with code 3"):
                process.times(1)
    assert memory.state_bytes == 4 << 20
    assert memory.growth_bytes == pytest.approx(4 << 20, rel=0.1)
    assert memory.peak_bytes == memory.state_bytes + memory.growth_bytes


class Loops:
    """Stands for a side of a profile: turns of 2, 4, 6 ms with 30 page faults each, and of 1, 2, 3 ms of products."""

    def __init__(self, log, variant):
        self.log, self.variant, self.turns = log, variant, 0

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.log.append(("end", self.variant))

    def times(self, steps):
        self.log.append((steps, self.variant))
        self.turns += 1
        return [2.0 * self.turns] * steps, 30

    def classes(self):
        self.log.append(("classes", self.variant))
        return {"matrix products": 1.0 * self.turns, "LSTM": 0.0}


def test_both_sides_of_a_profile_take_turns(bench, monkeypatch):
    log = []
    monkeypatch.setattr(bench["profile_step"], "Apart", lambda name, bound, variant, threads: Loops(log, variant))
    rows = bench["profile_step"].measure("gpt2", "gemm", 13, 2)
    sides = ["torch.compile", "amp_compiler"]
    turns = [(what, side) for side in sides * 3 for what in (5, "classes")]
    assert log == turns + [("end", side) for side in reversed(sides)]
    for row, side in zip(rows, sides, strict=True):
        assert (row["model"], row["bound"], row["variant"]) == ("gpt2", "gemm", side)
        assert (row["step_ms"], row["page_faults"]) == (4.0, 6)
        assert row["classes_ms"] == {"matrix products": 2.0, "LSTM": 0.0, "the rest": 2.0}
