"""A step on a CUDA device whose early updates are a branch of its graph, and what tries that out."""

from __future__ import annotations

import pytest
import torch
from toys import squares
from training_gpu import REPLAYED

import amp_compiler as amp
from amp_compiler.ops.cuda import branch_trial
from amp_compiler.passes.step.branch_update import BESIDE, BranchUpdate

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
WIDE, ROWS = 512, 4096
DEVICE = amp.pipelines.DEVICE.skip("branch_update")
UNCHECKED = amp.NoLossScale(check_finite=False)


def trained(passes, steps=12):
    torch.manual_seed(0)
    nn = torch.nn
    layers = [one for _ in range(6) for one in (nn.LayerNorm(WIDE), nn.Linear(WIDE, WIDE), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(WIDE, 64)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    step = amp.training_step(model, squares, optimizer, dtype="bf16", loss_scale=UNCHECKED, passes=[passes])
    x, y = torch.randn(ROWS, WIDE, device="cuda"), torch.randn(ROWS, 64, device="cuda")
    losses = torch.stack([step(x, y) for _ in range(steps)])
    return step, model, losses


def test_a_step_with_a_branch_trains_as_one_without():
    plain, model, expected = trained(DEVICE)
    tried = BranchUpdate(lambda *_: "", least=0)
    step, branched, losses = trained(DEVICE.insert_after("cut_step", tried))
    assert BESIDE in step.stages["branch_update"].text
    assert step.execution == plain.execution == REPLAYED
    torch.testing.assert_close(losses, expected, rtol=1e-2, atol=0)
    theirs, gradients = dict(model.named_parameters()), plain.gradients()
    for name, one in branched.named_parameters():
        # Of what Adam has added up: the sign of a small gradient decides on a whole step of the rate.
        compared(one.detach(), theirs[name].detach(), 2e-2, name)
        compared(step.gradients()[name], gradients[name], 5e-2, name)


def compared(found, expected, share, name):
    away = (found - expected).norm() / (expected.norm() + 0.1)
    torch.testing.assert_close(away, torch.zeros_like(away), rtol=0, atol=share, msg=name)


def test_what_is_tried_out_on_the_device(record_property):
    asked = []

    def try_beside(*given):
        asked.append(branch_trial.try_beside(*given))
        return asked[-1]

    step, _, _ = trained(DEVICE.insert_after("cut_step", BranchUpdate(try_beside, least=0)), steps=1)
    (verdict,) = asked
    assert not verdict or verdict.startswith("takes-"), verdict
    record_property("verdict", verdict or "used")
    assert (BESIDE in step.stages["branch_update"].text) == (not verdict)
