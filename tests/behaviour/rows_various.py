"""Functions, hooks, sizes and numbers that rows of one kind each do not cover."""

from __future__ import annotations

import functools
from typing import Any

import torch
from rows_writes import WRITES, Written
from table import X, row
from torch import nn
from torch.nn.modules import module as all_modules

IDS = torch.tensor([[1, 2, 2], [0, 5, 1]])
row(
    "sizes that data says",
    calls=((X,), (X - 0.5,), (X + 0.5,)),
    builds={"compile": 7, "step": 1, "backend": 7},
    broken="compile backend",
    inductor=True,
)(lambda m, x: sizes(m, x))


def sizes(m: Any, x: torch.Tensor) -> torch.Tensor:
    h, wanted = m.fc(x), x.sum(1) > 0
    kept = wanted.nonzero().squeeze(1)
    return torch.cat([h[wanted].square(), h.index_add(0, kept, h[kept]), h.repeat_interleave(wanted + 1, 0)])


row(
    "sparse matrix times a layer",
    calls=((X, torch.eye(6).to_sparse()),) * 3,
    builds={"compile": 1, "step": 3, "backend": 1},
    broken="step",
    inductor=True,
)(lambda m, x, s: s @ m.fc(x))


@row("sparse gradients of a bag", calls=((IDS,),) * 3, doors=("compile", "backend"), inductor=True)
class Bag(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.EmbeddingBag(8, 4, sparse=True), nn.Linear(4, 4))


# Writes


class WrittenBehind(Written):
    def forward(self, x):
        return x if x.sum() > 1e9 else super().forward(x)


for name in ("mul_ under no_grad", "split under no_grad", "data"):
    row(f"written past autograd behind a graph break: {name}", builds=5, broken="compile step backend")(
        type("Writes", (WrittenBehind,), {"__init__": functools.partialmethod(Written.__init__, WRITES[name])})
    )


# Hooks and modes


def everywhere(kind: str, hook: Any) -> Any:
    """Hung up for the second call, and gone before the third."""
    handles: list[Any] = []

    def change(model: Any, number: int) -> None:
        if number == 1 and len(handles) < 1:
            handles.append(getattr(all_modules, f"register_module_{kind}")(hook))
        while number == 2 and handles:
            handles.pop().remove()

    return change


def one_more(module: nn.Module, args: Any) -> Any:
    return (args[0] + 1,) if isinstance(module, nn.Linear) else None


row(
    "forward hook before all modules",
    change=everywhere("forward_pre_hook", one_more),
    doors=("compile", "step"),
    builds=2,
)(lambda m, x: m.out(m.fc(x)))
row(
    "backward hook on all modules",
    change=everywhere("full_backward_hook", lambda module, grads, _: tuple(g if g is None else 3 * g for g in grads)),
    doors=("compile",),
    builds=3,
    broken="compile",
)(lambda m, x: m.out(m.fc(x)))


@row("inference_mode inside a model that breaks", builds=5, broken="compile step backend")
def inference(m, x):
    if x.sum() > 1e9:
        return x
    with torch.inference_mode():
        h = m.fc(x)
    return m.fc(x) + h.clone()


# Losses


def of_loss(function: Any) -> dict[str, Any]:
    return {"loss": lambda model: function, "doors": ("step",)}


def seeded(m: Any, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(7)
    y = m(x)
    return (y * torch.rand_like(y)).sum()


def hooked(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m(x)
    y.grad_fn.register_prehook(lambda outputs: tuple(2 * one for one in outputs))
    return y.square().mean()


row("loss that sets a seed", **of_loss(seeded), builds=3, broken="step")(lambda m, x: m.fc(x))
row("loss with a hook on a node", **of_loss(hooked), builds=3, broken="step")(lambda m, x: m.fc(x))


@row("inverse of a count, and its root", {"count": 0}, calls=((X,),) * 6, builds=2)
def averages(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.count += 1
    return m.fc(x) * (1 / m.count) + m.count**-0.5
