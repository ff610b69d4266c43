"""Numbers of Python that change between calls become inputs of the graph: it is compiled once more for all values."""

from __future__ import annotations

import logging
import math
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional

import amp_compiler as amp

X = torch.linspace(-1, 1, 24).reshape(3, 8)
VALUES = [0.5 + 0.07 * number for number in range(12)]
SCALE = 0.5


class Settings:
    __slots__ = ("scale",)

    def __init__(self):
        self.scale = 0.5


class Scaled(nn.Module):
    """Two products with `self.scaled(h)` between them."""

    shared = 0.5

    def __init__(self, scaled):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.scale, self.steps, self.table, self.items = 0.5, 0, {"scale": 0.5}, [1.0, 0.5]
        self.settings = Settings()
        self.__dict__["scaled"] = scaled

    def forward(self, x, weight=1.0):
        return self.last(self.scaled(self, self.first(x), weight))


def set_global(model, value):
    global SCALE
    SCALE = value


PLACES = {
    "attribute": (lambda m, h, w: h * m.scale, lambda m, v: setattr(m, "scale", v)),
    "dict": (lambda m, h, w: h * m.table["scale"], lambda m, v: m.table.update(scale=v)),
    "list": (lambda m, h, w: h * m.items[1], lambda m, v: m.items.__setitem__(1, v)),
    "another list": (lambda m, h, w: h * m.items[1], lambda m, v: setattr(m, "items", [1.0, v])),
    "slot": (lambda m, h, w: h * m.settings.scale, lambda m, v: setattr(m.settings, "scale", v)),
    "class": (lambda m, h, w: h * m.shared, lambda m, v: setattr(Scaled, "shared", v)),
    "global": (lambda m, h, w: h * SCALE, set_global),
    "counter": (lambda m, h, w: h * (1 - m.steps / 1000), lambda m, v: setattr(m, "steps", round(100 * v))),
    "arithmetic": (
        lambda m, h, w: h * (1 - m.scale) ** 2 + m.scale / 2 - h.clamp(-m.scale, m.scale),
        lambda m, v: setattr(m, "scale", v),
    ),
    "a constant": (
        lambda m, h, w: h + torch.full_like(h, m.scale) + torch.full((8,), m.scale),
        lambda m, v: setattr(m, "scale", v),
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_after_the_second_graph_there_is_no_other(place):
    scaled, change = PLACES[place]
    model = amp.compile(Scaled(scaled), dtype="bf16", backend="eager")
    for value in VALUES:
        change(model.original, value)
        expected = amp.compile(model.original, dtype="bf16", backend="eager")(X)
        assert torch.equal(model(X), expected)  # as with the number written into the graph
        assert model.execution == "as one graph"
    assert model.compilations <= 2


def test_an_argument():
    model = amp.compile(Scaled(lambda m, h, w: h * w), dtype="bf16", backend="eager")
    for value in VALUES:
        expected = amp.compile(model.original, dtype="bf16", backend="eager")(X, value)
        assert torch.equal(model(X, value), expected)
        assert torch.equal(model(X, weight=value), expected)
    assert model.compilations <= 4  # by place and by name


def test_sizes_and_numbers_change_together():
    model = amp.compile(Scaled(lambda m, h, w: h * w + m.scale), dtype="bf16", backend="eager")
    for number, value in enumerate(VALUES):
        model.original.scale = value
        x = torch.ones(2 + number, 8)
        expected = amp.compile(model.original, dtype="bf16", backend="eager")(x, value)
        assert torch.equal(model(x, value), expected)
    assert model.compilations <= 3


def test_the_message_says_what_no_longer_held(caplog):
    torch._dynamo.reset()  # what other models of the class were called with
    caplog.set_level(logging.INFO, "amp_compiler")
    model = amp.compile(Scaled(PLACES["dict"][0]), dtype="bf16", backend="eager")
    for value in VALUES[:2]:
        model.original.table["scale"] = value
        model(X)
    first, *others = (one.getMessage() for one in caplog.records if one.getMessage().startswith("compiled"))
    assert first.startswith("compiled graph0 of Scaled in ") and "held" not in first
    assert all("no longer held: " in one and "table" in one for one in others)


def test_another_type_or_another_length_is_captured_anew():
    model = amp.compile(Scaled(lambda m, h, w: h * m.items[-1]), dtype="bf16", backend="eager")
    for items in ([1.0, 0.5], [1.0, 0.7], [1.0, 2], [1.0, 0.5, 0.3], [torch.tensor(0.4)], [0.1], [0.2], [True]):
        model.original.items = items
        expected = amp.compile(model.original, dtype="bf16", backend="eager")(X)
        assert torch.equal(model(X), expected)


BEYOND = {
    "branch": lambda m, h, w: h * 2 if m.scale > 0.9 else h * m.scale,
    "function": lambda m, h, w: h * math.exp(-m.scale),
    "root": lambda m, h, w: h * (1.3 - m.scale) ** 0.5,
    "tensor": lambda m, h, w: h * torch.tensor(m.scale),
    "tuple": lambda m, h, w: h * m.pair[0],
    "probability": lambda m, h, w: functional.dropout(h, m.scale / 100, training=False) * m.scale,
    "size": lambda m, h, w: h * h[:, : round(4 * m.scale)].sum(1, keepdim=True),
}


@pytest.mark.parametrize("kind", BEYOND)
def test_more_than_arithmetic_is_computed_with_the_number_itself(kind):
    """Always with a plan, and beside it another number is an input."""
    model = amp.compile(Scaled(lambda m, h, w: BEYOND[kind](m, h, w) + m.steps / 7.0), dtype="bf16", backend="eager")
    for number, value in enumerate(VALUES):
        model.original.scale, model.original.steps, model.original.pair = value, number, (value, 1)
        with torch.no_grad():
            expected, result = model.original(X), model(X)
        error = (result - expected).norm() / expected.norm()
        assert 0 < error < 2e-2, (value, float(error))
    assert model.plan.low_nodes > 0


def test_the_number_at_fault_is_told_from_the_others():
    model = amp.compile(
        Scaled(lambda m, h, w: functional.dropout(h, m.scale / 100, training=True) * m.items[0]),
        dtype="bf16",
        backend="eager",
    )
    model.original.scale, model.original.items = 0.1, [1.0, 0.5]
    model(X)
    model.original.scale, model.original.items[0] = 0.2, 0.8
    model(X)
    begin = model.compilations
    for value in VALUES:
        model.original.items[0] = value
        model(X)
    assert model.compilations <= begin + 1 and model.execution == "as one graph"


def test_what_forward_assigns_to_is_no_input():
    class Counts(Scaled):
        def forward(self, x):
            self.scale += 0.125
            return self.last(self.first(x) * self.scale)

    model = amp.compile(Counts(None), dtype="bf16", backend="eager")
    reference = Counts(None)
    with torch.no_grad():
        for number in range(6):
            if number == 3:
                model.original.scale = reference.scale = 0.25
            expected = reference(X)
            assert (model(X) - expected).norm() < 2e-2 * expected.norm()
            assert model.original.scale == reference.scale


def or_seven(model, h, weight):
    try:
        return h * (1 / model.scale)
    except ZeroDivisionError:
        return h * 7


# Each with numbers for which C computes something else than Python.
AS_PYTHON = {
    "caught": (or_seven, [0.5, 0.25, 0.0, 2.0, 0.0]),
    "by zero": (lambda m, h, w: h * (1 / m.scale), [0.5, 0.25, 0.0, 2.0]),
    "whole numbers by zero": (lambda m, h, w: h * (5 // m.scale + 5 % m.scale), [1, 2, 0, 3]),
    "more than 64 bits": (
        lambda m, h, w: h * ((m.scale**3 * 6364136223846793005 + 1) % 1000) / 1000 + h * (m.scale**4 / 1e30),
        [1, 2, 5_000_000, -7_000_001],
    ),
    "with a size": (lambda m, h, w: h * (m.scale * h.shape[0] * 6364136223846793005 % 1000), [1, 2, 5_000_000]),
    "an argument": (lambda m, h, w: h * (1 / w), [0.5, 0.25, 0.0, 2.0]),
}


@pytest.mark.parametrize("kind", AS_PYTHON)
def test_arithmetic_gives_and_raises_what_python_does(kind, compiler):
    scaled, values = AS_PYTHON[kind]
    model = Scaled(scaled)
    compiled = amp.compile(model, dtype="bf16")
    for value in values:
        model.scale = value
        weight = [value] if kind == "an argument" else []
        try:
            wanted = model(X, *weight)
        except ZeroDivisionError:
            with pytest.raises((ZeroDivisionError, amp.AmpError), match=r"division|modulo"):
                compiled(X, *weight)
        else:
            # The second product rounds what is up to 7 times as large to 8 bits.
            torch.testing.assert_close(compiled(X, *weight).float(), wanted, rtol=2**-6, atol=7 * 2**-7)


def test_two_threads_with_numbers_of_their_own():
    model = amp.compile(Scaled(lambda m, h, w: h * w), dtype="bf16", backend="eager")
    with torch.no_grad():
        expected = {value: amp.compile(model.original, dtype="bf16", backend="eager")(X, value) for value in VALUES[:4]}
        for value in VALUES[:3]:
            model(X, value)
    wrong = []

    def call(value):
        with torch.no_grad():
            wrong.extend(value for _ in range(50) if not torch.equal(model(X, value), expected[value]))

    threads = [threading.Thread(target=call, args=(value,)) for value in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.compiles
def test_compiled():
    model = amp.compile(Scaled(PLACES["arithmetic"][0]), dtype="bf16")
    with torch.no_grad():
        for value in VALUES:
            model.original.scale = value
            expected = model.original(X)
            assert (model(X) - expected).norm() < 2e-2 * expected.norm()
    assert model.execution == "as one graph" and model.compilations == 2


ASKED = {
    "isinstance": lambda m, h: h * m.scale if isinstance(m.scale, float) else h - 1,
    "of several": lambda m, h: h * m.steps if isinstance(m.steps, (int, float)) else h - 1,
    "type": lambda m, h: h * m.scale if type(m.scale) is float and type(m.steps) == int else h - 1,  # noqa: E721
    "of a product": lambda m, h: h * m.scale if isinstance(m.scale * 2, float) else h - 1,
    "its buffers": lambda m, h: h * m.scale + len(list(m.buffers())) + len(m.state_dict()),
}


@pytest.mark.parametrize("kind", ASKED)
def test_code_that_asks_sees_a_number_and_the_buffers_of_the_model(kind):
    model = amp.compile(Scaled(lambda m, h, w: ASKED[kind](m, h)), dtype="bf16", backend="eager")
    for number, value in enumerate(VALUES):
        model.original.scale, model.original.steps = value, number
        expected = amp.compile(model.original, dtype="bf16", backend="eager")(X)
        assert torch.equal(model(X), expected)
    assert model.compilations <= 5
    assert not {"isinstance", "type"} & globals().keys()


@pytest.mark.parametrize("text", [str, repr, "{}".format, lambda k: f"{k}", lambda k: f"{k * 2}", lambda k: f"{k:.3f}"])
def test_a_text_is_made_of_the_number_itself(text):
    class Told(nn.Linear):
        scale = 0.5

        def forward(self, x):
            return super().forward(x) * self.scale, text(self.scale)

    model = amp.compile(Told(8, 8), dtype="bf16", backend="eager")
    for value in VALUES[:6]:  # while it is one graph
        model.original.scale = value
        assert model(X)[1] == text(value)


def test_a_number_in_a_tuple_is_an_input():
    model = amp.compile(Scaled(lambda m, h, w: h * m.pair[0]), dtype="bf16", backend="eager")
    for value in VALUES:
        model.original.pair = (value, 1.0)
        with torch.no_grad():
            expected, result = model.original(X), model(X)
        error = (result - expected).norm() / expected.norm()
        assert 0 < error < 2e-2, (value, float(error))
    assert model.execution == "as one graph"


def test_a_dict_that_computes_what_it_keeps_is_left_alone():
    class Doubles(dict):
        def __setitem__(self, key, value):
            dict.__setitem__(self, key, 2 * value)

    model = amp.compile(Scaled(lambda m, h, w: h * m.weights["a"]), dtype="bf16", backend="eager")
    model.original.weights = Doubles(a=0.5)
    for value in VALUES:
        dict.__setitem__(model.original.weights, "a", value)
        model(X)
        assert model.original.weights == {"a": value}


def caught(value):
    try:
        return value if value > 0.9 else 2 * value
    except Exception:  # noqa: BLE001  # as careless code does
        return 77.0


def matched(value):
    match value:
        case float():
            return value
        case _:
            return 77.0


@pytest.mark.parametrize("asks", [caught, matched])
def test_what_hides_that_it_asks_for_the_number_has_it(asks):
    model = amp.compile(Scaled(lambda m, h, w: h * asks(m.scale)), dtype="bf16", backend="eager")
    for value in VALUES:
        model.original.scale = value
        with torch.no_grad():
            expected, result = model.original(X), model(X)
        assert (result - expected).norm() < 2e-2 * expected.norm()
