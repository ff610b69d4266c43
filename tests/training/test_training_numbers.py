"""Numbers of Python that a loss reads and that change at every step; most of them stand in tests/behaviour."""

from __future__ import annotations

import torch
from toys import small

import amp_compiler as amp

X = torch.linspace(-1, 1, 48).reshape(6, 8)
IN_FP32 = {"version": 1, "extends": "default", "rules": [{"match": {"op": "*"}, "precision": "fp32"}]}


def test_a_tensor_of_numbers_of_which_one_changes_is_made_in_subgraphs_too():
    told, models = [1], [small(), small()]

    def loss_fn(model, x):
        y = model(x)
        if float(y.detach().sum()) > 1e9:
            return y.sum()
        return (y[:, :2] * torch.tensor([[2, told[0]], [told[0], 3.5]])[0]).square().mean()

    mine, torchs = (torch.optim.SGD(model.parameters(), lr=0.1) for model in models)
    step = amp.training_step(models[0], loss_fn, mine, rules=IN_FP32, backend="eager")
    for told[0] in (1, 2, 4, 3):
        step(X)
        torchs.zero_grad()
        loss_fn(models[1], X).backward()
        torchs.step()
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(ours, theirs)
