"""A configuration of DeepSpeed, imported, in a real step: the scale goes as DeepSpeed's does, and the run ends."""

import json

import pytest
import torch
from deepspeed_scaler import AtMinimum, Scaler
from torch import nn
from toys import mean_square, sgd_step

import amp_compiler as amp
from amp_compiler.policy.importing.files import import_file


def step_of(tmp_path, config):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    dtype = "fp16" if "fp16" in config else "bf16"
    return model, sgd_step(model, mean_square, 0.0, rules=import_file(path).rules, dtype=dtype)


@pytest.mark.parametrize("consecutive", [False, True])
def test_the_scale_goes_as_deepspeeds_until_the_run_ends(consecutive, tmp_path):
    fp16 = {"enabled": True, "initial_scale_power": 5, "loss_scale_window": 3, "hysteresis": 2, "min_loss_scale": 4}
    config = {"fp16": fp16 | {"consecutive_hysteresis": consecutive}, "zero_optimization": {"stage": 2}}
    _, step = step_of(tmp_path, config)
    scaler = Scaler(32.0, 3, 2, consecutive, 4.0)
    good, bad = torch.ones(3, 4), torch.full((3, 4), float("inf"))
    for letter in "....x.x..x....xx.x.......xxxxxxxxx":
        try:
            expected = scaler.step(letter == "x")
        except AtMinimum:
            with pytest.raises(amp.LossScaleError):
                step(bad)
            return
        step(bad if letter == "x" else good)
        assert float(step.loss_scale) == expected
    raise AssertionError("DeepSpeed would have ended the run")


def test_the_preset_casts_the_whole_model_and_keeps_masters(tmp_path):
    model, step = step_of(tmp_path, {"fp16": {"enabled": True}, "zero_optimization": {"stage": 1}})
    step(torch.ones(3, 4))
    assert {node.precision for node in step.plan.nodes if node.op == "aten.linear"} == {"low"}
    assert {one.dtype for one in model.parameters()} == {torch.float32}
    assert step._scale_config == amp.DynamicLossScale(
        growth_interval=1000, growth_delay=1, hysteresis=2, consecutive_hysteresis=False, min=1.0, patience=1
    )


@pytest.mark.parametrize("checks", [True, False])
def test_in_bf16_the_check_is_the_configurations(checks, tmp_path):
    bf16 = {"enabled": True, "check_grad_overflow": checks}
    model, step = step_of(tmp_path, {"bf16": bf16, "zero_optimization": {"stage": 2}})
    step(torch.full((3, 4), float("inf")))
    assert int(step.skipped_steps) == int(checks) and bool(model.weight.isfinite().all()) == checks
    targets = [node for node in step.graph_module.graph.nodes if "grad_check" in str(node.target)]
    assert bool(targets[0].args[0]) == checks
