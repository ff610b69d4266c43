"""A step on a CUDA device with epilogues of cuBLASLt wherever they compute what loops do, fast or not."""

from __future__ import annotations

import functools

import pytest
import torch
from toys import squares
from training_gpu import REPLAYED

import amp_compiler as amp
from amp_compiler.ops.cuda import cublaslt, epilogue_trials
from amp_compiler.training import build

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
WIDE, INNER, ROWS = 256, 1024, 512


def trained(activation, dtype, steps=8):
    torch.manual_seed(0)
    nn = torch.nn
    hidden = nn.Sequential(nn.LayerNorm(WIDE), nn.Linear(WIDE, INNER), activation, nn.Linear(INNER, WIDE))
    model = nn.Sequential(hidden, nn.Linear(WIDE, 64)).cuda()
    scale = {} if dtype == "bf16" else {"loss_scale": 1024.0}
    step = amp.training_step(model, squares, torch.optim.AdamW(model.parameters(), 1e-3), dtype=dtype, **scale)
    x, y = torch.randn(ROWS, WIDE, device="cuda"), torch.randn(ROWS, 64, device="cuda")
    return step, torch.stack([step(x, y) for _ in range(steps)])


@pytest.mark.parametrize(
    ("activation", "dtype"),
    [
        pytest.param(torch.nn.GELU(approximate="tanh"), "bf16", id="gelu"),
        pytest.param(torch.nn.ReLU(), "fp16", id="relu"),
    ],
)
def test_a_step_with_epilogues_trains_as_one_without(activation, dtype, monkeypatch, record_property):
    plain, expected = trained(activation, dtype)

    def first(run, device):
        return float(not (isinstance(run, functools.partial) and run.func == cublaslt.CUBLASLT.run))

    monkeypatch.setattr(build, "_is_tuned", lambda settings, graph_module: True)
    monkeypatch.setattr(build, "TRIALS", epilogue_trials.Trials())
    monkeypatch.setattr(epilogue_trials, "seconds_of", first)
    step, losses = trained(activation, dtype)
    assert step.execution == plain.execution == REPLAYED
    notes = " ".join(step.plan.notes)
    assert "wrong" not in notes and "failed" not in notes
    record_property("notes", notes or "none")
    text = step.stages["fuse_epilogues"].text
    record_property("epilogues", text.count("= amp_compiler.mm_"))
    torch.testing.assert_close(losses, expected, rtol=2e-2, atol=0)
    for name, gradient in step.gradients().items():
        other = plain.gradients()[name]
        away = (gradient - other).norm() / other.norm()
        torch.testing.assert_close(away, torch.zeros_like(away), rtol=0, atol=5e-2, msg=name)
