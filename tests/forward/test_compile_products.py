"""Products of `amp.compile` whose left operand is not contiguous: of two matrices, not of a batch of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import amp_compiler as amp

X = torch.randn(5, 6, 32, generator=torch.Generator().manual_seed(0))
BATCHED = {"aten::bmm", "aten::baddbmm", "aten::matmul"}


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(32, 16)

    def forward(self, x):
        return self.head(x.transpose(0, 1))


class Matrix(Turned):
    def forward(self, x):
        return x.transpose(0, 1) @ self.head.weight.t()


MODELS = {"linear": Turned, "matmul": Matrix}


def result_and_calls(backend, model):
    """Of the second call."""
    compiled = amp.compile(model, dtype="bf16", backend=backend)
    with torch.no_grad():
        compiled(X)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            result = compiled(X)
    return result, {event.key for event in profile.key_averages()}


@pytest.mark.compiles
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "matmul")) for name in MODELS])
def test_a_product_with_a_matrix_is_no_batch_of_products(name):
    model = MODELS[name]()
    (mine, calls), (theirs, others) = (result_and_calls(backend, model) for backend in ("inductor", "eager"))
    assert not BATCHED & calls and any("mm" in call or "linear" in call for call in calls)
    assert "aten::bmm" in others  # what torch makes of it
    assert mine.shape == theirs.shape and mine.dtype == theirs.dtype == torch.float32
    # Both round to BF16: at most a number or two apart, of the largest where terms cancel.
    torch.testing.assert_close(mine, theirs, rtol=2**-7, atol=2**-8 * float(theirs.abs().max()))


class Squared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bias = nn.Parameter(torch.randn(6))

    def forward(self, x):
        return x @ x + self.bias


@pytest.mark.compiles
def test_both_operands_may_be_the_same():
    x = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        mine, theirs = (amp.compile(Squared(), dtype="bf16", backend=backend)(x) for backend in ("inductor", "eager"))
    torch.testing.assert_close(mine, theirs, rtol=2**-7, atol=2**-8 * float(theirs.abs().max()))
