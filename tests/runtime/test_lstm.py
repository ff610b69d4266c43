"""The LSTM operator against torch's own LSTM, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from amp_compiler.runtime.lstm import lstm


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layers", [1, 2])
def test_it_is_torchs_lstm_to_the_last_bits(layers, bias, bidirectional, batch_first):
    torch.manual_seed(0)
    layer = nn.LSTM(6, 5, layers, bias=bias, bidirectional=bidirectional, batch_first=batch_first)
    x = torch.randn(3, 4, 6, requires_grad=True)
    batch = 3 if batch_first else 4
    states = [torch.randn(layers * (1 + bidirectional), batch, 5, requires_grad=True) for _ in range(2)]
    leaves = [x, *states, *layer.parameters()]
    out, (h, c) = layer(x, tuple(states))
    expected = torch.autograd.grad((out.sum() + (h * c).sum()), leaves)
    got = lstm(x, states, list(layer._flat_weights), bias, layers, 0.0, True, bidirectional, batch_first)
    for ours, theirs in zip(got, (out, h, c), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    gradients = torch.autograd.grad(got[0].sum() + (got[1] * got[2]).sum(), leaves)
    for ours, theirs in zip(gradients, expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)
