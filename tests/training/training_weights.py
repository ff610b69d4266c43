"""Nets, rules and optimizers for the tests of how a training step holds its parameters."""

import torch
import torch.nn.functional as F
from torch import nn

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(32, 8, generator=GENERATOR).half().float()  # numbers that both 16-bit types of input keep
XB = X.bfloat16().float()
Y = torch.randint(0, 5, (32,), generator=GENERATOR)
LOW = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Net(nn.Module):
    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 5)
        self.norm = nn.LayerNorm(16) if norm else nn.Identity()

    def forward(self, x):
        return self.b(F.relu(self.norm(self.a(x))))


class Line(nn.Module):
    """Its loss is linear in the weight, so that the gradient is known without autograd: it is `x`."""

    def __init__(self, *size: int, value: float | None = None) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(size) if value is None else torch.full(size, value))


def linear_loss(model, x):
    return (model.w * x).sum()


def rules(rounding: str | None = None, extends: str = "default") -> dict:
    weights = {"master": "low"} | ({} if rounding is None else {"rounding": rounding})
    return {"version": 1, "extends": extends, "weights": weights}


def net(seed: int = 0, **options) -> nn.Module:
    torch.manual_seed(seed)
    return Net(**options)


OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=1e-2),
    "nesterov": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=1e-2),
    "amsgrad": lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-2, momentum=0.5),  # traced
}


def everything(model, optimizer) -> list[torch.Tensor]:
    state = [optimizer.state[p][k].clone() for p in model.parameters() for k in sorted(optimizer.state.get(p, {}))]
    return [t.clone() for t in model.state_dict().values()] + state


def same(first, second) -> bool:
    return len(first) == len(second) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(first, second, strict=True)
    )
