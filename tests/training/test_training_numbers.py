"""Numbers of Python that a loss reads and that change at every step: the weight of a term, a temperature, a penalty."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch import nn

import amp_compiler as amp

X = torch.linspace(-1, 1, 48).reshape(6, 8)
STEPS = 10
IN_FP32 = {"version": 1, "extends": "default", "rules": [{"match": {"op": "*"}, "precision": "fp32"}]}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.temperature = 1.0

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)) / self.temperature)


def trained(step_of, breaks, **options):
    """Weights behind `STEPS` steps over which three numbers change, and the step."""
    model, weight = Net(), [0.0]

    def loss_fn(model, x, penalty):
        y = model(x)
        if breaks and float(y.detach().sum()) > 1e9:
            return y.sum()
        return y.square().mean() + weight[0] * y.abs().mean() + penalty * model.last.weight.square().sum()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = step_of(model, loss_fn, optimizer, **options)
    for number in range(STEPS):
        weight[0], model.temperature = number / STEPS, 1.0 + math.sin(number) / 3
        step(X, 0.01 * number)
    return [p.detach().clone() for p in model.parameters()], step


def torchs(model, loss_fn, optimizer):
    def step(*batch):
        optimizer.zero_grad()
        loss_fn(model, *batch).backward()
        optimizer.step()

    return step


@pytest.mark.parametrize("breaks", [False, True], ids=["one graph", "subgraphs"])
def test_a_step_in_fp32_is_torchs(breaks, caplog):
    caplog.set_level(logging.INFO, "amp_compiler")
    expected, _ = trained(torchs, breaks)
    found, step = trained(amp.training_step, breaks, enabled=False, backend="eager")
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(found, expected, strict=True))
    assert ("subgraph" in step.execution or "as they are written" in step.execution) == breaks
    if not breaks:
        assert sum(record.getMessage().startswith(("captured", "recompiled")) for record in caplog.records) == 2


def test_a_tensor_of_numbers_of_which_one_changes_is_made_in_subgraphs_too():
    taken = []
    for make, options in ((torchs, {}), (amp.training_step, {"rules": IN_FP32, "backend": "eager"})):
        model, told = Net(), [1]

        def loss_fn(model, x, told=told):
            y = model(x)
            if float(y.detach().sum()) > 1e9:
                return y.sum()
            return (y[:, :2] * torch.tensor([[2, told[0]], [told[0], 3.5]])[0]).square().mean()

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = make(model, loss_fn, optimizer, **options)
        for told[0] in (1, 2, 4, 3):
            step(X)
        taken.append([p.detach().clone() for p in model.parameters()])
    for ours, theirs in zip(*reversed(taken), strict=True):
        torch.testing.assert_close(ours, theirs)
