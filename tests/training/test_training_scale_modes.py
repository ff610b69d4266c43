"""Norm-adaptive scales, hysteresis, floor and ceiling inside a real training step."""

from __future__ import annotations

import pytest
import torch
from toys import classes, eager_step
from training_weights import OPTIMIZERS, Line, X, Y, everything, linear_loss, net, same

INF = float("inf")


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_norm_adaptive_scale_follows_the_norms_and_learns_from_an_overflow(backend):
    # The gradient is the batch. The scale is 4096 / norm rounded down to a power of two, between 2 and 65536; an
    # overflow halves what it may be, and three finite steps double that again.
    section = {"mode": "norm_adaptive", "init": 1024.0, "target_norm": 4096.0, "min": 2.0, "max": 65536.0}
    rows = [
        ((3.0, 4.0), 512), ((0.0, 1.0), 4096), ((0.0, 1.5), 2048), ((0.0, 0.0), 2048), ((0.0, 2.0**-10), 65536),
        ((0.0, 4096.0), 2), ((0.0, 1.0), 4096), ((0.0, INF), 2048), ((0.0, 1.0), 2048), ((0.0, 1.0), 2048),
        ((0.0, 1.0), 4096),
    ]  # fmt: skip
    model = Line(2, value=0.0)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    section |= {"growth_interval": 3}
    step = eager_step(model, linear_loss, optimizer, dtype="fp16", loss_scale=section, backend=backend)
    seen = []
    for batch, _ in rows:
        step(torch.tensor(batch))
        seen.append(float(step.loss_scale))
    assert seen == [scale for _, scale in rows]
    assert int(step.skipped_steps) == 1
    finite = [batch for batch, _ in rows if INF not in batch]
    assert model.w.tolist() == [-sum(column) for column in zip(*finite, strict=True)]  # all exact in FP32


def test_a_norm_adaptive_scale_changes_no_bit_of_the_training():
    results, scales = [], []
    for given in (None, {"mode": "norm_adaptive", "init": 65536.0, "target_norm": 4096.0}):
        model = net(norm=False)  # a norm would take the factors of the batches away again
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        step = eager_step(model, classes, optimizer, loss_scale=given, clip_norm=0.5)
        for number in range(12):
            step(X * 8.0 ** (number % 3), Y)
            if given:
                scales.append(float(step.loss_scale))
                assert 2048 < scales[-1] * float(step.grad_norm) <= 4096
        assert int(step.skipped_steps) == 0
        results.append(everything(model, optimizer))
    assert len(set(scales)) >= 3
    assert same(*results)
