"""Capturing and compiling use up no random numbers: a run draws what it draws, whenever it is captured."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_compiler as amp
from amp_compiler.fx.capture.generators import generators_kept

X = torch.ones(4, 16)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.dropout = nn.Linear(16, 16), nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(self.inner(x)) + torch.rand(16)


def noise(model, x):
    y = model(x)
    return y.square().mean(), y


def states(*more: torch.Generator) -> list[object]:
    own = [generator.get_state().tolist() for generator in (torch.default_generator, *more)]
    return [*own, random.getstate(), np.random.get_state()[1].tolist(), np.random.get_state()[2]]


def seed() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)


def make(backend, **options):
    seed()
    model = Noisy()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    return amp.training_step(model, noise, optimizer, dtype="bf16", backend=backend, **options)


def compiled(backend, **options):
    seed()
    return amp.compile(Noisy(), dtype="bf16", backend=backend, **options)


# Where nothing is compiled the rows of tests/behaviour compare what is drawn with eager.
@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        ("compile", "inductor"),
        pytest.param("step", "inductor", marks=pytest.mark.slow),  # which draws where "compile" does
    ],
)
def test_the_first_call_draws_what_later_ones_draw(kind, backend):
    if kind == "step":
        step = make(backend)
        run = lambda x: step(x)[1]  # noqa: E731
    else:
        run = compiled(backend)
    drawn = []
    for _ in range(3):  # the first time it is captured as well
        seed()
        drawn.append([run(X).detach().clone() for _ in range(3)] + [torch.rand(2)])
        after = states()
        drawn[-1].append(torch.tensor(after[0]))
    for later in drawn[1:]:
        assert all(torch.equal(mine, first) for mine, first in zip(later, drawn[0], strict=True))


class Refused(nn.Module):
    """Draws while it is captured, by every generator there is, and cannot be captured."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.inner, self.generator = nn.Linear(16, 4), generator

    def forward(self, x):
        random.random(), np.random.rand(), torch.empty(2).uniform_()
        raise RuntimeError("no")


@pytest.mark.parametrize("kind", ["step", "compile", "of another kind"])
def test_a_capture_that_fails_leaves_the_generators_too(kind):
    model = Refused(torch.Generator().manual_seed(1))
    step = amp.training_step(
        model, lambda m, x: m(x).sum(), torch.optim.SGD(model.parameters(), 0.1), dtype="bf16", backend="eager"
    )
    run = step if kind == "step" else amp.compile(model, dtype="bf16", backend="eager")
    seed()
    before = states(model.generator)
    if kind == "of another kind":
        with pytest.raises(RuntimeError), generators_kept({"m": [model]}):
            torch.rand(3, generator=model.generator)
            model(X)
    else:
        with pytest.raises((amp.AmpError, RuntimeError)):
            run(X)
    if kind == "of another kind":  # subgraphs are run by Python, and draw as they do so
        assert states(model.generator) == before


def test_generators_that_are_passed_are_found_wherever_they_are():
    one, two, three, four = (torch.Generator().manual_seed(number) for number in range(4))
    python, numpy, old = random.Random(1), np.random.default_rng(1), np.random.RandomState(1)
    module = nn.Sequential(nn.ReLU())
    module[0].held = {"deep": [two]}

    def closing(x, given=three):
        return torch.rand(1, generator=four)

    def drawn():
        tensors = [float(torch.rand((), generator=generator)) for generator in (one, two, three, four)]
        return [*tensors, python.random(), numpy.random(), old.rand()]

    with generators_kept((one, python), [numpy, {"old": old}], module, closing):
        first = drawn()
    assert drawn() == first and drawn() != first


def test_a_second_shape_and_a_report_draw_nothing_either():
    step = make("eager")
    seed()
    first = step(X)[1]
    seed()
    step(torch.ones(6, 16))  # recompiled
    seed()
    assert torch.equal(step(X)[1], first)
    before = states()
    step.nonfinite_report()
    F.relu(step.gradients()["inner.weight"])
    assert states() == before


@pytest.mark.compiles
def test_a_backward_that_is_compiled_when_it_first_runs_draws_nothing(monkeypatch):
    """Whatever the compiler draws: torch compiles a backward that needs no size at its first call."""
    import torch._inductor.compile_fx as compile_fx

    real, drawn = compile_fx.fx_codegen_and_compile, []

    def drawing(*args, **kwargs):
        drawn.append((torch.rand(3), random.random(), np.random.rand()))
        return real(*args, **kwargs)

    monkeypatch.setattr(compile_fx, "fx_codegen_and_compile", drawing)
    model = amp.compile(nn.Linear(4, 4), dtype="bf16")
    with torch._inductor.config.patch(force_disable_caches=True):
        before = states()
        loss = model(torch.ones(3, 4)).square().sum()
        compiled = len(drawn)
        assert compiled and states() == before
        loss.backward()
        assert len(drawn) > compiled and states() == before
