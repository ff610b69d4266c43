"""Calls that leave something behind where they fail, and models of which no graph can be planned."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import amp_compiler as amp

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Split(nn.Module):
    """Its only graph reads a size from a tensor."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 8)

    def forward(self, x):
        left, right = torch.tensor_split(self.layer(x), torch.tensor([5]), 1)
        return left.square().mean() + 2 * right.square().mean()


def test_a_model_of_which_no_graph_can_be_planned_runs_as_it_is_written(caplog):
    torch.manual_seed(0)
    model = Split()
    plain, stepped = copy.deepcopy(model), copy.deepcopy(model)
    compiled = amp.compile(model, dtype="bf16", backend="eager")
    with caplog.at_level("WARNING", "amp_compiler"):
        made = compiled(X)
    assert "without a plan" in caplog.text and "test_hard_calls.py" in caplog.text
    assert torch.equal(made, plain(X))
    assert compiled.execution.startswith("as it is written: ") and "test_hard_calls.py" in compiled.execution
    with pytest.raises(amp.AmpError, match=r"the model has no plan: .*test_hard_calls\.py:\d+: "):
        _ = compiled.graph_module
    optimizer = torch.optim.SGD(stepped.parameters(), 0.1)
    step = amp.training_step(stepped, lambda m, x: m(x), optimizer, dtype="bf16", backend="eager")
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for _ in range(2):
        loss = plain(X)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(step(X), loss.detach())
    assert "as it is written" in step.execution
    torch.testing.assert_close(list(stepped.parameters()), list(plain.parameters()))


def test_a_model_in_which_nothing_is_captured_says_so():
    compiled = amp.compile(Does(), dtype="bf16", backend="eager")
    assert compiled(X) == X.tolist()
    assert compiled.execution == "as it is written: Dynamo captured nothing of it"


class Does(nn.Module):
    def forward(self, x):
        return x.tolist()
