"""NVCaffe's numbers inside a real step, against its formulas written out in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import amp_compiler as amp

F = np.float32


class Two(nn.Module):
    """Two vectors whose gradients are the two rows of the batch."""

    def __init__(self, values=(0.0, 0.0)):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.full((2,), float(one))) for one in values)

    def forward(self, x):
        return (self.a * x[0]).sum() + (self.b * x[1]).sum()


def global_grad_scale(formula, coefficient, gradients):
    """`Net::update_grad_scale` of NVCaffe, behind a step with these unscaled gradients, one of each parameter."""
    if formula == "l2":  # 0.16.5 to 0.17.0
        squares = F(sum(F(np.sum(g.astype(F) ** 2)) for g in gradients))
        return F(np.sqrt(squares)) * F(coefficient) if squares > 0 else F(coefficient)
    found = [np.max(np.abs(g)).astype(F) for g in gradients]  # 0.17.1 to 0.17.4
    largest = max((one for one in found if np.isfinite(one)), default=F(0))
    factor = F(4) / largest if largest > 0 else F(1)
    return factor * F(coefficient)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("formula", "coefficient"), [("max", 1.0), ("max", 32.0), ("l2", 10.0)])
def test_the_scale_is_what_nvcaffe_makes_of_the_gradients(formula, coefficient, backend):
    rows = [((3.0, 4.0), (0.0, 0.0)), ((0.0, 0.75), (0.0, 0.0)), ((0.0, 0.0), (0.0, 0.0)), ((0.5, -6.0), (0.0, 8.0))]
    model = Two()
    step = amp.training_step(
        model, lambda m, x: m(x), torch.optim.SGD(model.parameters(), 1.0), dtype="bf16", backend=backend,
        loss_scale={"mode": "nvcaffe", "coefficient": coefficient, "formula": formula},
    )  # fmt: skip
    ran_with = 1.0
    for row in rows:
        batch = torch.tensor(row)
        step(batch)
        assert float(step._last[1].scale) == ran_with
        ran_with = float(step.loss_scale)
        assert ran_with == global_grad_scale(formula, coefficient, [one.numpy() for one in batch])


def test_a_gradient_that_is_not_finite_does_not_count():
    model = Two()
    step = amp.training_step(
        model, lambda m, x: m(x), torch.optim.SGD(model.parameters(), 1.0), dtype="bf16", backend="eager",
        loss_scale=amp.NvcaffeLossScale(coefficient=2.0, patience=2),
    )  # fmt: skip
    row = torch.tensor([[float("inf"), 1.0], [0.5, 0.25]])
    step(row)
    assert float(step.loss_scale) == global_grad_scale("max", 2.0, [one.numpy() for one in row]) == 16.0
    assert int(step.skipped_steps) == 1 and not model.b.any()  # NVCaffe would have gone on with the infinity
    saved = step.state_dict()
    with pytest.raises(amp.LossScaleError):
        step(row)
    step.load_state_dict(saved)
    assert float(step.loss_scale) == 16.0
