"""`math: fp8` beside torchao's float8 training, emulated: numbers and gradients to the bit."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import amp_compiler as amp

float8 = pytest.importorskip("torchao.float8", reason="torchao is not installed")
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]
RECIPES: dict[str, Any] = {
    "tensorwise": "fp8",
    "rowwise": {"scaling": "rowwise"},
    "rowwise_with_gw_hp": {"scaling": "rowwise", "weight_gradient": "low"},
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_numbers_and_gradients_are_those_of_torchao(recipe: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32), nn.ReLU(), nn.Linear(32, 48, bias=False)
    ).bfloat16()
    config = dataclasses.replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    theirs = float8.convert_to_float8_training(copy.deepcopy(model), config=config)
    rule = {"match": {"family": "matmul"}, "precision": "low", "math": RECIPES[recipe]}
    rules = {"version": 1, "extends": "default", "rules": [rule]}
    ours = amp.compile(copy.deepcopy(model).float(), rules=rules, dtype="bf16", backend="eager")
    x = torch.randn(6, 8, 64).bfloat16()
    x_theirs, x_ours = x.clone().requires_grad_(), x.float().requires_grad_()
    wanted, result = theirs(x_theirs), ours(x_ours)
    assert torch.equal(result, wanted.float())
    gradient = torch.randn_like(wanted)
    wanted.backward(gradient)
    result.backward(gradient.float())
    pairs = zip([x_theirs, *theirs.parameters()], [x_ours, *ours.parameters()], strict=True)
    assert all(torch.equal(one.grad.float(), two.grad) for one, two in pairs)
