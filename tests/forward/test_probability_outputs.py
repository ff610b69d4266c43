"""A model that ends in a sigmoid or a softmax: its FP32 output is computed in FP32, for the loss outside of it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_compiler as amp

X = torch.tensor([[-20.0], [-6.0], [3.0], [6.0], [8.0], [20.0]])
Y = torch.tensor([[1.0], [0.0], [1.0], [0.0], [0.0], [0.0]])


class Classifier(nn.Module):
    def __init__(self, end) -> None:
        super().__init__()
        self.fc, self.end = nn.Linear(1, 1, bias=False), end
        nn.init.ones_(self.fc.weight)

    def forward(self, x):
        return self.end(self.fc(x))


@pytest.mark.parametrize(
    ("end", "dtype"), [(torch.sigmoid, "bf16"), (lambda h: torch.sigmoid(h).squeeze(-1).unsqueeze(-1), "fp16")]
)
def test_a_cross_entropy_outside_sees_no_rounded_probability(end, dtype):
    """In FP16, sigmoid(-20) would be 0 and the gradient NaN."""
    model = Classifier(end)
    compiled = amp.compile(model, dtype=dtype, backend="eager")
    made = compiled(X)
    torch.testing.assert_close(made, torch.sigmoid(X), rtol=1e-6, atol=0)
    loss = F.binary_cross_entropy(made, Y)
    torch.testing.assert_close(loss, F.binary_cross_entropy(torch.sigmoid(X), Y))
    loss.backward()
    ours = model.fc.weight.grad.clone()
    model.fc.weight.grad = None
    F.binary_cross_entropy(model(X), Y).backward()
    torch.testing.assert_close(ours, model.fc.weight.grad, rtol=1e-2, atol=1e-3)


def precision_of(end, **options):
    plan = amp.explain(Classifier(end), (X,), dtype="bf16", **options)
    return [node.precision for node in plan.nodes if node.op in ("aten.sigmoid", "aten.softmax")]


def test_only_the_last_op_before_an_output_is_unless_a_rule_says_otherwise():
    assert precision_of(torch.sigmoid) == precision_of(lambda h: torch.softmax(h, -1)) == ["fp32"]
    assert precision_of(lambda h: h * torch.sigmoid(h)) == ["low"]
    assert precision_of(lambda h: (lambda gate: (gate, gate * h))(torch.sigmoid(h))) == ["low"]
    rules = {"version": 1, "extends": "default", "rules": [{"match": {"op": "aten.sigmoid"}, "precision": "low"}]}
    assert precision_of(torch.sigmoid, rules=rules) == ["low"]
