"""What a step with Python state, numbers and parameters beside the model says of itself; see tests/behaviour too."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from toys import eager_step, train_beside_torch

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
    step = eager_step(model, lambda m, x: m(x).square().mean())
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
    step = eager_step(model, trainer.loss, optimizer)
    step(X)
    assert {"head.weight", "head.bias", "scales_0"} < step.gradients().keys()
    assert late.item() == 1.0 and trainer.scales[0].grad is None
    optimizer.add_param_group({"params": [late]})
    step(X)
    assert len(step.gradients()) == 6 and late.item() > 1.0


def test_a_tensor_of_numbers_of_which_one_changes_is_made_in_subgraphs_too() -> None:
    message = [1]

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        y = model(x)
        if float(y.detach().sum()) > 1e9:
            return y.sum()
        return (y[:, :2] * torch.tensor([[2, message[0]], [message[0], 3.5]])[0]).square().mean()

    def tell(number: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        message[0] = (1, 2, 4, 3)[number]

    step, _ = train_beside_torch(nn.Linear(4, 4), loss_fn, [(X,)] * 4, between=tell, enabled=True, rules="apex-o0")
    assert "subgraph" in step.execution
