"""The benchmarks run from the command line, write what they say, and compare like with like; no time is judged."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
MODULES = ("cases", "comparison", "measuring", "processes", "readme", "train_step_runs", "update", "update_runs")
FACTS = {"benchmark", "date", "cpu", "gpu", "threads", "versions", "settings", "rows"}
SPEED = {"model", "parameters", "variant", "step_ms", "step_ms_10", "step_ms_90", "time_ratio"}
STEP = SPEED | {
    "bound", "items", "items_per_s", "best_of_torch", "matmul_flops", "gemm_tflops", "gemm_floor_ms", "gemm_share",
    "first_call_s", "first_call_ratio", "state_bytes", "growth_bytes", "peak_bytes", "memory_ratio",
}  # fmt: skip
UPDATE = SPEED | {"tensors", "gradients", "bytes_per_parameter", "formula", "gb_per_s", "copy_share"}
KINDS = ("bf16", "fp16", "fp32")


@pytest.fixture(scope="module")
def bench():
    """The benchmarks' modules, which are scripts beside each other and not part of the package."""
    pytest.importorskip("transformers")
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return {name: __import__(name) for name in MODULES}
    finally:
        sys.path.remove(str(BENCHMARKS))


def run(script, path, *arguments):
    """What a benchmark wrote and what it printed."""
    command = [sys.executable, str(BENCHMARKS / script), "--json", str(path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text(encoding="utf-8")), done.stdout


def check_steps(found, printed, variants, bounds):
    assert set(found) == FACTS
    assert [(row["bound"], row["variant"]) for row in found["rows"]] == [(b, v) for b in bounds for v in variants]
    for row in found["rows"]:
        assert set(row) == STEP
        assert 0 < row["step_ms_10"] <= row["step_ms"] <= row["step_ms_90"]
        assert row["gemm_share"] == pytest.approx(row["gemm_floor_ms"] / row["step_ms"])
        assert row["gemm_floor_ms"] == pytest.approx(row["matmul_flops"] / row["gemm_tflops"] / 1e9)
        assert row["peak_bytes"] == row["state_bytes"] + row["growth_bytes"]
        assert row["state_bytes"] >= 4 * row["parameters"]
        assert row["first_call_s"] > 0
        assert row["variant"] in printed
    assert "10 to 90 %" in printed


@pytest.mark.parametrize(("script", "bound"), [("train_step.py", "update"), ("inference.py", "weights")])
def test_an_eager_variant_from_the_command_line(tmp_path, script, bound):
    options = ["--models", "tiny-mlp", "--bounds", bound, "--variants", "autocast", "--steps", "2"]
    check_steps(*run(script, tmp_path / "r.json", *options), ["autocast"], [bound])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "bounds"), [("train_step.py", ["gemm", "update"]), ("inference.py", ["gemm", "weights"])]
)
def test_all_variants_from_the_command_line(tmp_path, bench, script, bounds):
    found, printed = run(script, tmp_path / "r.json", "--models", "tiny-mlp", "--steps", "2")
    check_steps(found, printed, bench["comparison"].VARIANTS, bounds)
    assert [row["variant"] for row in found["rows"] if row["best_of_torch"]] == ["torch.compile"] * 2
    assert all(row["time_ratio"] == 1 for row in found["rows"] if row["best_of_torch"])


def check_updates(found, printed, variants, kinds):
    assert set(found) == FACTS
    expected = [(kind, v) for kind in kinds for v in variants if (kind, v) != ("fp32", "casts alone")]
    assert [(row["gradients"], row["variant"]) for row in found["rows"]] == expected
    for row in found["rows"]:
        assert set(row) == UPDATE
        speed = row["bytes_per_parameter"] * row["parameters"] / row["step_ms"] / 1e6
        assert row["gb_per_s"] == pytest.approx(speed)
        assert row["variant"] in printed
    assert all(row["copy_share"] == 1 for row in found["rows"] if row["variant"] == "copy")


def test_updates_from_the_command_line(tmp_path, bench):
    variants = [v for v in bench["update_runs"].VARIANTS if v != "torch.compile"]
    options = ["--parameters", "20000", "--dtype", "bf16", "fp32", "--steps", "2", "--variants", *variants]
    check_updates(*run("update.py", tmp_path / "r.json", *options), variants, ["bf16", "fp32"])


@pytest.mark.slow
def test_all_updates_from_the_command_line(tmp_path, bench):
    options = ["--models", "wide", "--parameters", "2000", "--steps", "2"]
    found, printed = run("update.py", tmp_path / "r.json", *options)
    check_updates(found, printed, bench["update_runs"].VARIANTS, ["bf16", "fp32", "fp16"])


def weights_of(made):
    return [weight.detach() for weight in made.weights]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["OURS", "FUSED", "FOREACH"])
def test_every_update_does_the_same_arithmetic(bench, name, kind):
    runs = bench["update_runs"]
    shapes = runs.transformer(5000)
    made = runs.make(getattr(runs, name), shapes, kind, "cpu")
    plain = runs.Tensors(shapes, kind, "cpu")
    exact = [torch.nn.Parameter(weight.double().detach()) for weight in plain.weights]
    optimizer = torch.optim.AdamW(exact, runs.LR, betas=runs.BETAS, eps=runs.EPS, weight_decay=runs.DECAY)
    for _ in range(3):
        made()
        for weight, grad in zip(exact, plain.grads, strict=True):
            weight.grad = grad.double() / (runs.SCALE if kind == "fp16" else 1)
        if kind == "fp16":
            assert torch.nn.utils.clip_grad_norm_(exact, runs.CLIP) > 0
        optimizer.step()
    for got, weight, start in zip(weights_of(made), exact, plain.weights, strict=True):
        moved = (weight - start).abs().max()
        assert moved > runs.LR  # three steps of about lr each
        assert (got - weight).abs().max() < 1e-3 * moved
    for low, got in zip(made.lows, weights_of(made), strict=bool(made.lows)):
        assert torch.equal(low, got.to(low.dtype))


class ByteCounter(TorchDispatchMode):
    """Bytes that the calls of an optimizer read and write, by their schemas; numbers of one element do not count."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if "detach" in str(func):
            return result
        given = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | (kwargs or {})
        written = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        if "_fused_adamw_" in str(func) and given.get("grad_scale") is None:
            written -= {"grads"}  # they are written where the kernel unscales them
        overwritten = {"self"} if "copy_" in str(func) else set()
        read = {id(t): t for name, value in given.items() if name not in overwritten for t in tensors(value)}
        self.bytes += sum(t.nbytes for t in read.values())
        self.bytes += sum(t.nbytes for name in written for t in tensors(given[name]))
        if not written:
            self.bytes += sum(t.nbytes for t in tensors(result))
        return result


def tensors(value):
    leaves = value if isinstance(value, (list, tuple)) else [value]
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.numel() > 1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["FUSED", "FOREACH", "CASTS"])
def test_bytes_are_those_that_the_dispatcher_sees(bench, name, kind):
    runs = bench["update_runs"]
    made = runs.make(getattr(runs, name), [(256, 64), (128, 128)], kind, "cpu")
    made()
    with ByteCounter() as counter:
        made()
    if name == "CASTS" and kind == "fp32":
        assert counter.bytes == 0
        return
    count = 2 * 256 * 64
    assert counter.bytes / count == pytest.approx(runs.bytes_per_parameter(getattr(runs, name), kind), abs=0.01)


def test_ours_moves_thirty_bytes_per_parameter(bench):
    runs = bench["update_runs"]
    made = runs.make(runs.OURS, [(256, 64)], "fp16", "cpu")
    both = [*made.masters, *made.moments[0], *made.moments[1]]  # read and written
    moved = 2 * sum(t.nbytes for t in both) + 2 * sum(t.nbytes for t in made.grads) + sum(t.nbytes for t in made.lows)
    assert moved / (256 * 64) == 30 == runs.bytes_per_parameter(runs.OURS, "fp16")
    assert runs.formula(runs.OURS, "fp16") == "2 check + 2 gradient + 24 weight and moments + 2 16-bit copy"


def test_mixes_have_about_the_parameters_asked_for(bench):
    for mix in bench["update_runs"].MIXES.values():
        assert sum(torch.Size(shape).numel() for shape in mix(20_000_000)) == pytest.approx(20e6, rel=0.1)


def test_products_of_the_mlp_are_counted(bench):
    cases, tiny = bench["cases"], bench["cases"].TINY
    first, head = (2 * 8 * 32 * width for width in (32, 100))
    assert cases.matmul_flops(tiny, "gemm", backward=False) == first + head
    # The backward makes both weight gradients, and one input gradient: the first layer's input needs none.
    assert cases.matmul_flops(tiny, "gemm", backward=True) == 2 * first + 3 * head


def test_products_inside_fused_lstm_and_attention_are_counted(bench):
    cases = bench["cases"]
    shape, rows = cases.SHAPES["lstm"], cases.items("lstm", "update")
    lstm, head = 2 * 2 * 2 * rows * 4 * shape.hidden**2, 2 * rows * shape.hidden * shape.vocab
    assert cases.matmul_flops("lstm", "update", backward=False) == lstm + head
    shape, rows = cases.SHAPES["gpt2"], cases.items("gpt2", "update")
    projections = shape.layers * 2 * rows * (4 + 2 * 4) * shape.hidden**2  # q, k, v, out, and a net four times as wide
    attention = shape.layers * 2 * 2 * rows * shape.small_tokens * shape.hidden
    head = 2 * rows * shape.hidden * shape.vocab
    assert cases.matmul_flops("gpt2", "update", backward=False) == projections + attention + head


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


def test_the_readme_compares_with_the_fastest_mode(bench, tmp_path, monkeypatch):
    numbers = {"model": "m", "bound": "gemm", "peak_bytes": 10, "first_call_s": 2.0, "gemm_share": 0.5}
    times = {"fp32": 9.0, "torch.compile": 8.0, "torch.compile reduce-overhead": 4.0, "amp_compiler": 3.0}
    rows = [{**numbers, "variant": variant, "step_ms": time} for variant, time in times.items()]
    monkeypatch.setattr(bench["readme"], "RESULTS", tmp_path)
    (tmp_path / "inference_cpu.json").write_text(json.dumps({"rows": rows}), encoding="utf-8")
    text = bench["readme"].render("a\n<!-- table: inference -->\nold\n<!-- end -->\nb")
    assert "| m | gemm | 4.0 | 3.0 | 0.75 | 1.00 | 1.00 | 50% | 50% |" in text
    assert "old" not in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert widths == {10}


def test_the_notes_show_the_classes_that_take_time(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(bench["readme"], "RESULTS", tmp_path)
    facts = {"model": "m", "bound": "gemm"}
    classes = {"matrix products": 5.0, "LSTM": 0.0, "the rest": 2.04}
    profiled = [{**facts, "variant": "amp_compiler", "step_ms": 7.04, "page_faults": 1234, "classes_ms": classes}]
    timed = [{**facts, "variant": variant, "gemm_floor_ms": 3.0} for variant in ("torch.compile", "amp_compiler")]
    for name, rows in (("profile_cpu", profiled), ("train_step_cpu", timed)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": rows}), encoding="utf-8")
    head, _, row = bench["readme"].profile_table().splitlines()
    assert head == "| model | bound by | variant | step | matrix products | the rest | GEMM floor | page faults |"
    assert row == "| m | gemm | amp_compiler | 7.0 | 5.0 | 2.0 | 3.0 | 1,234 |"


def test_names_of_modes(bench):
    comparison = bench["comparison"]
    for mode in comparison.MODES:
        assert comparison.compiled_mode(comparison.compiled_name(mode)) == mode
    assert comparison.compiled_name("default") == "torch.compile"
    assert comparison.compiled_mode("amp_compiler") is None
    assert comparison.compiled_mode(comparison.RECURRENT) == "default"


def test_recurrent_models_are_compiled_as_a_variant_of_its_own(bench, monkeypatch):
    comparison = bench["comparison"]
    options = argparse.Namespace(variants=list(comparison.VARIANTS), modes=["default"])
    assert comparison._variants(options, "gpt2") == list(comparison.VARIANTS)
    assert comparison._variants(options, "lstm") == [
        "fp32", "autocast", "torch.compile", "torch.compile allow_rnn", "amp_compiler",
    ]  # fmt: skip
    monkeypatch.setattr(torch, "compile", lambda function, mode: (function, mode))
    with torch._dynamo.config.patch(allow_rnn=False):
        assert comparison.compiled(len, comparison.RECURRENT) == (len, "default") and torch._dynamo.config.allow_rnn
        assert comparison.compiled(len, "torch.compile") == (len, "default") and not torch._dynamo.config.allow_rnn
    assert comparison.compiled(len, "fp32") is len
