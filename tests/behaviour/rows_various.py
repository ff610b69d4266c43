"""Functions, hooks, sizes and numbers that rows of one kind each do not cover."""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
import torch.nn.functional as F
from rows_writes import WRITES, Written
from table import X, row, rows_of, setting
from torch import nn
from torch.nn.modules import module as all_modules

SIX = ((X,),) * 6
IDS = torch.tensor([[1, 2, 2], [0, 5, 1]])
OPTIMIZER = torch.optim.SGD([torch.zeros(1)], lr=1.0)
SCHEDULE = torch.optim.lr_scheduler.LambdaLR(OPTIMIZER, lambda epoch: 1.0 + epoch)
result = 0.0  # a global that is called as what a row reads of an object


class Result:
    def __init__(self, result: torch.Tensor) -> None:
        self.result = result


def helper(h: torch.Tensor, k: float = 1.0) -> torch.Tensor:
    return h * k


CODES = (lambda h, k=1.0: h * k).__code__, (lambda h, k=1.0: h * k - 3).__code__


def set_result(model: Any, number: int) -> None:
    global result
    result = float(number)


row("code of a function", change=lambda m, n: setattr(helper, "__code__", CODES[n % 2]), builds=3)(
    lambda m, x: helper(m.fc(x))
)
row("defaults of a function", change=lambda m, n: setattr(helper, "__defaults__", (1.0 + 2 * n,)), builds=3)(
    lambda m, x: helper(m.fc(x))
)
row(
    "rate of a schedule",
    change=lambda m, n: (OPTIMIZER.step(), SCHEDULE.step()),
    builds={"compile": 3, "step": 6, "backend": 3},
    broken="compile step backend",
)(lambda m, x: m.fc(x) * SCHEDULE.get_last_lr()[0])
row("global that is called as an attribute", quiet=True, change=set_result)(lambda m, x: Result(m.fc(x)).result)


@row(
    "computed name in a method",
    {"kind": "wide", "scale_wide": 1.0},
    change=setting("scale_wide", 1.0, 3.0, 9.0),
    builds=3,
)
class Method(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def by_wide(self) -> float:
        return getattr(self, f"scale_{self.kind}")

    def forward(self, x):
        return self.fc(x) * getattr(self, f"by_{self.kind}")()


row(
    "number that no operator takes as an input, beside one that is an input",
    {"p": 0.1, "k": 1.0},
    calls=SIX,
    change=lambda m, n: setattr(m, "k", 1.5 + n),
    builds={"compile": 3, "step": 6, "backend": 3},
)(lambda m, x: F.dropout(m.fc(x), m.p / 100, training=False) * m.k)
row("equal values of other types", {"k": 1}, change=setting("k", 1, 1.0, True), calls=SIX, builds=3)(
    lambda m, x: m.fc(x) * (2.0 + 2 * isinstance(m.k, float) + 5 * isinstance(m.k, bool) + m.k)
)
row(
    "whole number times a size beyond 64 bits",
    {"k": 1},
    calls=rows_of(2, 3, 4),
    change=setting("k", 1, 2, 5_000_000),
    builds=3,
)(lambda m, x: m.fc(x) * (m.k * x.shape[0] * 6364136223846793005 % 997))
row(
    "number as an argument of a model that breaks",
    calls=((X, 0.5), (X, 2.0), (X, 0.25)),
    builds={"compile": 4, "step": 6, "backend": 4},
    broken="compile step backend",
)(lambda m, x, k: -h if (h := m.fc(x) * k).sum() < 1e9 else h)
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


def with_local(model: Any) -> None:
    model.local = threading.local()
    model.local.n = 0


@row("variable of a thread that forward counts", begin=with_local, look=lambda m, y: m.local.n, builds=5, settles=False)
def counts(m, x):
    m.local.n += 1
    return m.fc(x) * m.local.n


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
