"""Variants of a benchmark take turns, in processes of their own; what these measure, and how they fail."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from benchmark_modules import BENCHMARKS


def test_median_and_quantiles(bench):
    assert bench["measuring"].spread([float(value) for value in range(11, 0, -1)]) == (6.0, 2.0, 10.0)
    assert bench["measuring"].spread([3.0]) == (3.0, 3.0, 3.0)


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


@pytest.mark.usefixtures("importable")
def test_a_process_measures_times_and_memory(bench, tmp_path):
    freeing = bench["processes"].FREEING
    with bench["processes"].Process(Hoarder, (), "cpu", None, tmp_path, freeing) as process:
        assert 0 < process.first_call_s < 60
        assert len(process.times(3)) == 3
        memory = process.memory()
    assert memory.state_bytes == 4 << 20
    assert memory.growth_bytes == pytest.approx(4 << 20, rel=0.1)
    assert memory.peak_bytes == memory.state_bytes + memory.growth_bytes


def broken(device):
    raise RuntimeError("no such variant")


@pytest.mark.usefixtures("importable")
def test_a_process_that_fails_at_once_is_named(bench, tmp_path, capfd):
    with pytest.raises(SystemExit, match="ended with code 1"):
        bench["processes"].Process(broken, (), "cpu", None, tmp_path)
    assert "no such variant" in capfd.readouterr().err


class Fragile(Hoarder):
    """Ends its process at the third step."""

    def __init__(self, device):
        super().__init__(device)
        self.left = 2

    def __call__(self):
        self.left -= 1
        if self.left < 0:
            sys.exit(3)


@pytest.mark.usefixtures("importable")
def test_a_process_that_ends_between_two_orders_is_named(bench, tmp_path):
    with bench["processes"].Process(Fragile, (), "cpu", None, tmp_path) as process:
        process.times(1)
        for _ in range(2):  # in the middle of an order, and before one
            with pytest.raises(SystemExit, match="ended with code 3"):
                process.times(1)
