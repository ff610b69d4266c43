"""Gradients of several batches are added in FP32, also those that are made in 16 bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from training_weights import LOW

import amp_compiler as amp

SUMS = [("bf16", (256.0, 1.0)), ("bf16", (1.0, 256.0)), ("bf16", (256.0, 1.0, 1.0, 1.0)), ("fp16", (2048.0, 1.0))]
CASES = [(dtype, gradients, "eager") for dtype, gradients in SUMS] + [
    pytest.param("bf16", (256.0, 1.0), "inductor", marks=pytest.mark.slow)
]


@pytest.mark.parametrize(("dtype", "gradients", "backend"), CASES)
def test_a_small_gradient_is_not_rounded_away_beside_a_large_one(dtype, gradients, backend):
    rounded = torch.zeros((), dtype=LOW[dtype])
    for gradient in gradients:
        rounded += gradient
    assert float(rounded) == max(gradients)  # in 16 bits the small ones are lost
    model = nn.Linear(4, 3, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    count = len(gradients)
    step = amp.training_step(
        model, lambda m, x: m(x).sum(), optimizer, dtype=dtype, loss_scale=None, accumulate=count, backend=backend
    )
    for gradient in gradients:
        step(torch.full((1, 4), gradient))  # the derivative by a weight is the input
    nodes = (node for node in step.graph_module.graph.nodes if node.meta.get("amp_phase") == "backward")
    assert (LOW[dtype], (3, 4)) in {(node.meta["val"].dtype, tuple(node.meta["val"].shape)) for node in nodes}
    assert torch.equal(model.weight, torch.full((3, 4), -sum(gradients) / count))
    assert torch.equal(step._lows.get(model.weight, LOW[dtype]), model.weight.to(LOW[dtype]))
