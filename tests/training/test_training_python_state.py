"""What a step with Python state and parameters beside the model says of itself; tests/behaviour has what it does."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import amp_compiler as amp

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


class Stateful(nn.Module):
    """Keeps a part of its result for the next call."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.state = nn.Linear(4, 4), torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x) + 0.1 * self.state
        self.state = h.detach().mean(0)
        return h


def test_batch_and_state_are_known_to_move_from_step_to_step() -> None:
    """A CUDA graph has to know."""
    model = Stateful()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = amp.training_step(model, lambda m, x: m(x).square().mean(), optimizer, dtype="bf16", backend="eager")
    for _ in range(3):
        step(X)
    assert len(step._choice.programs[-1].compiled.run._batch) == 2 and type(model.state) is Tensor


class Trainer:
    def __init__(self) -> None:
        self.head, self.scales = nn.Linear(4, 3), [nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))]

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        return (self.scales[0] * self.head(model(x))).square().mean() + (self.scales[1] - 2).square()


def test_parameters_beside_the_model_are_named_and_may_join_the_optimizer_later() -> None:
    model, trainer = nn.Linear(4, 4), Trainer()
    late = trainer.scales[1]
    optimizer = torch.optim.SGD([*model.parameters(), *trainer.head.parameters(), trainer.scales[0]], 0.1)
    step = amp.training_step(model, trainer.loss, optimizer, dtype="bf16", backend="eager")
    step(X)
    assert {"head.weight", "head.bias", "scales_0"} < step.gradients().keys()
    assert late.item() == 1.0 and trainer.scales[0].grad is None
    optimizer.add_param_group({"params": [late]})
    step(X)
    assert len(step.gradients()) == 6 and late.item() > 1.0
