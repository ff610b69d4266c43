"""Capturing and compiling use up no random numbers: a run draws what it draws, whenever it is captured."""

from __future__ import annotations

import contextlib
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from toys import eager_step

import amp_compiler as amp

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


def states() -> list[object]:
    return [
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
        np.random.get_state()[2],
    ]


def seed() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)


def make():
    seed()
    model = Noisy()
    return eager_step(model, noise, torch.optim.SGD(model.parameters(), 0.0))


class Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.generator, self.python = nn.Linear(16, 4), torch.Generator(), random.Random(1)

    def forward(self, x):
        return self.inner(x) + torch.rand(4, generator=self.generator) + self.python.random()


def test_a_capture_draws_nothing_from_generators_of_the_models_own():
    model = Draws()
    before = model.generator.get_state(), model.python.getstate()
    step = amp.training_step(model, lambda m, x: m(x).sum(), torch.optim.SGD(model.parameters(), 0.1), dtype="bf16")
    for capture in (step.graph_for, lambda x: amp.explain(model, (x,))):
        with contextlib.suppress(amp.CaptureError):  # Dynamo breaks its graph there
            capture(X)
        assert torch.equal(model.generator.get_state(), before[0]) and model.python.getstate() == before[1]


def test_a_second_shape_and_a_report_draw_nothing_either():
    step = make()
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
def test_what_compiles_draws_nothing_and_the_first_call_draws_what_later_ones_draw(monkeypatch):
    """Whatever the compiler draws, of a backward too, which torch compiles at its first call.

    Where nothing is compiled the rows of tests/behaviour compare what is drawn with eager.
    """
    import torch._inductor.compile_fx as compile_fx

    real, compiled = compile_fx.fx_codegen_and_compile, []

    def drawing(*args, **kwargs):
        compiled.append((torch.rand(3), random.random(), np.random.rand()))
        return real(*args, **kwargs)

    monkeypatch.setattr(compile_fx, "fx_codegen_and_compile", drawing)
    model, drawn = amp.compile(Noisy(), dtype="bf16"), []
    with torch._inductor.config.patch(force_disable_caches=True):
        for call in range(2):
            seed()
            y = model(X)
            drawn.append([y.detach().clone(), model(X).detach().clone(), torch.rand(2)])
            before, built = states(), len(compiled)
            y.square().sum().backward()
            assert states() == before and built and (len(compiled) > built) == (call == 0)
    assert all(map(torch.equal, *drawn))
