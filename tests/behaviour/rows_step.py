"""What concerns a training loop: loss functions, parameters beside the model, a teacher, nests of models."""

from typing import Any

import torch
import torch.nn.functional as F
from table import TRAINED, X, at, row
from torch import nn

LABELS = torch.tensor([0, 1, 3, 2, 0, 1])
PLAIN = lambda m, x: m.out(m.fc(x).tanh())  # noqa: E731


def loss(function: Any) -> dict[str, Any]:
    """Fields of a row with that loss function."""
    return {"loss": lambda model: function, "doors": TRAINED}


row(
    "loss that returns more",
    loss=lambda model: lambda m, x: ((y := m(x)).square().mean(), {"logits": y.detach()}),
    doors=("step",),
)(PLAIN)
row(
    "loss that returns a number of Python too",
    loss=lambda model: lambda m, x: ((y := m(x).square().mean()), y.item()),
    doors=("step",),
)(PLAIN)
row("loss with labels", calls=((X, LABELS),) * 3, inductor=True, **loss(lambda m, x, y: F.cross_entropy(m(x), y)))(
    PLAIN
)
row(
    "loss with a branch on itself",
    **loss(lambda m, x: y * 2 if (y := m(x).square().mean()) > 0.01 else y),
    step_breaks=3,
)(PLAIN)
row(
    "loss that prints", **loss(lambda m, x: (m(x).square().mean(), print("loss of", tuple(x.shape)))[0]), step_breaks=2
)(PLAIN)
row(
    "loss with a gradient penalty",
    **loss(lambda m, x: penalized(m, x)),
    step_breaks={"compile": 1, "step": 4, "backend": 1},
)(PLAIN)
row("loss that raises", calls=((X,), (X[:3],), (X,)), **loss(lambda m, x: raising(m, x)))(PLAIN)
row("loss of no gradient but zeros", **loss(lambda m, x: m(x).square().sum() * 0 + 1), fp32=True)(PLAIN)
row(
    "loss over two calls of the model", **loss(lambda m, x: (m(x) - m(2 * x)).square().mean()), broken="compile backend"
)(PLAIN)
row(
    "loss of a dict",
    calls=(({"x": X},),) * 3,
    loss=lambda model: lambda m, batch: m(batch["x"]).square().mean(),
    doors=("step",),
    step_breaks=0,
)(PLAIN)


def penalized(m: Any, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    y = m(x)
    (slope,) = torch.autograd.grad(y.float().sum(), x, create_graph=True)
    return y.square().mean() + (slope.norm(dim=1) - 1).square().mean()


def raising(m: Any, x: torch.Tensor) -> torch.Tensor:
    if len(x) < 6:
        raise ValueError("six rows are needed")
    return m(x).square().mean()


def learned(model: Any) -> Any:
    spread = nn.Parameter(torch.zeros(4))

    def loss_fn(m: Any, x: torch.Tensor) -> torch.Tensor:
        return (torch.exp(-spread) * m(x).square().mean(0) + spread).sum()

    loss_fn.beside = [spread]
    return loss_fn


def criterion(model: Any) -> Any:
    torch.manual_seed(1)
    head = nn.Sequential(nn.Linear(4, 3), nn.Tanh())

    def loss_fn(m: Any, x: torch.Tensor) -> torch.Tensor:
        return head(m(x)).square().mean()

    loss_fn.beside = list(head.parameters())
    return loss_fn


class Trainer:
    def __init__(self) -> None:
        self.scales = [nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))]

    def loss(self, m: Any, x: torch.Tensor) -> torch.Tensor:
        return (self.scales[0] * m(x)).square().mean() + (self.scales[1] - 2).square()


class OfTrainer:
    """A method of an object, with what it trains."""

    def __init__(self, model: Any) -> None:
        self.trainer = Trainer()
        self.beside = self.trainer.scales

    def __call__(self, m: Any, x: torch.Tensor) -> torch.Tensor:
        return self.trainer.loss(m, x)


row("parameter beside the model", loss=learned)(PLAIN)
row("module beside the model, in the loss", loss=criterion)(PLAIN)
row("parameters of a trainer", loss=OfTrainer)(PLAIN)


def taught(model: Any) -> Any:
    torch.manual_seed(1)
    model.teacher = (nn.Linear(4, 4),)  # in a tuple: no part of the model

    def loss_fn(m: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            goal = model.teacher[0](x)
        return (m(x) - goal).square().mean()

    return loss_fn


def moved(m: Any) -> None:
    with torch.no_grad():
        m.teacher[0].weight.add_(3)


def replaced(m: Any) -> None:
    m.teacher[0].weight = nn.Parameter(torch.full((4, 4), 3.0))


row("teacher whose weights move", loss=taught, change=at(1, moved))(PLAIN)
row("teacher whose weights are replaced", loss=taught, change=at(1, replaced), builds=2)(PLAIN)
row(
    "accumulated losses in a list",
    loss=lambda model: logging_loss(model),
    settles=False,
    builds={"compile": 1, "step": 5, "backend": 1},
)(PLAIN)


def logging_loss(model: Any) -> Any:
    model.losses = []

    def loss_fn(m: Any, x: torch.Tensor) -> torch.Tensor:
        value = m(x).square().mean()
        model.losses.append(value.detach())
        return value

    return loss_fn
