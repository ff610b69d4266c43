"""Benchmarks on a GPU, on stand-ins: sizes, bursts, groups of variants, what is left out, kernels by class."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import torch

import amp_compiler as amp

AUTOCAST, COMPILED, OURS = "autocast", "torch.compile", "amp_compiler"
MODES = [COMPILED, f"{COMPILED} reduce-overhead", f"{COMPILED} max-autotune"]


class Clock:
    """Stands for CUDA: an event is the number of steps before it, and a step takes 3 ms."""

    def __init__(self, monkeypatch):
        self.steps = self.waits = 0
        monkeypatch.setattr(torch.cuda, "synchronize", self.wait)
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(self))

    def wait(self):
        self.waits += 1

    def step(self):
        self.steps += 1


class Event:
    def __init__(self, clock):
        self.clock = clock

    def record(self):
        self.at = self.clock.steps

    def synchronize(self):
        self.clock.wait()

    def elapsed_time(self, other):
        return 3.0 * (other.at - self.at)


def test_a_burst_waits_before_it_and_behind_it_alone(bench, monkeypatch):
    clock = Clock(monkeypatch)
    assert bench["measuring"].burst(clock.step, 12) == 3.0
    assert (clock.steps, clock.waits) == (12, 2)


def test_bursts_take_turns_and_the_first_does_not_count(bench, monkeypatch):
    clock, calls = Clock(monkeypatch), []
    variants = {name: lambda name=name: (calls.append(name), clock.step()) for name in "AB"}
    times = bench["measuring"].interleaved_bursts(variants, 4, 2, 60.0)
    assert calls == ["A", "A", "B", "B"] * 5 and times == {"A": (3.0, 3.0, 3.0), "B": (3.0, 3.0, 3.0)}
    calls.clear()
    bench["measuring"].interleaved_bursts(variants, 100, 2, 0.0)
    assert calls == ["A", "A", "B", "B"] * 4  # one that does not count, and no fewer than three that do


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


def test_variants_are_measured_in_groups(bench, side):
    log = []
    groups = bench["bursts"].measure(lambda name: side(log, name), ["A", "B", "C"], 2, 60.0, 3, 10)
    told = [({name: time[0] for name, time in found.times.items()}, dict(found.failed)) for found in groups]
    assert told == [  # after the first round that counts, and at the end
        ({"A": 2.0, "B": 2.0}, {}),
        ({"A": 3.0, "B": 3.0}, {}),
        ({"A": 3.0, "B": 3.0, "C": 2.0}, {}),
        ({"A": 3.0, "B": 3.0, "C": 3.0}, {}),
    ]
    both = [("begin", "A"), ("begin", "B"), *[(name, 10) for name in "ABABABAB"], ("end", "B"), ("end", "A")]
    assert log == [*both, ("begin", "C"), *[("C", 10)] * 4, ("end", "C")]


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


def test_what_times_kernels_comes_last_and_alone_or_not_at_all(bench, side):
    log = []

    def start(name):
        side.now = 20.0 if name == "B tuned" else side.now
        return side(log, name)

    names = ["A tuned", "A", "B tuned", "B", "C tuned"]
    *_, found = bench["bursts"].measure(start, names, 3, 60.0, 1, 10, lambda name: name.endswith("tuned"))
    assert [name for what, name in log if what == "begin"] == ["A", "B", "A tuned", "B tuned"]
    assert log.index(("end", "A")) < log.index(("begin", "A tuned"))
    assert log.index(("end", "A tuned")) < log.index(("begin", "B tuned"))
    assert list(found.times) == ["A", "B", "A tuned", "B tuned"]
    assert found.failed == {"C tuned": "not begun, the time for this model's first calls was spent (60 s)"}


def test_a_process_is_waited_for_so_long_and_ended(bench, tmp_path, monkeypatch):
    ended = []
    process = object.__new__(bench["processes"].Process)
    process._name = "gpt2"
    process._connection = SimpleNamespace(poll=lambda timeout: (ended.append(timeout), False)[1])
    process._process = SimpleNamespace(terminate=lambda: ended.append("ended"), join=lambda: None)
    with pytest.raises(SystemExit, match="gpt2: its first call was not done in time"):
        process.wait(until=0.0)
    assert ended == [0.0, "ended"]


@pytest.mark.parametrize("error, patience", [(None, 20.0), (SystemExit(), 20.0), (KeyboardInterrupt(), 0.0)])
def test_who_interrupts_does_not_wait_for_a_compiler(bench, error, patience):
    done = []
    process = object.__new__(bench["processes"].Process)
    process._connection = SimpleNamespace(close=lambda: done.append("closed"))
    process._process = SimpleNamespace(
        join=lambda timeout=None: done.append(timeout), is_alive=lambda: True, terminate=lambda: done.append("ended")
    )
    process.__exit__(type(error), error, None)
    assert done == ["closed", patience, "ended", None]


@pytest.mark.parametrize("room, count", [(141e9, 2), (80e9, 1), (24e9, 1)])
def test_as_many_lie_on_the_gpu_as_find_room(bench, monkeypatch, room, count):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=room))
    assert bench["bursts"].fit_together() == count


def test_sizes_on_a_gpu(bench):
    cases = bench["cases"]
    assert set(cases.names("cuda")) == set(bench["models"].CUDA_SIZES) and cases.names("cpu") == cases.NAMES
    assert cases.items("gpt2", "gemm", "cuda") == 16 * 1024 and cases.items("gpt2", "update", "cuda") == 128
    assert cases.items("resnet50", "gemm", "cuda") == 256 and cases.items("resnet50", "update", "cuda") == 1
    assert cases.size_of(cases.TINY, "gemm", "cuda") == cases.SHAPES[cases.TINY].size("gemm")


def test_products_of_a_gpus_size_are_counted_without_numbers(bench):
    cases = bench["cases"]
    size = bench["models"].CUDA_SIZES["mlp"]
    hidden, head = (2 * size.batch * size.hidden * width for width in (size.hidden, size.classes))
    forward = size.layers * hidden + head
    assert cases.matmul_flops("mlp", "gemm", backward=False, device="cuda") == forward
    assert cases.matmul_flops("mlp", "gemm", backward=True, device="cuda") == 3 * forward - hidden


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


def test_ours_has_a_mode_too_where_it_is_asked_for(bench, on_cuda, monkeypatch):
    tuned, tiny = f"{OURS} max-autotune", bench["cases"].TINY
    options = ["--device", "cuda", "--models", tiny, "--variants", OURS, tuned]
    bench["train_step"].TRAINING.main([*options, "--together", "1"])
    assert [name for what, name in on_cuda if what == "begin"] == ["bf16", OURS, tuned]
    asked = []
    monkeypatch.setattr(amp, "training_step", lambda *given, mode, **rest: asked.append(mode))
    monkeypatch.setattr(amp, "compile", lambda *given, mode, **rest: asked.append(mode))
    for variant in (OURS, tuned):
        bench["train_step_runs"].Variant(variant, tiny, "gemm", "bf16", "cpu")
        bench["inference"].Inference(variant, tiny, "gemm", "bf16", "cpu")
    assert asked == ["default", "default", "max-autotune", "max-autotune"]


def test_a_run_that_is_interrupted_prints_what_it_has(bench, on_cuda, monkeypatch, capsys, tmp_path):
    rows = bench["bursts"].measure

    def measure(*arguments):
        found = next(rows(*arguments))
        found.failed["a slow one"] = "late"
        yield found
        raise KeyboardInterrupt

    monkeypatch.setattr(bench["bursts"], "measure", measure)
    tiny, path = bench["cases"].TINY, tmp_path / "r.json"
    with pytest.raises(KeyboardInterrupt):
        bench["train_step"].TRAINING.main(
            ["--device", "cuda", "--models", tiny, "mlp", "--together", "1", "--json", str(path)]
        )
    assert [row["variant"] for row in json.loads(path.read_text(encoding="utf-8"))["rows"]] == [OURS]
    printed = capsys.readouterr().out
    assert f"│ {OURS}" in printed
    assert printed.splitlines()[-3:] == [
        f"{tiny}, gemm, a slow one: late",
        f"{tiny}, gemm: not measured, or not to its end",
        "mlp, gemm: not measured, or not to its end",
    ]


def test_models_share_the_time_for_first_calls(bench, on_cuda, monkeypatch):
    asked, real = [], bench["bursts"].measure
    measure = lambda *given: asked.append(given[3]) or real(*given)  # noqa: E731
    monkeypatch.setattr(bench["bursts"], "measure", measure)
    tiny = bench["cases"].TINY
    options = ["--device", "cuda", "--together", "1", "--models", tiny, tiny, "--variants", OURS]
    for given in ([], ["--limit", "100"]):
        bench["train_step"].TRAINING.main([*options, *given])
    # The stand-in's clock stands still: what the first has not used is the second's.
    assert asked == [190.0, 380.0, 50.0, 100.0]


def test_what_is_measured_on_a_cpu_stays_what_it_was(bench):
    options = bench["train_step"].TRAINING.parse([])
    assert options.models == list(bench["cases"].NAMES) and options.bounds == ["gemm", "update"] and options.all
    assert options.variants == list(bench["comparison"].VARIANTS) and options.modes == ["default"]
    assert (options.steps, options.turn, options.least, options.together) == (20, 5, 10.0, None)
    assert not bench["train_step"].TRAINING.parse(["--models", "gpt2"]).all


def test_the_tensors_of_an_update_are_made_where_they_are_used(bench):
    runs = bench["update_runs"]
    made = []
    real = torch.randn

    def randn(*size, generator=None, device=None, **other):
        made.append((str(generator.device), device))
        return real(*size, generator=generator, device=device, **other)

    patch = pytest.MonkeyPatch()
    with patch.context() as context:
        context.setattr(torch, "randn", randn)
        runs.Tensors([(4, 4)], "bf16", "cpu")
    assert made == [("cpu", "cpu")] * 2


def test_the_update_on_a_gpu_runs_in_bursts(bench, monkeypatch):
    update = bench["update"]
    assert update.parse(["--device", "cuda"]).steps == 5 * update.BURST and update.parse([]).steps == 20
    asked = []
    monkeypatch.setattr(update, "make", lambda variant, *rest: variant)
    monkeypatch.setattr(
        bench["measuring"],
        "interleaved_bursts",
        lambda variants, bursts, length, seconds: asked.append((bursts, length)) or dict.fromkeys(variants, (2.0,) * 3),
    )
    rows = update.measure("wide", "bf16", update.parse(["--device", "cuda", "--parameters", "2000"]))
    assert asked == [(5, 20)] and [row["variant"] for row in rows] == list(bench["update_runs"].VARIANTS)
    assert sys.modules["measuring"] is bench["measuring"]
