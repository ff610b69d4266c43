"""Gradients in a type of their own for operators of every kind: kernels with state, lists, random numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backward_types import BF16, F32, WIDE, Net, X, Y, by_autograd, check, gradients, loss_fn, rules, stepped
from torch import nn

from amp_compiler.errors import PassError

MODULES: dict[str, nn.Module] = {
    "batch_norm": nn.BatchNorm1d(16),
    "layer_norm": nn.LayerNorm(16),
    "softmax": nn.Softmax(-1),
    "gelu": nn.GELU(),
    "tanh": nn.Tanh(),
}
EVERYTHING = {
    "version": 1,
    "rules": [
        {"match": {}, "precision": "low", "backward": {"precision": "fp32"}},
        {"match": {"family": "cast"}, "precision": "keep"},
        {"match": {"family": "loss"}, "precision": "fp32"},
    ],
}


@pytest.mark.parametrize("name", list(MODULES))
def test_every_kind_of_gradient_in_fp32(name: str) -> None:
    """With everything but the forward in FP32, gradients are those of FP32 autograd at the rounded values."""
    net = Net(MODULES[name])
    found = gradients(copy.deepcopy(net), EVERYTHING)
    x = X.to(BF16)
    with torch.no_grad():
        low = copy.deepcopy(net).to(BF16)
        if name == "batch_norm":
            low.between.float()
        h = low.a(x)
        r = low.between(h)
        logits = low.b(r).float()
    logits.requires_grad_()
    (g,) = torch.autograd.grad(F.cross_entropy(logits, Y), logits)
    gr = g @ low.b.weight.float()
    hidden = h.float().requires_grad_()
    with torch.enable_grad():
        between = low.between.float().train()
        (gh,) = torch.autograd.grad(between(hidden), hidden, gr)
    wanted = {"b.weight": g.t() @ r.float(), "b.bias": g.sum(0), "a.weight": gh.t() @ x.float(), "a.bias": gh.sum(0)}
    check({key: found[key] for key in wanted}, wanted, 2e-6)


def test_batch_norm_changes_its_statistics_once() -> None:
    models = [Net(nn.BatchNorm1d(16)) for _ in range(2)]
    for model, rule in zip(
        models, ("default", rules({"precision": "fp32"}, family=["matmul", "normalization"])), strict=True
    ):
        stepped(model, rule)
    for plain, typed in zip(*[model.between.buffers() for model in models], strict=True):
        assert torch.equal(plain, typed)
    assert int(models[1].between.num_batches_tracked) == 1


@pytest.mark.parametrize("make", [gradients, by_autograd])
def test_dropout_draws_once(make: Any) -> None:
    model = Net(nn.Dropout(0.5))
    torch.manual_seed(7)
    found = make(model, EVERYTHING)
    torch.manual_seed(7)
    mask = torch.ops.aten.native_dropout.default(torch.ones(32, 16, dtype=BF16), 0.5, True)[1]
    low = copy.deepcopy(model).to(BF16)
    with torch.no_grad():
        r = low.a(X.to(BF16)) * mask * 2
        logits = low.b(r).float()
    (g,) = torch.autograd.grad(F.cross_entropy(logits.requires_grad_(), Y), logits)
    gh = (g @ low.b.weight.float()) * mask * 2
    check({"w": found["b.weight"], "a": found["a.bias"]}, {"w": g.t() @ r.float(), "a": gh.sum(0)}, 2e-6)


def test_random_operators_are_refused_by_name() -> None:
    with pytest.raises(PassError, match=r"aten\.rrelu.*draws random numbers") as caught:
        stepped(Net(nn.RReLU()), EVERYTHING)
    assert "<dict>" in str(caught.value) and "later rule" in str(caught.value)


class Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = x.view(4, 8, 16).split([4, 4, 8], dim=-1)
        return torch.cat([F.scaled_dot_product_attention(q, k, v), v], -1).view(32, 16)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 16, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x.view(4, 8, 16))[0].reshape(32, 16)


class Tied(nn.Module):
    """One weight in a node with FP32 gradients and in one without."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(x, self.weight), self.weight.t().contiguous()).tanh()


@pytest.mark.sweep(5)
@pytest.mark.parametrize("make", [gradients, by_autograd])
@pytest.mark.parametrize("between", [Attention, Recurrent, Tied])
@pytest.mark.parametrize("rule", [EVERYTHING, WIDE], ids=["everything", "products"])
def test_lists_kernels_with_state_and_shared_weights(make: Any, between: Any, rule: Any) -> None:
    torch.manual_seed(5)
    net = Net(between())
    found = make(copy.deepcopy(net), rule)
    loss_fn(net, X, Y).backward()
    for name, parameter in net.named_parameters():
        error = float((found[name].float() - parameter.grad).norm() / parameter.grad.norm())
        assert error < 0.02, name
    assert rule is WIDE or all(found[name].dtype is F32 for name in found)
