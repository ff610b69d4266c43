"""A backward that is differentiated (a gradient penalty, a Hessian product) goes through compiled code."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_compiler as amp

pytestmark = [pytest.mark.compiles, pytest.mark.long]
BF16_ERROR = 2e-2  # a few roundings of 2**-9 each
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A batch norm, whose buffers a call writes, and an output that has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.out = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x):
        y = self.norm(self.fc(x))
        return self.out(F.softplus(y)), (y > 0).sum()


def pair() -> tuple[nn.Module, nn.Module]:
    """The same model compiled by Inductor and run node by node."""
    torch.manual_seed(0)
    net = Net()
    return tuple(amp.compile(copy.deepcopy(net), dtype="bf16", backend=name) for name in ("inductor", "eager"))


@pytest.fixture(scope="module")
def models() -> tuple[nn.Module, nn.Module]:
    """The pair that the tests share: a graph takes Inductor seconds."""
    return pair()


def penalty(model: nn.Module, x: torch.Tensor) -> None:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x)[0].sum(), x, create_graph=True)
    (slope.norm(dim=1) - 1).square().mean().backward()


def hessian_product(model: nn.Module, x: torch.Tensor) -> None:
    parameters = [*model.parameters()]
    gradients = torch.autograd.grad(model(x)[0].square().mean(), parameters, create_graph=True)
    product = torch.autograd.grad(sum((g * (i + 1)).sum() for i, g in enumerate(gradients)), parameters)
    for parameter, one in zip(parameters, product, strict=True):
        parameter.grad = one


def two_losses(model: nn.Module, x: torch.Tensor) -> None:
    model(x)[0].sum().backward()
    y = model(x)[0]
    y.sum().backward(retain_graph=True)
    y.square().mean().backward()


@pytest.mark.parametrize("use", [penalty, hessian_product, two_losses])
def test_it_is_what_the_eager_backend_gives(models, use):
    for model in models:
        model.zero_grad()
        use(model, X)
    compiled, eager = models
    for (name, mine), theirs in zip(compiled.named_parameters(), eager.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None:
            assert (mine.grad - theirs.grad).norm() <= BF16_ERROR * (1 + theirs.grad.norm()), name
    for mine, theirs in zip(compiled.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)
    assert compiled.norm.num_batches_tracked == eager.norm.num_batches_tracked
    with torch.no_grad():  # what wrote a buffer twice would go on from another one
        for mine, theirs in zip(compiled.buffers(), eager.buffers(), strict=True):
            mine.copy_(theirs)


def test_it_is_said_once_and_other_calls_stay_compiled(caplog):
    model, _ = pair()
    for _ in range(2):
        penalty(model, X)
    assert [one.getMessage().count("node by node") for one in caplog.records] == [1]
    before = model.compilations
    x = X.clone().requires_grad_()
    model(x)[0].sum().backward()
    assert model.compilations == before and x.grad is not None and len(caplog.records) == 1


def test_a_third_derivative_and_the_door_of_torch_compile():
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    grads = []
    for backend in ("inductor", "eager"):
        torch._dynamo.reset()
        model = torch.compile(net, backend="amp_compiler", options={"dtype": "bf16", "backend": backend})
        x = X.clone().requires_grad_()
        y = model(x).sum()
        for _ in range(3):
            (y,) = torch.autograd.grad(y, x, create_graph=True)
            y = y.sum()
        grads.append(y.detach())
    assert grads[0] != 0 and torch.equal(*grads)


def test_what_draws_random_numbers_is_refused_with_the_hint():
    model = amp.compile(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 6)), dtype="bf16")
    x = X.clone().requires_grad_()
    y = model(x).sum()
    before = torch.get_rng_state()
    with pytest.raises(amp.AmpError, match=r"it draws random numbers.*backend='eager'"):
        torch.autograd.grad(y, x, create_graph=True)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_input_that_was_written_behind_the_call_is_refused(models):
    x = X.clone()
    y = models[0](x)[0].sum()
    x.add_(1)
    with pytest.raises(amp.AmpError, match=r"written in place.*backend='eager'"):
        torch.autograd.grad(y, [*models[0].parameters()], create_graph=True)
