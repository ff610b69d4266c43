"""Python values that a forward reads, which change between calls."""

import contextvars
import dataclasses
import enum
import functools
import math
import os
from typing import Any

import numpy as np
import torch
from table import READS, TRAINED, X, at, row, rows_of, setting
from torch import nn

SIX = ((X,),) * 6
CONTEXT: contextvars.ContextVar[float] = contextvars.ContextVar("CONTEXT", default=1.0)
FACTOR = 1.0


def set_global(model: Any, number: int) -> None:
    global FACTOR
    FACTOR = 1.0 + 2 * number


class Kind(enum.Enum):
    PLAIN = 1
    DOUBLED = 2


@dataclasses.dataclass
class Options:
    width: float = 1.0
    kind: Kind = Kind.PLAIN


row("number on an attribute", {"k": 1.0}, change=setting("k", 1.0, 3.0, 0.5), inductor=True, builds=2)(
    lambda m, x: m.fc(x) * m.k
)
row(
    "annealed number: twelve values",
    {"k": 1.0},
    calls=((X,),) * 12,
    change=lambda m, n: setattr(m, "k", 2 + n / 3),
    builds=2,
)(lambda m, x: m.fc(x) * m.k)
row(
    "number in arithmetic",
    {"k": 0.5},
    calls=SIX,
    change=lambda m, n: setattr(m, "k", 0.5 + n / 3),
    inductor=True,
    builds=2,
)(lambda m, x: m.fc(x) * (1 - m.k) ** 2 + m.k / 2 - x.clamp(-m.k, m.k))
row("branch on a number", {"k": 0.5}, change=setting("k", 0.5, 0.95, 0.4), builds=3)(
    lambda m, x: m.fc(x) * 2 if m.k > 0.9 else m.fc(x) * m.k
)
row("math function of a number", {"k": 0.5}, change=setting("k", 0.5, 2.0, 4.0), builds=3)(
    lambda m, x: m.fc(x) * math.exp(-m.k)
)
row("number whose type is asked", {"k": 0.5}, change=setting("k", 0.5, 2.0, 4), builds=3)(
    lambda m, x: m.fc(x) * m.k if isinstance(m.k, float) else m.fc(x) - m.k
)
row("zero and minus zero", {"k": 0.0}, change=setting("k", 0.0, -0.0, 0.0), builds=2)(
    lambda m, x: m.fc(x) + math.copysign(3.0, m.k)
)
row(
    "division by a number that comes to be 0",
    {"k": 0.5},
    change=setting("k", 0.5, 0.25, 0.0, 2.0),
    calls=SIX[:4],
    builds=4,
    today={"backend": "raises TorchRuntimeError: RuntimeError when making fake tensor call Ex"},
)(lambda m, x: m.fc(x) * (1 / m.k))
row(
    "whole numbers beyond 64 bits", {"k": 1}, change=setting("k", 1, 2, 5_000_000, -7_000_001), calls=SIX[:4], builds=4
)(lambda m, x: m.fc(x) * (((m.k**3 * 6364136223846793005 + 1) % 1000) / 1000 + m.k**4 / 1e30))


@row(
    "ZeroDivisionError that forward catches",
    {"k": 0.5},
    change=setting("k", 0.5, 0.0, 2.0),
    builds=4,
    broken="compile step",
    today={"backend": "raises TorchRuntimeError: RuntimeError when making fake tensor call Ex"},
)
def catches_zero(m, x):
    try:
        return m.fc(x) * (1 / m.k)
    except ZeroDivisionError:
        return m.fc(x) * 7


row("number as an argument", calls=((X, 0.5), (X, 2.0), (X, 4.0), (X, 0.25)), inductor=True, builds=2)(
    lambda m, x, k: m.fc(x) * k
)
row(
    "sizes and numbers together",
    {"k": 1.0},
    calls=rows_of(2, 3, 4, 5, 6),
    change=lambda m, n: setattr(m, "k", 1.5 + n),
    builds=2,
)(lambda m, x: m.fc(x) * m.k + m.k)
row("item of a list", {"items": [1.0, 0.5]}, calls=SIX, change=lambda m, n: m.items.__setitem__(1, 1.0 + n), builds=2)(
    lambda m, x: m.fc(x) * m.items[1]
)
row("key that a dict comes to have", {"table": {}}, change=at(1, lambda m: m.table.update(late=4.0)), builds=2)(
    lambda m, x: m.fc(x) * m.table.get("late", 1.0)
)
row("set that is read", {"skip": {1, 2}}, inductor=True)(lambda m, x: m.fc(x) if 1 in m.skip else x)
row("set that changes", {"skip": {1}}, change=at(1, lambda m: m.skip.update((2, 3, 4))), builds=2)(
    lambda m, x: m.fc(x) * len(m.skip)
)
row("frozenset", {"skip": frozenset({1})}, change=setting("skip", frozenset({1}), frozenset({1, 2, 3, 4})), builds=2)(
    lambda m, x: m.fc(x) * len(m.skip) if 1 in m.skip else x
)
row("enum", {"kind": Kind.PLAIN}, change=setting("kind", Kind.PLAIN, Kind.DOUBLED), builds=2)(
    lambda m, x: m.fc(x) * (5 if m.kind is Kind.DOUBLED else 1)
)
row("field of a dataclass", {"options": Options()}, change=setting("options.width", 1.0, 3.0, 9.0), builds=2)(
    lambda m, x: m.fc(x) * m.options.width
)
row(
    "computed name",
    {"kind": "wide", "scale_wide": 1.0},
    change=setting("scale_wide", 1.0, 3.0, 9.0),
    inductor=True,
    builds=2,
)(lambda m, x: m.fc(x) * getattr(m, f"scale_{m.kind}"))
row("attribute that goes", {"late": 4.0}, change=at(1, lambda m: delattr(m, "late")), builds=2)(
    lambda m, x: m.fc(x) * (m.late if hasattr(m, "late") else 1.0)
)
row("attribute of the class", change=lambda m, n: setattr(type(m), "shared", 1.0 + 2 * n), builds=2)(
    lambda m, x: m.fc(x) * m.shared
)
row("forward of a layer", change=at(1, lambda m: setattr(m.fc, "forward", lambda x: x * 3.0)), builds=2)(
    lambda m, x: m.out(m.fc(x))
)
row(
    "function on an attribute", {"act": torch.relu}, change=setting("act", torch.relu, torch.tanh, torch.exp), builds=3
)(lambda m, x: m.act(m.fc(x)))
row(
    "partial",
    {"part": functools.partial(torch.mul, other=1.0)},
    change=lambda m, n: setattr(m, "part", functools.partial(torch.mul, other=1.0 + 2 * n)),
    builds=2,
)(lambda m, x: m.part(m.fc(x)))
row("global", change=set_global, builds=2)(lambda m, x: m.fc(x) * FACTOR)
row("context variable", change=lambda m, n: CONTEXT.set(1.0 + 2 * n), breaks=5 if torch.__version__ < "2.14" else "")(
    lambda m, x: m.fc(x) * CONTEXT.get()
)
row("environment", change=lambda m, n: os.environ.update(AMP_TEST_SCALE=str(1 + 2 * n)), builds=3)(
    lambda m, x: m.fc(x) * float(os.environ["AMP_TEST_SCALE"])
)
row("item of an array", {"array": np.ones(3)}, change=lambda m, n: m.array.__setitem__(1, 1.0 + 2 * n), **READS)(
    lambda m, x: m.fc(x) * float(m.array[1])
)
row("number of a tensor", {"single": torch.ones(())}, change=lambda m, n: m.single.fill_(1.0 + 2 * n), **READS)(
    lambda m, x: m.fc(x) * float(m.single)
)
row(
    "number of a tensor, other at every call",
    {"single": torch.ones(())},
    calls=((X,),) * 14,
    change=lambda m, n: m.single.fill_(1 + n),
    **READS,
)(lambda m, x: m.fc(x) * m.single.item())
row("tensor that is no buffer", {"gain": (torch.ones(4),)}, change=lambda m, n: m.gain[0].fill_(1.0 + 2 * n))(
    lambda m, x: m.fc(x) * m.gain[0]
)
row(
    "tensor of another type",
    {"gain": torch.ones(4)},
    change=at(1, lambda m: setattr(m, "gain", torch.full((4,), 3.0).double())),
    builds=2,
)(lambda m, x: (m.fc(x) * m.gain).float())
row("deterministic algorithms", change=lambda m, n: torch.use_deterministic_algorithms(n == 1), builds=2)(
    lambda m, x: m.fc(x) * (3.0 if torch.are_deterministic_algorithms_enabled() else 1.0)
)
row("initial seed", calls=SIX, settles=False, breaks={"compile": 3, "step": 5, "backend": 3})(
    lambda m, x: m.fc(x) * (1.0 + torch.initial_seed() % 7)
)
row(
    "default of an argument",
    change=lambda m, n: setattr(type(m).forward, "__defaults__", (1.0 + 2 * n,)),
    builds=2,
    # Before torch 2.12 Dynamo guards no default of a function that another one calls.
    today={} if torch.__version__ >= "2.12" else dict.fromkeys(("compile", "step"), "the first default"),
)(lambda m, x, k=1.0: m.fc(x) * k)
row("what no code reads", {"unread": 1.0}, quiet=True, change=setting("unread", 1.0, 3.0, 9.0))(lambda m, x: m.fc(x))
row(
    "other objects of the same value",
    {"k": 1.0, "sizes": [1, 1]},
    quiet=True,
    change=lambda m, n: (setattr(m, "k", float("1.0")), setattr(m, "sizes", [1, 1])),
)(lambda m, x: m.fc(x) * m.k * m.sizes[0])
row("values that alternate", {"k": "a"}, change=setting("k", "a", "b"), calls=SIX, builds=2)(
    lambda m, x: m.fc(x) * (1.0 if m.k == "a" else 5.0)
)


class WithProperty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.k = nn.Linear(4, 4), 1.0

    @property
    def doubled(self) -> float:
        return 2 * self.k

    @functools.cached_property
    def width(self) -> int:
        return self.fc.weight.shape[0]

    @functools.cached_property
    def table(self) -> torch.Tensor:
        return torch.arange(4.0)


@row("property of a module", change=setting("k", 1.0, 3.0, 9.0), builds=2)
class ReadsProperty(WithProperty):
    def forward(self, x):
        return self.fc(x) * self.doubled


@row("cached_property that forward reads first", step_breaks=3)
class ReadsCached(WithProperty):
    def forward(self, x):
        return self.fc(x) * self.width


@row("probability of a layer", draws=False, change=setting("drop.p", 0.0, 1.0, 0.0), builds=2)
class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.drop = nn.Linear(4, 4), nn.Dropout(0.0)

    def forward(self, x):
        h = self.fc(x)
        return self.drop(h) + h


def closure_of(start: float) -> Any:
    def make(model: Any) -> Any:
        weights = model.loss_weights = [start, 2]
        return lambda net, x: weights[0] * net(x).pow(weights[1]).mean()

    return make


row(
    "closure over a loss weight",
    {},
    loss=closure_of(1.0),
    doors=TRAINED,
    calls=SIX,
    change=lambda m, n: m.loss_weights.__setitem__(0, 1.0 + n),
    builds=2,
)(lambda m, x: m.fc(x))


OPTIMIZER = torch.optim.SGD([torch.zeros(1)], lr=1.0)
row("learning rate", change=lambda m, n: OPTIMIZER.param_groups[0].update(lr=1.0 + 2 * n), builds=2)(
    lambda m, x: m.fc(x) * OPTIMIZER.param_groups[0]["lr"]
)


@row("inverse of a count, and its root", {"count": 0}, calls=((X,),) * 6, builds=2)
def averages(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.count += 1
    return m.fc(x) * (1 / m.count) + m.count**-0.5
