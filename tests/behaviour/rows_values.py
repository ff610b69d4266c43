"""Python values that a forward reads, which change between calls."""

from __future__ import annotations

import collections
import configparser
import contextvars
import ctypes
import dataclasses
import enum
import functools
import math
import multiprocessing
import operator
import os
import threading
import types
from typing import Any

import numpy as np
import torch
from table import FORWARD, READS, TRAINED, X, at, row, rows_of, setting
from torch import nn

SIX = ((X,),) * 6
CONTEXT: contextvars.ContextVar[float] = contextvars.ContextVar("CONTEXT", default=1.0)
UNSET: contextvars.ContextVar[float] = contextvars.ContextVar("UNSET")
FACTOR = 1.0
NUMBERS = np.ones(20_000)
LOCAL = threading.local()


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


@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: float


class Slots:
    __slots__ = ("scale", "skipped")

    def __init__(self) -> None:
        self.scale, self.skipped = 1.0, {1, 2}


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
row("annealed whole number", {"steps": 0}, calls=SIX, change=lambda m, n: setattr(m, "steps", 100 * n + 1), builds=2)(
    lambda m, x: m.fc(x) * (1 - m.steps / 1000)
)
row(
    "number in arithmetic",
    {"k": 0.5},
    calls=SIX,
    change=lambda m, n: setattr(m, "k", 0.5 + n / 3),
    inductor=True,
    builds=2,
)(lambda m, x: m.fc(x) * (1 - m.k) ** 2 + m.k / 2 - x.clamp(-m.k, m.k))
row("number as a constant tensor", {"k": 0.5}, calls=SIX, change=lambda m, n: setattr(m, "k", 1.0 + n), builds=2)(
    lambda m, x: m.fc(x) + torch.full_like(x, m.k) + torch.full((4,), m.k)
)
row("number made a tensor", {"k": 0.5}, change=setting("k", 0.5, 2.0, 4.0), builds=2)(
    lambda m, x: m.fc(x) * torch.tensor(m.k)
)
row("branch on a number", {"k": 0.5}, change=setting("k", 0.5, 0.95, 0.4), builds=3)(
    lambda m, x: m.fc(x) * 2 if m.k > 0.9 else m.fc(x) * m.k
)
row("math function of a number", {"k": 0.5}, change=setting("k", 0.5, 2.0, 4.0), builds=3)(
    lambda m, x: m.fc(x) * math.exp(-m.k)
)
row("root of a number", {"k": 0.5}, change=setting("k", 0.5, 2.0, 4.0), builds=3)(lambda m, x: m.fc(x) * m.k**0.5)
row("number as a probability", {"p": 0.0, "k": 1.0}, change=setting("k", 1.0, 2.0, 0.5), builds=3)(
    lambda m, x: nn.functional.dropout(m.fc(x), m.k / 100, training=False) * m.k
)
row("number as a size", {"k": 1.0}, change=setting("k", 1.0, 0.5, 0.75), builds=2)(
    lambda m, x: m.fc(x) * m.fc(x)[:, : round(4 * m.k)].sum(1, keepdim=True)
)
row("number in a text", {"k": 0.5}, change=setting("k", 0.5, 2.0, 4.0), doors=FORWARD, builds=3)(
    lambda m, x: (m.fc(x) * m.k, 4 * int(f"{m.k:.0f}"))
)
row("number whose type is asked", {"k": 0.5}, change=setting("k", 0.5, 2.0, 4), builds=3)(
    lambda m, x: m.fc(x) * m.k if isinstance(m.k, float) else m.fc(x) - m.k
)
row("whole number, then float, then bool", {"k": 1}, change=setting("k", 1, 2.5, True, 3.0), calls=SIX, builds=3)(
    lambda m, x: m.fc(x) * m.k
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
    "whole division by a number that comes to be 0",
    {"k": 1},
    change=setting("k", 1, 2, 0, 3),
    calls=SIX[:4],
    builds=4,
    today={"backend": "raises TorchRuntimeError: RuntimeError when making fake tensor call Ex"},
)(lambda m, x: m.fc(x) * (5 // m.k + 5 % m.k))
row(
    "whole numbers beyond 64 bits", {"k": 1}, change=setting("k", 1, 2, 5_000_000, -7_000_001), calls=SIX[:4], builds=4
)(lambda m, x: m.fc(x) * (((m.k**3 * 6364136223846793005 + 1) % 1000) / 1000 + m.k**4 / 1e30))


@row("number that careless code catches errors of", {"k": 0.5}, change=setting("k", 0.5, 0.95, 0.4), builds=3)
def careless(m, x):
    try:
        k = m.k if m.k > 0.9 else 2 * m.k
    except Exception:  # noqa: BLE001
        k = 77.0
    return m.fc(x) * k


@row("number that is matched by its type", {"k": 0.5}, change=setting("k", 0.5, 2.0, 4), builds=3)
def matched(m, x):
    match m.k:
        case float():
            return m.fc(x) * m.k
        case _:
            return m.fc(x) * 77.0


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
row("number as a keyword", calls=((X, {"k": 0.5}), (X, {"k": 2.0}), (X, {"k": 4.0})), builds=2)(
    lambda m, x, k=1.0: m.fc(x) * k
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
row("another list", {"items": [1.0, 0.5]}, change=lambda m, n: setattr(m, "items", [1.0, 1.0 + n]), builds=2)(
    lambda m, x: m.fc(x) * m.items[1]
)
row("list of another length", {"items": [1.0]}, change=setting("items", [1.0], [1.0, 4.0], [1.0, 2.0, 9.0]), builds=3)(
    lambda m, x: m.fc(x) * m.items[-1]
)
row("item of a long list", {"items": [1.0] * 2_000}, change=lambda m, n: m.items.__setitem__(1500, 1.0 + n), builds=2)(
    lambda m, x: m.fc(x) * m.items[1500]
)
row("item of a tuple", {"pair": (0.5, 1)}, calls=SIX, change=lambda m, n: setattr(m, "pair", (1.0 + n, 1)), builds=6)(
    lambda m, x: m.fc(x) * m.pair[0]
)
row("item of a dict", {"table": {"k": 1.0}}, change=lambda m, n: m.table.update(k=1.0 + n), builds=2)(
    lambda m, x: m.fc(x) * m.table["k"]
)
row("key that a dict comes to have", {"table": {}}, change=at(1, lambda m: m.table.update(late=4.0)), builds=2)(
    lambda m, x: m.fc(x) * m.table.get("late", 1.0)
)
row(
    "order of a dict",
    {"table": {"a": 1.0, "b": 5.0}},
    change=at(1, lambda m: m.table.update(a=m.table.pop("a"))),
    builds=2,
)(lambda m, x: m.fc(x) * next(iter(m.table.values())))
row(
    "chained dicts",
    {"chain": collections.ChainMap({}, {"k": 1.0})},
    change=lambda m, n: m.chain.maps[1].update(k=1.0 + n),
    builds=2,
)(lambda m, x: m.fc(x) * m.chain["k"])
row("deque", {"last": collections.deque([1.0], 3)}, change=lambda m, n: m.last.append(1.0 + n), builds=3)(
    lambda m, x: m.fc(x) * m.last[-1]
)
row("set that is read", {"skip": {1, 2}}, inductor=True)(lambda m, x: m.fc(x) if 1 in m.skip else x)
row("set that changes", {"skip": {1}}, change=at(1, lambda m: m.skip.update((2, 3, 4))), builds=2)(
    lambda m, x: m.fc(x) * len(m.skip)
)
row("set of names of keywords", {"skip": {"offsets"}}, calls=((X, {"scale": 2.0, "offsets": 1}),) * 3)(
    lambda m, x, **kw: m.fc(x) * {k: v for k, v in kw.items() if k not in m.skip}["scale"]
)
row("frozenset", {"skip": frozenset({1})}, change=setting("skip", frozenset({1}), frozenset({1, 2, 3, 4})), builds=2)(
    lambda m, x: m.fc(x) * len(m.skip) if 1 in m.skip else x
)
row("loop over a set of layers", {"at": {0, 2}}, change=setting("at", {0, 2}, {1}), builds=2)(
    lambda m, x: functools.reduce(lambda h, i: m.fc(h) if i in m.at else h + 1, range(3), x)
)
row("set of a class with slots", {"slots": Slots()}, change=at(1, lambda m: m.slots.skipped.clear()), builds=2)(
    lambda m, x: m.fc(x) * (5.0 if 1 in m.slots.skipped else 1.0)
)
row("slot", {"slots": Slots()}, change=setting("slots.scale", 1.0, 3.0, 9.0), builds=2)(
    lambda m, x: m.fc(x) * m.slots.scale
)
row("enum", {"kind": Kind.PLAIN}, change=setting("kind", Kind.PLAIN, Kind.DOUBLED), builds=2)(
    lambda m, x: m.fc(x) * (5 if m.kind is Kind.DOUBLED else 1)
)
row("value of an enum", {"kind": Kind.PLAIN}, change=setting("kind", Kind.PLAIN, Kind.DOUBLED), builds=2)(
    lambda m, x: m.fc(x) * m.kind.value
)
row("field of a dataclass", {"options": Options()}, change=setting("options.width", 1.0, 3.0, 9.0), builds=2)(
    lambda m, x: m.fc(x) * m.options.width
)
row("fields of a dataclass by name", {"options": Options()}, change=setting("options.width", 1.0, 3.0, 9.0), builds=3)(
    lambda m, x: m.fc(x) * dataclasses.asdict(m.options)["width"]
)
row(
    "copy of a dataclass",
    {"options": Options(), "calls": 0},
    change=lambda m, n: setattr(m, "calls", n),
    settles=False,
    builds=2,
)(lambda m, x: m.fc(x) * dataclasses.replace(m.options, width=2.0).width * (1 + m.calls))
row(
    "frozen dataclass",
    {"options": Frozen(1.0)},
    change=setting("options", Frozen(1.0), Frozen(3.0), Frozen(9.0)),
    builds=2,
)(lambda m, x: m.fc(x) * m.options.scale)
row("namespace", {"settings": types.SimpleNamespace(k=1.0)}, change=setting("settings.k", 1.0, 3.0, 9.0), builds=2)(
    lambda m, x: m.fc(x) * m.settings.k
)
row(
    "named tuple",
    {"pair": collections.namedtuple("Pair", "a b")(1.0, 2.0)},
    change=lambda m, n: setattr(m, "pair", m.pair._replace(a=1.0 + n)),
    builds=2,
)(lambda m, x: m.fc(x) * m.pair.a)
row(
    "computed name",
    {"kind": "wide", "scale_wide": 1.0},
    change=setting("scale_wide", 1.0, 3.0, 9.0),
    inductor=True,
    builds=2,
)(lambda m, x: m.fc(x) * getattr(m, f"scale_{m.kind}"))
row("computed name that was absent", {"kind": "late"}, change=at(1, lambda m: setattr(m, "scale_late", 4.0)), builds=2)(
    lambda m, x: m.fc(x) * getattr(m, f"scale_{m.kind}", 1.0)
)
row("attribute that was absent", change=at(1, lambda m: setattr(m, "late", 4.0)), builds=2)(
    lambda m, x: m.fc(x) * getattr(m, "late", 1.0)
)
row("attribute that goes", {"late": 4.0}, change=at(1, lambda m: delattr(m, "late")), builds=2)(
    lambda m, x: m.fc(x) * (m.late if hasattr(m, "late") else 1.0)
)
row("names of a table", {"scale_a": 1.0}, change=setting("scale_a", 1.0, 3.0, 9.0), builds=2)(
    lambda m, x: m.fc(x) * next(value for name, value in vars(m).items() if name.startswith("scale_"))
)
row(
    "attribute by a getter",
    {"k": 1.0, "get": operator.attrgetter("k")},
    change=setting("k", 1.0, 3.0, 9.0),
    builds=5,
    broken="compile step backend",
)(lambda m, x: m.fc(x) * m.get(m))
row("attribute of the class", change=lambda m, n: setattr(type(m), "shared", 1.0 + 2 * n), builds=2)(
    lambda m, x: m.fc(x) * m.shared
)
row(
    "attribute of the class, then on the module",
    change=lambda m, n: setattr(type(m) if n == 0 else m, "k", 1.0 + 2 * n),
    builds=3,
)(lambda m, x: m.fc(x) * m.k)
row(
    "method of the class that changes",
    change=lambda m, n: setattr(type(m), "last", lambda self, x: x * (1.0 + 2 * n)),
    builds=2,
)(lambda m, x: m.last(m.fc(x)))
row(
    "instance attribute that shadows a method",
    change=at(1, lambda m: setattr(m, "extra_repr", lambda: "xxxxxx")),
    builds=2,
)(lambda m, x: m.fc(x) * (1 + len(m.extra_repr())))
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
row(
    "keyword of a partial",
    {"part": functools.partial(torch.mul, other=1.0)},
    change=lambda m, n: m.part.keywords.update(other=1.0 + 2 * n),
    builds=2,
)(lambda m, x: m.part(m.fc(x)))
row("global", change=set_global, builds=2)(lambda m, x: m.fc(x) * FACTOR)
row("global by its name", change=set_global, builds=5, broken="compile step backend")(
    lambda m, x: m.fc(x) * globals()["FACTOR"]
)
row("context variable", change=lambda m, n: CONTEXT.set(1.0 + 2 * n), builds=5, broken="compile step backend")(
    lambda m, x: m.fc(x) * CONTEXT.get()
)
row(
    "context variable that was not set", change=at(1, lambda m: UNSET.set(4.0)), builds=5, broken="compile step backend"
)(lambda m, x: m.fc(x) * UNSET.get(1.0))
row("environment", change=lambda m, n: os.environ.update(AMP_TEST_SCALE=str(1 + 2 * n)), builds=3)(
    lambda m, x: m.fc(x) * float(os.environ["AMP_TEST_SCALE"])
)
row(
    "environment, absent at first",
    change=lambda m, n: os.environ.update(AMP_TEST_LATE="3") if n else os.environ.pop("AMP_TEST_LATE", None),
    builds=2,
)(lambda m, x: m.fc(x) * float(os.getenv("AMP_TEST_LATE", "1")))
row("variable of a thread", change=lambda m, n: setattr(LOCAL, "scale", 1.0 + 2 * n), builds=3)(
    lambda m, x: m.fc(x) * LOCAL.scale
)
row("item of an array", {"array": np.ones(3)}, change=lambda m, n: m.array.__setitem__(1, 1.0 + 2 * n), **READS)(
    lambda m, x: m.fc(x) * float(m.array[1])
)
row("item of a large array", change=lambda m, n: NUMBERS.__setitem__(15_000, 1.0 + 2 * n), **READS)(
    lambda m, x: m.fc(x) * float(NUMBERS[15_000])
)
row(
    "item of an array of objects",
    {"array": np.array([1.0, "one"], dtype=object)},
    change=lambda m, n: m.array.__setitem__(0, 1.0 + 2 * n),
    builds={"compile": 1, "step": 3, "backend": 1},
    broken="step",
)(lambda m, x: m.fc(x) * m.array[0])
row(
    "array of C",
    {"array": (ctypes.c_double * 2)(1, 1)},
    change=lambda m, n: m.array.__setitem__(1, 1.0 + 2 * n),
    builds=5,
    broken="compile step backend",
)(lambda m, x: m.fc(x) * m.array[1])
row(
    "bytes that change",
    {"array": bytearray(b"\1")},
    change=lambda m, n: m.array.__setitem__(0, 1 + 2 * n),
    builds=5,
    broken="compile step backend",
)(lambda m, x: m.fc(x) * m.array[0])
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
row(
    "number of a tensor that is another one",
    {"single": torch.ones(())},
    change=lambda m, n: setattr(m, "single", torch.tensor(1.0 + 2 * n)),
    **READS,
)(lambda m, x: m.fc(x) * m.single.item())
row(
    "list of a tensor's numbers",
    {"pair": torch.ones(2)},
    change=lambda m, n: m.pair.fill_(1.0 + 2 * n),
    builds=5,
    broken="compile step backend",
)(lambda m, x: m.fc(x) * sum(m.pair.tolist()))
row(
    "tensor as an index",
    {"index": torch.tensor(2)},
    change=lambda m, n: m.index.fill_(1 + n),
    builds=2,
)(lambda m, x: m.fc(x) + 9 * X[:, : m.index].sum())
row("tensor that is no buffer", {"gain": (torch.ones(4),)}, change=lambda m, n: m.gain[0].fill_(1.0 + 2 * n))(
    lambda m, x: m.fc(x) * m.gain[0]
)
row("another tensor", {"gain": torch.ones(4)}, change=lambda m, n: setattr(m, "gain", torch.full((4,), 1.0 + 2 * n)))(
    lambda m, x: m.fc(x) * m.gain
)
row(
    "tensor of another type",
    {"gain": torch.ones(4)},
    change=at(1, lambda m: setattr(m, "gain", torch.full((4,), 3.0).double())),
    builds=2,
)(lambda m, x: (m.fc(x) * m.gain).float())
row("event", {"seen": [0]}, change=at(1, lambda m: m.seen.append(1)), builds=2)(
    lambda m, x: m.fc(x) * (1 + 4 * len(m.seen))
)
row(
    "parsed settings",
    {"parsed": configparser.ConfigParser()},
    change=lambda m, n: m.parsed.read_string(f"[all]\nk={1 + 2 * n}"),
    builds=3,
)(lambda m, x: m.fc(x) * m.parsed.getfloat("all", "k"))
row(
    "parameter of a distribution",
    {"normal": torch.distributions.Normal(torch.ones(()), 1.0)},
    change=lambda m, n: setattr(m.normal, "loc", torch.full((4,), 1.0 + 2 * n)),
)(lambda m, x: m.fc(x) * m.normal.loc)
row("deterministic algorithms", change=lambda m, n: torch.use_deterministic_algorithms(n == 1), builds=2)(
    lambda m, x: m.fc(x) * (3.0 if torch.are_deterministic_algorithms_enabled() else 1.0)
)
row(
    "initial seed",
    calls=SIX,
    settles=False,
    builds={"compile": 3, "step": 5, "backend": 3},
    broken="compile step backend",
)(lambda m, x: m.fc(x) * (1.0 + torch.initial_seed() % 7))
row("default of an argument", change=lambda m, n: setattr(type(m).forward, "__defaults__", (1.0 + 2 * n,)), builds=2)(
    lambda m, x, k=1.0: m.fc(x) * k
)
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


@row("cached_property that forward reads first", builds=3, broken="step")
class ReadsCached(WithProperty):
    def forward(self, x):
        return self.fc(x) * self.width


@row("cached_property that makes a tensor", builds=4, broken="compile step backend")
class ReadsTable(WithProperty):
    def forward(self, x):
        return self.fc(x) * self.table


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
row(
    "closure over a whole number of the loss",
    {},
    loss=closure_of(1.0),
    doors=TRAINED,
    calls=SIX,
    change=lambda m, n: m.loss_weights.__setitem__(1, 2 + 2 * (n // 3)),
    builds=3,
    broken="step",
)(lambda m, x: m.fc(3 * x))


OPTIMIZER = torch.optim.SGD([torch.zeros(1)], lr=1.0)
SHARED = multiprocessing.Value("d", 1.0)
MEMORY = memoryview(bytearray(b"\1"))


class Nearer(Slots):
    pass


class Meta(type):
    @property
    def scale(cls) -> float:
        return cls.given


class WithMeta(metaclass=Meta):
    given = 1.0


class PerThread(threading.local):
    def __init__(self) -> None:
        self.held = {1}

    @property
    def skipped(self) -> set[int]:
        return set(self.held)


class Doubles(dict):
    """Computes what it keeps."""

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, 2 * value)


OF_THREAD = PerThread()
row("learning rate", change=lambda m, n: OPTIMIZER.param_groups[0].update(lr=1.0 + 2 * n), builds=2)(
    lambda m, x: m.fc(x) * OPTIMIZER.param_groups[0]["lr"]
)
row(
    "number that processes share",
    change=lambda m, n: setattr(SHARED, "value", 1.0 + 2 * n),
    builds={"compile": 1, "step": 3, "backend": 1},
    broken="step",
)(lambda m, x: m.fc(x) * SHARED.value)
row("view of memory", change=lambda m, n: MEMORY.__setitem__(0, 1 + 2 * n), builds=5, broken="compile step backend")(
    lambda m, x: m.fc(x) * MEMORY[0]
)
row(
    "attribute of a class that one above has too", change=lambda m, n: setattr(Nearer, "factor", 1.0 + 2 * n), builds=2
)(lambda m, x: m.fc(x) * Nearer.factor)
row("property of a metaclass", change=lambda m, n: setattr(WithMeta, "given", 1.0 + 2 * n), builds=2)(
    lambda m, x: m.fc(x) * WithMeta.scale
)
row(
    "number of threads",
    change=lambda m, n: torch.set_num_threads(1 + n % 2),
    builds={"compile": 4, "step": 7, "backend": 4},
    broken="compile step backend",
)(lambda m, x: m.fc(x) * (1.0 + 2 * torch.get_num_threads()))
row(
    "set that a property of a thread gives", change=lambda m, n: setattr(OF_THREAD, "held", set(range(1 + n))), builds=3
)(lambda m, x: m.fc(x) * len(OF_THREAD.skipped))
row(
    "dict that computes what it keeps",
    {"table": Doubles(k=1.0)},
    change=lambda m, n: dict.update(m.table, k=1.0 + n),
    builds=2,
)(lambda m, x: m.fc(x) * m.table["k"])
