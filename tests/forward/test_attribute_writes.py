"""What a forward writes beside its result: attributes, lists, dicts and buffers are as after an eager call."""

from __future__ import annotations

import collections
import copy
import functools
import itertools
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import Queue

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import amp_compiler as amp

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Expert(nn.Module):
    """Leaves a loss in an attribute and its hidden values in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.aux_loss = None
        self.maps: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.fc(x)
        self.aux_loss = h.square().mean()
        self.maps.append(h)
        return h.relu()


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Expert(), Expert()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Remembering(nn.Module):
    """Carries a state from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.state = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x if self.state is None else x + self.state[0]
        self.state = (torch.tanh(h).detach(), {"seen": x})
        return self.fc(h)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.n = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n += 1
        return self.fc(x) * self.n


class Averaging(nn.Module):
    """Gives its buffers new tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.fc(x)
        self.mean = 0.5 * self.mean + 0.5 * h.mean(0).detach()
        self.calls = self.calls + 1
        return h + self.mean


def pair(model: nn.Module, backend: str = "eager") -> tuple[nn.Module, nn.Module, amp.CompiledModule]:
    """A model, a twin that stays eager, and the model compiled."""
    return model, copy.deepcopy(model), amp.compile(model, dtype="bf16", backend=backend)


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_loss_in_an_attribute_trains(backend: str) -> None:
    model, twin, compiled = pair(Experts(), backend)
    maps = model.first.maps
    for _ in range(3):
        for one, run in ((model, compiled), (twin, twin)):
            for expert in (one.first, one.second):
                expert.maps.clear()
            one.zero_grad()
            (run(X).sum() + one.first.aux_loss + 2 * one.second.aux_loss).backward()
    assert compiled.execution == "as one graph" and model.first.maps is maps and len(maps) == 1
    close(model.first.aux_loss, twin.first.aux_loss)
    close(maps[0], twin.first.maps[0])
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        close(ours.grad, theirs.grad)


def test_what_is_returned_and_kept_is_one_tensor() -> None:
    class Keeping(Expert):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = self.other = self.fc(x)
            return self.last

    model, _, compiled = pair(Keeping())
    result = compiled(X)
    assert model.last is result and model.other is result


def test_what_is_written_before_it_is_read_needs_no_second_graph() -> None:
    class Summing(Experts):
        loss = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            self.loss = self.first.aux_loss + self.second.aux_loss
            return y * self.loss

    model, twin, compiled = pair(Summing())
    for _ in range(3):
        for one in (model, twin):
            one.first.maps, one.second.maps = [], []
        close(compiled(X), twin(X))
        close(model.loss, twin.loss)
    assert compiled.compilations == 1 and compiled.execution == "as one graph"
    assert Summing.loss is None and "aux_loss" not in vars(Expert)


def test_a_state_goes_from_call_to_call() -> None:
    model, twin, compiled = pair(Remembering())
    for _ in range(4):
        close(compiled(X), twin(X))
    assert compiled.compilations == 2  # without a state, and with one
    close(model.state[0], twin.state[0])
    assert torch.equal(model.state[1]["seen"], X)


def test_a_number_that_counts_is_counted() -> None:
    model, twin, compiled = pair(Counting())
    for _ in range(12):
        close(compiled(X), twin(X))
    assert model.n == 12 and compiled.execution == "as one graph"
    assert compiled.compilations == 2  # the number became an input


def test_a_shape_that_nobody_reads_is_noted_in_one_graph() -> None:
    class Noting(Expert):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.rows, self.kind = x.shape[0], "two" if x.dim() == 2 else "other"
            return self.fc(x)

    model, _, compiled = pair(Noting())
    for rows in (3, 2, 3):
        compiled(X[:rows])
        assert (model.rows, model.kind) == (rows, "two")
    assert compiled.execution == "as one graph" and compiled.compilations <= 2


@pytest.mark.parametrize("inner", [False, True])
def test_buffers_that_are_assigned_keep_their_values(inner: bool) -> None:
    model, twin, compiled = pair(nn.Sequential(Averaging()) if inner else Averaging())
    for _ in range(3):
        close(compiled(X), twin(X))
    for (name, ours), theirs in zip(model.named_buffers(), twin.buffers(), strict=True):
        close(ours, theirs)
        assert not isinstance(ours, FakeTensor), name
    assert compiled.execution == "as one graph"


def test_a_tensor_that_is_no_buffer_is_changed_in_place_once_a_call() -> None:
    class Plain(Expert):
        def __init__(self) -> None:
            super().__init__()
            self.calls = torch.zeros(())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.fc(x) * self.calls

    model, twin, compiled = pair(Plain())
    for _ in range(3):
        close(compiled(X), twin(X))
    assert model.calls.item() == 3


def test_a_model_may_call_itself() -> None:
    class Nested(Expert):
        def forward(self, x: torch.Tensor, again: bool = True) -> torch.Tensor:
            y = super().forward(x)
            return self(y, again=False) if again else y

    model, twin, compiled = pair(Nested())
    close(compiled(X), twin(X))
    close(model.aux_loss, twin.aux_loss)
    assert len(model.maps) == 2 and compiled.execution == "as one graph"


def test_hooks_write_to_what_they_close_over() -> None:
    model, twin, compiled = pair(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    found: dict[str, torch.Tensor] = {}
    model[0].register_forward_hook(lambda module, args, result: found.update(hidden=result))
    for factor in (1, 2, 3):
        compiled(X * factor)
        close(found["hidden"], twin[0](X * factor))
    assert compiled.execution == "as one graph"


def test_plain_objects_are_written_too() -> None:
    @dataclass
    class Log:
        loss: object = None

    class Logging(Expert):
        def __init__(self) -> None:
            super().__init__()
            self.log, self.table = Log(), {"norm": None}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.fc(x)
            self.log.loss, self.table["norm"] = h.sum(), h.norm()
            return h

    model, twin, compiled = pair(Logging())
    log, table = model.log, model.table
    for factor in (1, 2):
        close(compiled(X * factor), twin(X * factor))
        close(model.log.loss, twin.log.loss)
        close(model.table["norm"], twin.table["norm"])
    assert model.log is log and model.table is table


def fakes(model: nn.Module) -> list[str]:
    """The attributes that are left as stand-ins of a capture."""
    return [
        f"{name}.{key}"
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        for leaf in torch.utils._pytree.tree_leaves(value)
        if isinstance(leaf, FakeTensor)
    ]


def test_a_capture_that_fails_leaves_the_model_as_it_was() -> None:
    class Branching(Expert):
        def __init__(self) -> None:
            super().__init__()
            self.n, self.shared = 0, {"n": 0}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = super().forward(x)
            self.n, self.shared["n"], self.new = self.n + 1, 1, h
            raise RuntimeError("not today")

    model = Branching()
    before = dict(vars(model))
    shared, maps = model.shared, model.maps
    with pytest.raises(amp.CaptureError, match="not today"):
        amp.explain(model, (X,))
    assert vars(model) == before and model.shared is shared and shared == {"n": 0}
    assert model.maps is maps and maps == [] and fakes(model) == []


def test_random_numbers_of_python_are_drawn_at_every_call() -> None:
    class Drawing(Expert):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x) * random.random()

    _, twin, compiled = pair(Drawing())
    results = []
    for run in (compiled, twin):
        random.seed(0)
        results.append([run(X) for _ in range(3)])
    for ours, theirs in zip(*results, strict=True):
        close(ours, theirs)


class Slots:
    """Has no table of its attributes."""

    __slots__ = ("last", "n")

    def __init__(self) -> None:
        self.n, self.last = 0, None

    def count(self, h: torch.Tensor) -> float:
        self.n, self.last = self.n + 1, h.detach()
        return self.n


class Cached:
    @functools.lru_cache  # noqa: B019  # what is tested
    def table(self, n: int) -> torch.Tensor:
        return torch.arange(n).float()


def local() -> threading.local:
    made = threading.local()
    made.n = 0
    return made


def counted(array, h):
    array[0] += 1
    return float(array[0])


def kept(store, h):
    store["n"] = store.get("n", 0) + 1
    return store["n"]


def put(queue, h):
    queue.put(h.detach())
    return queue.qsize()


def called(function, h):
    function.calls += 1
    return function.calls


def function():
    def inner():
        pass

    inner.calls = 0
    return inner


def of_thread(local, h):
    local.n += 1
    return local.n


HELD = {
    "slots": (Slots, lambda held, h: held.count(h), lambda held: held.last),
    "cached results": (Cached, lambda held, h: held.table(4), lambda held: held.table(4)),
    "array of NumPy": (lambda: np.zeros(2), counted, lambda held: held[0]),
    "bytes": (lambda: bytearray(2), counted, lambda held: held[0]),
    "generator of NumPy": (lambda: np.random.default_rng(0), lambda held, h: held.random(), lambda held: held.random()),
    "iterator": (lambda: itertools.count(1), lambda held, h: next(held), next),
    "a dict of its own": (collections.UserDict, kept, lambda held: held["n"]),
    "queue": (Queue, put, lambda held: held.get()),
    "attribute of a function": (function, called, lambda held: held.calls),
    "thread": (local, of_thread, lambda held: held.n),
}  # fmt: skip


class Holding(nn.Module):
    def __init__(self, held, factor) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.held, self.factor = nn.Linear(4, 4), held, factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.fc(x)
        return h * self.factor(self.held, h)


@pytest.mark.sweep(5)
@pytest.mark.parametrize("name", HELD)
def test_what_no_table_of_attributes_holds_is_seen(name: str) -> None:
    make, factor, look = HELD[name]
    model, plain = Holding(make(), factor), Holding(make(), factor)
    compiled = amp.compile(model, dtype="bf16", backend="eager")
    for _ in range(3):
        close(compiled(X), plain(X))
    left = look(model.held)
    assert not isinstance(left, FakeTensor)
    close(torch.as_tensor(left).double(), torch.as_tensor(look(plain.held)).double())


def test_a_buffer_that_is_made_late_is_real() -> None:
    class Late(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "late"):
                self.register_buffer("late", x.mean(0), persistent=False)
            return x + self.late

    model = Late()
    compiled = amp.compile(model, dtype="bf16", backend="eager")
    close(compiled(X), X + X.mean(0))
    assert type(model.late) is torch.Tensor
    with pytest.raises(amp.CaptureError):
        amp.explain(Late(), X)


def test_a_generator_of_python_draws_at_every_call() -> None:
    model, plain = (Holding(random.Random(0), lambda held, h: held.random()) for _ in range(2))
    compiled = amp.compile(model, dtype="bf16", backend="eager")
    for _ in range(3):
        close(compiled(X), plain(X))
    assert model.held.getstate() == plain.held.getstate()


def test_explain_writes_nothing() -> None:
    model = Experts()
    amp.explain(model, (X,), dtype="bf16")
    assert model.first.aux_loss is None and model.first.maps == [] and fakes(model) == []


def test_an_object_that_no_graph_makes_names_the_line() -> None:
    class Boxed(Expert):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.box = object()
            return self.fc(x)

    with pytest.raises(amp.CaptureError, match=r"test_attribute_writes\.py:\d+: forward assigns a object to 'box'"):
        amp.explain(Boxed(), (X,))


class Skipping(nn.Module):
    """Reads a set, or changes it."""

    def __init__(self, change: Callable[[set[int]], object]) -> None:
        super().__init__()
        self.fc, self.skipped, self.change = nn.Linear(4, 4), {1, 2}, change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change(self.skipped)
        return self.fc(x) if 1 in self.skipped else x


def test_a_set_that_is_only_read_leaves_one_graph() -> None:
    model = Skipping(len)
    assert len(amp.explain(model, (X,), dtype="bf16").nodes) == 1
    step = amp.training_step(
        model, lambda net, x: net(x).sum(), torch.optim.SGD(model.parameters(), 0.1), dtype="bf16", backend="eager"
    )
    step(X)
    assert "subgraph" not in str(step.execution)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda skipped: skipped.add(3), id="add"),
        pytest.param(lambda skipped: skipped.discard(2), id="discard"),
        pytest.param(lambda skipped: skipped.symmetric_difference_update((2, 3)), id="as many others"),
    ],
)
def test_a_set_that_forward_changes_is_refused_and_as_before(change: Callable[[set[int]], object]) -> None:
    model = Skipping(change)
    with pytest.raises(amp.CaptureError, match="changes the set 'skipped'"):
        amp.explain(model, (X,), dtype="bf16")
    assert model.skipped == {1, 2}
