"""Calls that leave something behind where they fail, and models of which no graph can be planned."""

import copy

import pytest
import torch
from torch import nn
from toys import train_beside_torch

import amp_compiler as amp

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Split(nn.Linear):
    """Its only graph reads a size from a tensor."""

    def forward(self, x):
        left, right = torch.tensor_split(super().forward(x), torch.tensor([5]), 1)
        return left.square().mean() + 2 * right.square().mean()


def test_a_model_of_which_no_graph_can_be_planned_runs_as_it_is_written(caplog):
    torch.manual_seed(0)
    model = Split(4, 8)
    stepped = copy.deepcopy(model)
    compiled = amp.compile(model, dtype="bf16", backend="eager")
    with caplog.at_level("WARNING", "amp_compiler"):
        result = compiled(X)
    assert "without a plan" in caplog.text and "test_hard_calls.py" in caplog.text
    assert torch.equal(result, stepped(X))
    assert compiled.execution.startswith("as it is written: ") and "test_hard_calls.py" in compiled.execution
    with pytest.raises(amp.AmpError, match=r"the model has no plan: .*test_hard_calls\.py:\d+: "):
        _ = compiled.graph_module
    step, _ = train_beside_torch(stepped, lambda m, x: m(x), [(X,)] * 2, enabled=True)
    assert "as it is written" in step.execution


def test_a_model_in_which_nothing_is_captured_says_so():
    compiled = amp.compile(Does(), dtype="bf16", backend="eager")
    assert compiled(X) == X.tolist()
    assert compiled.execution == "as it is written: Dynamo captured nothing of it"


class Does(nn.Module):
    def forward(self, x):
        return x.tolist()
