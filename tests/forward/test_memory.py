"""What is captured lives as long as its model, step or call, and takes no input for a weight."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from toys import eager_step, mean_square

import amp_compiler as amp

X = torch.ones(3, 4)


class Plain(nn.Linear):
    pass


class Broken(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y if y.sum() > 1e9 else -y


def forward(model: nn.Module) -> None:
    amp.compile(model, dtype="bf16", backend="eager")(X).sum().backward()


def inference(model: nn.Module) -> None:
    with torch.no_grad():
        amp.compile(model, dtype="bf16", backend="eager")(X)


def step(model: nn.Module) -> None:
    eager_step(model, mean_square)(X)


def plan(model: nn.Module) -> None:
    amp.explain(model, (X,), dtype="bf16")


USES = [(kind, use) for kind in (Plain, Broken) for use in (forward, inference, step)]


def used(kind: type[nn.Module], use: Callable[[nn.Module], Any]) -> weakref.ref[nn.Module]:
    model = kind(4, 4)
    use(model)
    return weakref.ref(model)


@pytest.mark.usefixtures("few_objects")
def test_models_are_freed() -> None:
    """Looked for once, as that takes a moment."""
    cases = [*USES, (Plain, plan)]  # a graph break has no plan to explain
    alive = [used(kind, use) for kind, use in cases]
    gc.collect()
    assert not [case for case, one in zip(cases, alive, strict=True) if one() is not None]


class Replacing(nn.Linear):
    """Gives its buffer another tensor at every call: an input may have the number of the one that is gone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache = self.cache + 1
        return super().forward(x)


def test_an_input_is_no_buffer_that_was_there() -> None:
    model = Replacing(4, 4)
    model.register_buffer("cache", torch.zeros(64, 4))
    compiled = amp.compile(model, dtype="bf16", backend="eager")
    with torch.no_grad():
        compiled(torch.zeros(2, 4))
        for number in range(10):
            x = torch.full((64, 4), float(number))
            torch.testing.assert_close(compiled(x), nn.Linear.forward(model, x), rtol=0.02, atol=0.1)
            named = {entry.target: entry.source.value for entry in compiled._amp_subgraphs.last[-1].captured.inputs}
            assert named["cache"] == "buffer" and named["args[0]"] == "user"
            del x
