"""Every example runs, and shows what its text says that it shows."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from amp_compiler.ir.run_file import read_run
from amp_compiler.policy.loader import load_rules

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))
ALONE = "07_own_pass.py"  # a script that runs as a user runs it; what all of them do is called below


def load(name: str):
    return runpy.run_path(str(EXAMPLES / name))["main"]


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [name if name == ALONE else pytest.param(name, marks=pytest.mark.slow) for name in SCRIPTS]
)
def test_as_a_script(name):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, EXAMPLES / name], capture_output=True, text=True, check=False, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout


@pytest.mark.usefixtures("node_by_node")
def test_compile_trains(capsys):
    losses = load("01_compile.py")(steps=20)
    assert losses[-1] < 0.5 * losses[0]
    assert "state_dict keys are the model's own: True" in capsys.readouterr().out


def test_rules_change_what_they_say(capsys):
    before, after = load("02_rules.py")()
    changed = {node.name: (old.precision, node.precision) for old, node in zip(before.nodes, after.nodes, strict=True)}
    assert changed["linear"] == ("low", "fp32")
    assert changed["softmax"] == ("low", "fp32")
    assert "by my_rules.yaml:" in capsys.readouterr().out
    assert load_rules(EXAMPLES / "my_rules.yaml").rules


def test_fp16_overflows_on_a_cpu_and_the_cures_help():
    infinities = load("03_fp16_overflow_on_cpu.py")()
    assert infinities.pop("FP16") > 0
    assert set(infinities.values()) == {0}


def test_a_training_step_learns_and_skips_the_damaged_batch(capsys):
    losses = load("04_training_step.py")(steps=60)
    assert losses[30] == float("inf") and losses[-1] < 0.6 * losses[0]
    out = capsys.readouterr().out
    assert "scale 32768, 1 steps skipped" in out and "run in FP16" in out


@pytest.mark.long
def test_small_gradients_need_a_loss_scale():
    results = load("05_loss_scaling.py")()
    (first, exact, _), (_, unscaled, lost), (_, scaled, kept) = results.values()
    assert exact < 0.1 * first
    assert unscaled > 0.9 * first and lost > 0.9
    assert abs(scaled - exact) < 0.05 * exact and kept < 0.01


@pytest.mark.long
def test_an_onnx_model_is_converted_exported_and_trained(tmp_path):
    results = load("06_onnx.py")(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.fp16.onnx", "m.onnx", "m.torch.fp16.onnx"]
    assert results["ratio"] < 0.65 and results["conversion"].report.ok(2e-3)
    assert results["conversion"].report.largest_error > 0
    assert results["export"].plan.low_nodes == len(results["export"].plan.nodes)
    assert results["losses"][-1] < 0.5 * results["losses"][0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_profile_foretells_what_fp16_loses(seed):
    losses, foretold = load("09_predict_underflow.py")(seed=seed, images=4)
    exact, unscaled, scaled = losses.values()
    without, kept, weights = foretold.values()
    assert min(without) > 0.9 and max(kept) < 0.01
    assert weights[0] > 0.1 and weights[1] <= 1e-3
    assert exact < 0.06 and unscaled > 5 * exact
    assert abs(scaled - exact) < 0.01 * exact


def test_a_training_is_watched(tmp_path, capsys):
    scaled, unscaled = (read_run(path).records for path in load("08_watch_a_run.py")(str(tmp_path), steps=80))
    assert [record.step for record in scaled] == list(range(5, 81, 5))
    assert scaled[-1].skipped_steps == unscaled[-1].skipped_steps == 1
    assert scaled[-1].aux["read right"] > 0.8 and scaled[-1].loss < 0.5 * unscaled[-1].loss
    assert scaled[-1].zero < 0.05 < 0.3 < unscaled[-1].zero
    assert "step     75  loss nan" in capsys.readouterr().out


def test_a_pass_of_ones_own_saturates_casts(capsys):
    largest = load("07_own_pass.py")()
    assert largest == {"plain": float("inf"), "saturating": 65504.0}
    assert "aten.clamp.default(linear, -65504.0, 65504.0)" in capsys.readouterr().out


@pytest.mark.long
def test_a_training_goes_on_from_its_checkpoint_to_the_bit(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    example = runpy.run_path(str(EXAMPLES / "train_gpt.py"))
    whole = example["train"](str(tmp_path / "whole"), 40, logs=str(tmp_path / "logs"))
    first = example["train"](str(tmp_path / "half"), 20)
    assert first + example["train"](str(tmp_path / "half"), 40) == whole and whole[-1] < 0.8 * whole[0]
    beside = example["train_with_autocast"](20)
    assert whole[:20] == pytest.approx(beside, rel=0.05)  # BF16 roundings that AdamW amplifies over 20 updates
    assert capsys.readouterr().out.count("on what is held back") == 4 and any((tmp_path / "logs").iterdir())
