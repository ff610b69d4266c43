"""Benchmarks on a GPU, on stand-ins: sizes, bursts, groups of variants, what is left out, kernels by class."""

from __future__ import annotations

import json

import pytest
import torch

AUTOCAST, COMPILED, OURS = "autocast", "torch.compile", "amp_compiler"
MODES = [COMPILED, f"{COMPILED} reduce-overhead", f"{COMPILED} max-autotune"]


class Side:
    """Stands for the process of a variant: its first call takes `first` seconds, each later burst 1 ms more."""

    def __init__(self, log, name, first=1.0, breaks=99):
        self.log, self.name, self.first, self.left, self.made = log, name, first, breaks, 0.0

    def __enter__(self):
        self.log.append(("begin", self.name))
        return self

    def __exit__(self, *error):
        self.log.append(("end", self.name))

    def wait(self, until):
        if self.first > until - Side.now:
            raise SystemExit(f"{self.name}: its first call was not done in time")
        return self.first

    def memory(self):
        return Side.memory_of(2, 1)

    def burst(self, steps):
        self.left -= 1
        if self.left < 0:
            raise SystemExit(f"{self.name}: its process ended with code 1")
        self.log.append((self.name, steps))
        self.made += 1.0
        return self.made


@pytest.fixture
def side(bench, monkeypatch):
    Side.now, Side.memory_of = 0.0, bench["processes"].Memory
    monkeypatch.setattr(bench["bursts"].time, "perf_counter", lambda: Side.now)
    return Side


def test_what_is_late_or_breaks_is_left_out_and_told(bench, side):
    sides = {"slow": 61.0, "fast": 5.0, "last": 44.0}

    def start(name):
        side.now = 50.0 if name == "last" else 0.0
        return side([], name, sides[name], breaks=2 if name == "fast" else 99)

    *_, found = bench["bursts"].measure(start, list(sides), 2, 60.0, 3, 10)
    assert list(found.times) == ["last"]  # 45 s are left to whoever begins late
    assert found.times["last"] == bench["measuring"].spread([2.0, 3.0, 4.0])
    assert found.failed == {
        "slow": "slow: its first call was not done in time",
        "fast": "fast: its process ended with code 1",
    }


def test_masks_of_transformers_are_not_read_for_it(bench):
    cases, size = bench["cases"], bench["models"].CUDA_SIZES["bert"]
    rows = size.batch * size.tokens
    blocks = size.layers * (2 * rows * (4 + 2 * size.widening) * size.hidden**2 + 4 * rows * size.tokens * size.hidden)
    head = 2 * rows * size.hidden * (size.hidden + size.vocab)
    assert cases.matmul_flops("bert", "gemm", backward=False, device="cuda") == blocks + head


@pytest.fixture
def on_cuda(bench, side, monkeypatch):
    """The benchmark of training steps above a machine with a stand-in for a GPU."""
    log = []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a stand-in")

    class Process(side):
        def __init__(self, make, arguments, device, prepare, cache, settings=None, wait=True):
            assert device == "cuda" and (wait or (prepare is None) == (arguments[0] == AUTOCAST))
            super().__init__(log, arguments[0], 999.0 if arguments[0].endswith("max-autotune") else 1.0)

    monkeypatch.setattr(bench["comparison"], "Process", Process)
    return log


def test_training_steps_on_a_gpu(bench, on_cuda, tmp_path, capsys):
    path = tmp_path / "r.json"
    options = ["--device", "cuda", "--models", bench["cases"].TINY, "--together", "2", "--json", str(path)]
    assert bench["train_step"].TRAINING.main(options) == 1  # one was too slow
    assert [name for what, name in on_cuda if what == "begin"] == ["bf16", OURS, *MODES[:2], AUTOCAST, MODES[2]]
    assert (OURS, 12) in on_cuda
    found, printed = json.loads(path.read_text(encoding="utf-8")), capsys.readouterr().out
    assert found["settings"]["together"] == 2 and found["versions"]["triton"] and found["gpu"] == "a stand-in"
    assert [(row["bound"], row["variant"]) for row in found["rows"]] == [
        ("gemm", variant) for variant in (OURS, *MODES[:2], AUTOCAST)
    ]
    assert all(row["peak_bytes"] == 3 and "warm_call_s" not in row for row in found["rows"])
    assert f"{MODES[2]}: its first call was not done in time" in " ".join(printed.split())
    assert max(map(len, printed.splitlines())) <= 130
