"""What a forward writes: attributes, lists, counters, buffers, tensors in place, prints, random numbers."""

import collections
import functools
import itertools
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from table import DOORS, FORWARD, READS, X, at, row
from torch import nn

FIVE = ((X,),) * 5


@dataclass
class Log:
    loss: Any = None


@row("auxiliary loss on an attribute", {"aux": None}, doors=DOORS, inductor=True)
def auxiliary(m, x):
    h = m.fc(x)
    m.aux = h.square().mean()
    return m.out(h.relu())


@row("auxiliary loss of an attribute in the user's loss", {"aux": None}, loss=lambda model: with_auxiliary(model))
def auxiliary_in_loss(m, x):
    h = m.fc(x)
    m.aux = h.square().mean()
    return m.out(h.relu())


def with_auxiliary(model: Any) -> Any:
    return lambda net, x: net(x).square().mean() + 2 * model.aux


@row(
    "what is returned and kept is one tensor",
    look=lambda m, y: y is None or (type(y) is torch.Tensor and m.last is m.other is y),
    doors=FORWARD,
)
def returned_and_kept(m, x):
    m.last = m.other = m.fc(x)
    return m.last


@row("state that goes from call to call", {"state": None}, calls=FIVE, doors=DOORS, builds=2)
def remembers(m, x):
    h = x if m.state is None else x + m.state[0]
    m.state = (torch.tanh(h).detach(), {"seen": x})
    return m.fc(h)


@row("counter", {"n": 0}, calls=((X,),) * 12, doors=DOORS, inductor=True, builds=2)
def counts(m, x):
    m.n += 1
    return m.fc(x) * m.n


@row(
    "float that forward moves", {"scale": 0.5}, calls=FIVE, change=at(3, lambda m: setattr(m, "scale", 0.25)), builds=2
)
def moves_float(m, x):
    m.scale += 0.125
    return m.fc(x) * m.scale


@row("list that grows by tensors", {"maps": []}, calls=FIVE, settles=False, builds=7)
def grows(m, x):
    h = m.fc(x)
    m.maps.append(h)
    return h.relu()


BOUNDED = {"last": collections.deque(maxlen=3), "items": []}


@row("deque and list that forward fills, by names too", BOUNDED, calls=FIVE, builds=7, settles=False)
def fills_deque(m, x):
    m.items.__iadd__((1,))
    list.__iadd__(m.items, [2])
    m.last.extendleft([len(m.last), 7])
    m.last.append(5)
    return m.fc(x) * (len(m.items) + sum(m.last) * m.last.copy().maxlen)


@row("order that forward changes", {"table": collections.OrderedDict(a=1, b=2, c=3)}, calls=FIVE, builds=3)
def changes_order(m, x):
    m.table.move_to_end("a")
    m.table.move_to_end("b", last=False)
    return m.fc(x) * (1 + [*m.table].index("a"))


@row("set that forward changes", {"seen": {1, 2}}, look=lambda m, y: sorted(m.seen), builds=2)
def changes_set(m, x):
    m.seen.add(3)
    return m.fc(x) * len(m.seen)


@row("objects that are written to", {"log": Log(), "table": {"norm": None}})
def writes_objects(m, x):
    h = m.fc(x)
    m.log.loss, m.table["norm"] = h.sum(), h.norm()
    return h


@row("array that forward writes", {"held": np.zeros(2)}, calls=FIVE, **READS)
def writes_array(m, x):
    m.held[0] += 1
    return m.fc(x) * float(m.held[0])


row(
    "iterator",
    {"held": itertools.count(1)},
    calls=FIVE,
    look=lambda m, y: repr(m.held),
    builds=7,
    # Before torch 2.12 it is a graph break.
    today={}
    if torch.__version__ < "2.12"
    else dict.fromkeys(("compile", "step", "backend"), "a call like the last one builds"),
    broken="compile step backend" if torch.__version__ < "2.12" else "",
)(lambda m, x: m.fc(x) * next(m.held))


@row("buffers that are given new tensors", inductor=True, calls=FIVE)
class Averaging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        h = self.fc(x)
        self.mean = 0.5 * self.mean + 0.5 * h.mean(0).detach()
        self.calls = self.calls + 1
        return h + self.mean


@row("buffers that are written in place", calls=FIVE)
class Writing(Averaging):
    def forward(self, x):
        h = self.fc(x)
        self.mean.mul_(0.5).add_(h.mean(0).detach())
        self.calls += 1
        return h + self.mean


@row("memory of weights and buffers, exchanged by .data", calls=FIVE)
class Exchanging(Averaging):
    def forward(self, x):
        self.fc.weight.data = self.fc.weight.data.clamp(-0.3, 0.3) * 1.5
        h = self.fc(x)
        self.mean.data = self.mean + h.mean(0).detach()
        return h + self.mean


@row("memory of a tensor, exchanged by .data", breaks=4)
def exchanges(m, x):
    x = x.clone()
    x.data = x * 0.5
    return m.fc(x)


@row("tensor that is no buffer, in place", {"calls": torch.zeros(())}, calls=FIVE)
def plain_tensor(m, x):
    m.calls += 1
    return m.fc(x) * m.calls


@row("batch norm", doors=DOORS, inductor=True)
class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.fc(x))


@row("batch norm without momentum", autocast=True, step_breaks=3)
class Cumulative(Normed):
    def __init__(self) -> None:
        super().__init__()
        self.norm.momentum = None


@row("SyncBatchNorm of one process", doors=("compile", "inference", "step", "backend"))
class Synchronized(Normed):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.SyncBatchNorm(4)


@row("module that calls itself", {"maps": []}, settles=False)
class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.aux = nn.Linear(4, 4), None

    def forward(self, x, again=True):
        h = self.fc(x)
        self.aux = h.square().mean()
        return self(h, again=False) if again else h


@row("print at every call", step_breaks=3)
def prints(m, x):
    h = m.fc(x)
    print("shape", tuple(h.shape))
    return h


row("random numbers of Python", calls=FIVE, breaks=5)(lambda m, x: m.fc(x) * (1 + random.random()))
row("random numbers of NumPy", calls=FIVE, breaks=5)(lambda m, x: m.fc(x) * (1 + float(np.random.rand())))
row("random numbers of torch", doors=DOORS)(lambda m, x: m.fc(x) + torch.rand(4))
row("dropout", autocast=True)(lambda m, x: nn.functional.dropout(m.fc(x), 0.5, m.training))
row("generator of NumPy", {"held": np.random.default_rng(0)}, calls=FIVE, breaks=5)(
    lambda m, x: m.fc(x) * (1 + m.held.random())
)


@row("seed that forward sets", step_breaks=3)
def seeds(m, x):
    torch.manual_seed(7)
    return m.fc(x) + torch.rand_like(x)


class Written(nn.Module):
    def __init__(self, write: Any) -> None:
        super().__init__()
        self.fc, self.write = nn.Linear(4, 4), write

    def forward(self, x):
        hidden = self.fc(x)
        result = self.write(hidden)
        return self.fc(x) * hidden + (0 if result is None else result)


def under_no_grad(write: Any) -> Any:
    def written(h: torch.Tensor) -> Any:
        with torch.no_grad():
            return write(h)

    return written


def of_a_split(h: torch.Tensor) -> None:
    h.split(2, 1)[1].add_(1)


def of_a_mask(h: torch.Tensor) -> None:
    h.masked_fill_(h > 0.2, 0.0)


WRITES = {
    "mul_ under no_grad": under_no_grad(lambda h: h.mul_(2)),
    "split under no_grad": under_no_grad(of_a_split),
    "mask under no_grad": under_no_grad(of_a_mask),
    "data": lambda h: h.data.mul_(3),
    "detach": lambda h: h.detach().mul_(3),
}
for name, write in WRITES.items():
    row(f"written past autograd: {name}")(
        type("Writes", (Written,), {"__init__": functools.partialmethod(Written.__init__, write)})
    )


class WrittenBehind(Written):
    def forward(self, x):
        return x if x.sum() > 1e9 else super().forward(x)


for name in ("mul_ under no_grad", "split under no_grad", "data"):
    row(f"written past autograd behind a graph break: {name}", breaks=5)(
        type("Writes", (WrittenBehind,), {"__init__": functools.partialmethod(Written.__init__, WRITES[name])})
    )


@row("written through one of several views")
def views(m, x):
    marks = torch.zeros(2, 4)
    _, last = marks.unbind(0)
    last.add_(1)
    left, _ = marks.chunk(2, 1)
    left.mul_(3)
    return m.fc(x) * marks.sum(0)


ALIASES = {
    "einsum": lambda h: torch.einsum("ij->ji", h),
    "atleast_3d": torch.atleast_3d,
    "broadcast_tensors": lambda h: torch.broadcast_tensors(h, h[:1])[0],
}


def written_through(alias: Any) -> Any:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = m.fc(x) * 1
        alias(h).add_(5)
        return h + 0

    return forward


for name, alias in ALIASES.items():
    row(f"written through an alias that no schema marks: {name}")(written_through(alias))
row("bits that are read as another type", doors=FORWARD)(lambda m, x: m.fc(x).view(torch.int32).view(torch.float32) * 1)
