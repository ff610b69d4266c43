"""Transforms of torch.func and forward-mode differentiation around a compiled module."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import amp_compiler as amp


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.fc(x))


def dual(model, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


TRANSFORMS = {
    "grad": lambda m, x: torch.func.grad(lambda t: m(t).float().sum())(x),
    "vjp": lambda m, x: torch.func.vjp(lambda t: m(t).float(), x)[1](x)[0],
    "jvp": lambda m, x: torch.func.jvp(m, (x,), (x,))[1],
    "jacrev": lambda m, x: torch.func.jacrev(m)(x),
    "vmap": lambda m, x: torch.func.vmap(m)(torch.stack([x, 2 * x])),
    "hessian": lambda m, x: torch.func.hessian(lambda t: m(t).float().sum())(x),
    "forward_ad": dual,
}


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_it_runs_as_under_autocast_and_says_so_once(name, captured, backend, caplog):
    model, x = amp.compile(Net(), dtype="bf16", backend=backend), torch.linspace(-1, 1, 4)
    if captured:
        model(x)
    with torch.autocast("cpu", torch.bfloat16):
        expected = TRANSFORMS[name](model.original, x)
    for _ in range(2):
        assert torch.equal(TRANSFORMS[name](model, x), expected)
    told = [record for record in caplog.records if "runs under torch.autocast" in record.getMessage()]
    assert len(told) == 1
    # And afterwards it is compiled as before.
    assert model(x).dtype is torch.float32 and model.execution == "as one graph"
