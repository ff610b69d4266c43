"""Products of `amp.compile` whose left operand is not contiguous: of two matrices, not of a batch of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import amp_compiler as amp

X = torch.randn(5, 6, 32, generator=torch.Generator().manual_seed(0))
BATCHED = {"aten::bmm", "aten::baddbmm", "aten::matmul"}


class Products(nn.Module):
    """A product with a matrix of what is turned, and one of a matrix with itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.bias = nn.Linear(32, 16), nn.Parameter(torch.randn(6))

    def forward(self, x, y):
        return x.transpose(0, 1) @ self.head.weight.t(), y @ y + self.bias


def result_and_calls(backend):
    """Of the second call."""
    compiled = amp.compile(Products(), dtype="bf16", backend=backend)
    with torch.no_grad():
        compiled(X, X[0, :, :6])
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            result = compiled(X, X[0, :, :6])
    return result, {event.key for event in profile.key_averages()}


@pytest.mark.compiles
def test_a_product_with_a_matrix_is_no_batch_of_products_and_both_operands_may_be_the_same():
    (mine, calls), (theirs, others) = (result_and_calls(backend) for backend in ("inductor", "eager"))
    assert not BATCHED & calls and any("mm" in call or "linear" in call for call in calls)
    assert "aten::bmm" in others  # what torch makes of it
    for one, other in zip(mine, theirs, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype == torch.float32
        # Both round to BF16: at most a number or two apart, of the largest where terms cancel.
        torch.testing.assert_close(one, other, rtol=2**-7, atol=2**-8 * float(other.abs().max()))
