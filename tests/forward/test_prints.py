"""A forward or a loss that prints does so at every call, as in eager torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import amp_compiler as amp

pytestmark = pytest.mark.long
X = torch.ones(3, 4)


class Prints(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.loud = nn.Linear(4, 4), True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fc(x)
        if self.loud:
            print("shape", tuple(x.shape))
        return x


def test_a_forward_prints_at_every_call(capsys: pytest.CaptureFixture[str]) -> None:
    model = Prints()
    compiled = amp.compile(model, dtype="bf16", backend="eager")
    for _ in range(3):
        torch.testing.assert_close(compiled(X), model(X).bfloat16(), rtol=0.02, atol=0.02, check_dtype=False)
        assert capsys.readouterr().out == "shape (3, 4)\n" * 2
    assert compiled.execution != "as one graph" and compiled.plan.low_nodes > 0


def test_a_forward_that_could_print_and_does_not_is_one_graph() -> None:
    model = Prints()
    model.loud = False
    compiled = amp.compile(model, dtype="bf16", backend="eager")
    compiled(X)
    assert compiled.execution == "as one graph"


def test_a_step_prints_at_every_call(capsys: pytest.CaptureFixture[str]) -> None:
    model = Prints()
    step = amp.training_step(
        model,
        lambda m, x: m(x).square().mean(),
        torch.optim.SGD(model.parameters(), 0.1),
        dtype="bf16",
        backend="eager",
    )
    for _ in range(3):
        step(X)
    assert capsys.readouterr().out == "shape (3, 4)\n" * 3
    assert "prints" in step.execution and "test_prints.py" in step.execution


def test_a_plan_needs_no_graph_that_prints() -> None:
    assert amp.explain(Prints(), (X,), dtype="bf16").low_nodes > 0
