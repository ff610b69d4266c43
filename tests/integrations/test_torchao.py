"""`math: fp8` beside torchao's float8 training, emulated: numbers and gradients to the bit."""

from __future__ import annotations

import copy
import dataclasses
import runpy
from pathlib import Path
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
REST = ["normalization", "softmax", "elementwise", "activation", "attention", "embedding"]
GPT = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "train_gpt.py"))
MODELS: dict[str, Any] = {
    "a layer": lambda: nn.Linear(64, 48),
    "an MLP": lambda: nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32), nn.ReLU(), nn.Linear(32, 48)),
    "a GPT of two layers": GPT["GPT"],
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_numbers_and_gradients_are_those_of_torchao(recipe: str, kind: str) -> None:
    """All else is 16-bit in both; norms have FP32 weights, since of 16-bit ones torch keeps 16-bit statistics."""
    torch.manual_seed(0)
    model = MODELS[kind]().bfloat16()
    config = dataclasses.replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    theirs = float8.convert_to_float8_training(nn.Sequential(copy.deepcopy(model)), config=config)
    for norm in (one for one in theirs.modules() if isinstance(one, nn.LayerNorm)):
        norm.float()
    product = {"match": {"family": "matmul"}, "precision": "low", "math": RECIPES[recipe]}
    rules = {"version": 1, "extends": "default", "rules": [{"match": {"family": REST}, "precision": "low"}, product]}
    ours = amp.compile(nn.Sequential(model.float()), rules=rules, dtype="bf16", backend="eager")
    x = GPT["windows"](GPT["TRAIN"], 0)[0] if "GPT" in kind else torch.randn(6, 8, 64)
    wanted, result = theirs(x.bfloat16() if x.is_floating_point() else x), ours(x)
    assert torch.equal(result, wanted.float())
    gradient = torch.randn_like(wanted)
    wanted.backward(gradient)
    result.backward(gradient.float())
    pairs = zip(theirs.parameters(), ours.parameters(), strict=True)
    assert all(torch.equal(one.grad.float(), two.grad) for one, two in pairs)
