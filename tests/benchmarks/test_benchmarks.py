"""The benchmarks run from the command line, write what they say, and compare like with like; no time is judged."""

import contextlib
import importlib
import json
import subprocess
import sys
import warnings

import pytest
from benchmark_modules import BENCHMARKS

from amp_compiler.policy.loader import load_rules

FACTS = {"benchmark", "date", "cpu", "gpu", "threads", "versions", "settings", "rows"}
SPEED = {"model", "parameters", "variant", "step_ms", "step_ms_10", "step_ms_90", "time_ratio"}
STEP = SPEED | {
    "bound", "items", "items_per_s", "best_of_torch", "matmul_flops", "gemm_tflops", "gemm_floor_ms", "gemm_share",
    "first_call_s", "first_call_ratio", "warm_call_s", "warm_call_ratio", "state_bytes", "growth_bytes", "peak_bytes",
    "memory_ratio",
}  # fmt: skip


def run(script, path, *arguments):
    """What a benchmark wrote and what it printed."""
    command = [sys.executable, str(BENCHMARKS / script), "--json", str(path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text(encoding="utf-8")), done.stdout


def check_steps(matches, printed, variants, bounds):
    assert set(matches) == FACTS
    assert [(row["bound"], row["variant"]) for row in matches["rows"]] == [(b, v) for b in bounds for v in variants]
    for row in matches["rows"]:
        assert set(row) == STEP
        assert 0 < row["step_ms_10"] <= row["step_ms"] <= row["step_ms_90"]
        assert row["gemm_share"] == pytest.approx(row["gemm_floor_ms"] / row["step_ms"])
        assert row["gemm_floor_ms"] == pytest.approx(row["matmul_flops"] / row["gemm_tflops"] / 1e9)
        assert row["peak_bytes"] == row["state_bytes"] + row["growth_bytes"]
        assert row["state_bytes"] >= 4 * row["parameters"]
        assert row["first_call_s"] > 0
        assert row["variant"] in printed
    assert "10 to 90 %" in printed


EAGER = ["--models", "tiny-mlp", "--variants", "autocast", "--steps", "2", "--least", "0"]
SCRIPTS = pytest.mark.parametrize(("script", "bound"), [("train_step", "update"), ("inference", "weights")])


@pytest.mark.long
@SCRIPTS
def test_an_eager_variant_in_this_process(tmp_path, bench, monkeypatch, capsys, script, bound):
    """Each variant else has a process of its own, which test_benchmarks_processes.py tests."""
    processes, path = bench["processes"], tmp_path / "r.json"

    class Here(contextlib.nullcontext):
        def __init__(self, make, arguments, device, prepare, cache, settings=None, wait=True):
            super().__init__(self)
            self.step, self.device = make(*arguments, device), device
            self.first_call_s = processes._timed(self.step, device) / 1000

        def times(self, steps):
            return [processes._timed(self.step, self.device) for _ in range(steps)]

        def memory(self):
            return processes._memory(self.step, self.device)

    monkeypatch.setattr(bench["comparison"], "Process", Here)
    benchmark = {"train_step": "TRAINING", "inference": "INFERENCE"}[script]
    with warnings.catch_warnings():
        assert getattr(bench[script], benchmark).main([*EAGER, "--bounds", bound, "--json", str(path)]) == 0
    check_steps(json.loads(path.read_text(encoding="utf-8")), capsys.readouterr().out, ["autocast"], [bound])


# Some are named in docs/benchmarks.md; `make bench` runs seven of them.
SHORT = {
    "train_step.py": ["--models", "tiny-mlp", "--steps", "2", "--least", "0"],
    "inference.py": ["--models", "tiny-mlp", "--steps", "2", "--least", "0"],
    "update.py": ["--models", "wide", "--parameters", "2000", "--steps", "2"],
    "host_cost.py": ["--models", "mlp-2", "--runs", "3"],
    "look_cost.py": ["--models", "mlp-2", "--turns", "3"],
    "range_profile.py": ["--models", "tiny-mlp", "--dtype", "bf16", "--steps", "2"],
    "ranks.py": ["--models", "tiny-mlp", "--steps", "4", "--ways", "amp.training_step", "DDP"],
    "scale.py": ["--layers", "1", "--ranks", "8", "64", "--rules", "fast", "--tokens", "512"],
}


@pytest.mark.slow
@pytest.mark.parametrize("script", SHORT)
def test_a_short_run_from_the_command_line(script, tmp_path):
    result, printed = run(script, tmp_path / "r.json", *SHORT[script])
    assert set(result) == FACTS and result["rows"] and printed


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


def test_planning_and_rewriting_of_a_model(bench):
    cases, plans = bench["cases"], bench["plan_models"]
    row = plans.measure_model(cases.TINY, load_rules("fast"), "bf16", "cpu", 1)
    assert row["graph"] == cases.TINY and row["casts"] > 0 and row["cast_bytes"] > 0
    assert row["nodes"] * row["us_per_node"] == pytest.approx(1e6 * (row["seconds"] + row["rewrite_seconds"]))


# RMSNorms that are exported in parts, in an opset that has no op for them: in FP32, with two casts each.
NORMS_IN_PARTS = {"llama": 5, "t5": 12}


@pytest.mark.parametrize("variant", ["amp_compiler", "amp_compiler, fused"])
def test_exports_cast_no_more_than_the_leanest_careful_peer(variant):
    """Casts, their bytes and the error of each measured export, beside AutoCast's: by default, and fused.

    But for the casts of norms that stay in parts by default: what is counted beside them is what fusing leaves.
    """
    for row in json.loads((BENCHMARKS / "results" / "onnx_casts.json").read_text(encoding="utf-8"))["rows"]:
        ours, theirs = row[variant], row["ModelOpt AutoCast"]
        norms = NORMS_IN_PARTS.get(row["model"], 0) if variant == "amp_compiler" else 0
        assert ours["error"] <= theirs["error"], row["model"]
        if norms:
            assert ours["casts"] <= row["amp_compiler, fused"]["casts"] + 2 * norms, row["model"]
            continue
        for fact in ("casts", "cast_bytes"):
            assert ours[fact] <= theirs[fact], (row["model"], fact)


def test_the_results_of_tuning_hold_what_the_docs_say(monkeypatch):
    """Where no guard of the converter decides, `amp.tune` keeps no more nodes than AutoCast, at no more error."""
    monkeypatch.syspath_prepend(BENCHMARKS.parent)
    tune = importlib.import_module("benchmarks.tune")
    data = json.loads((BENCHMARKS / "results" / "tune.json").read_text(encoding="utf-8"))
    assert data["outcome"] == tune.outcome(data["rows"])
    for row in data["rows"]:
        ours, theirs = row["tune"], row["AutoCast"]
        assert ours["error"] <= theirs["error"] and ours["runs"] <= ours["limit"] and not ours["stopped"]
        if not row["model"].startswith(("llama", "t5")):
            assert ours["fp32"] <= theirs["fp32"] and (ours["fp32"] < theirs["fp32"] or not theirs["fp32"])
