"""Variants of a benchmark take turns, in processes of their own; what these measure, and how they fail."""

import sys
from pathlib import Path

import pytest
import torch
from benchmark_modules import BENCHMARKS


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
