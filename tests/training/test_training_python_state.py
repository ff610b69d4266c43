"""A step does with Python what eager training does: attributes, numbers that change, parameters beside the model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_compiler as amp
from amp_compiler.errors import HookError

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


class Experts(nn.Module):
    """A loss, a state and a buffer beside the result."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out, self.gain = nn.Linear(4, 4), nn.Linear(4, 2), 1.0
        self.aux_loss: Any = 0.0
        self.state: Tensor | None = None
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x) if self.state is None else self.fc(x) + 0.1 * self.state
        self.aux_loss = h.square().mean()
        self.state = h.detach().mean(0)
        self.mean = 0.5 * self.mean + 0.5 * self.state
        return self.out(h) * self.gain


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


Made = tuple[Callable[..., Any], list[Tensor]]


def compared(make: Callable[[nn.Module], Made], steps: int = 4, between: Any = None, **options: Any) -> list[Any]:
    """Losses of a step are those of eager training; gives the model, the tensors beside it and the step.

    Args:
        make: the loss function and the parameters beside the model.
        steps: number of steps.
        between: called with the model and the number of steps before each.
        options: of the step.
    """
    found = []
    for ours in (True, False):
        torch.manual_seed(1)
        model = Experts()
        loss_fn, beside = make(model)
        optimizer = torch.optim.SGD([*model.parameters(), *beside], lr=0.1, momentum=0.9)
        step = amp.training_step(model, loss_fn, optimizer, dtype="bf16", **{"backend": "eager", **options})
        losses = []
        for number in range(steps):
            if between is not None:
                between(model, number)
            if ours:
                losses.append(step(X).item())
                continue
            loss = loss_fn(model, X)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found.append((losses, model, beside, step))
    (losses, model, beside, step), (expected, twin, others, _) = found
    assert losses == pytest.approx(expected, rel=0.03, abs=0.01)
    for a, b in zip([*model.parameters(), *beside], [*twin.parameters(), *others], strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.01)
    for a, b in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.01)
    return [model, beside, step]


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=[pytest.mark.compiles, pytest.mark.slow])])
def test_attributes_are_written_at_every_step(backend: str) -> None:
    log: dict[str, Any] = {}

    def make(model: nn.Module) -> Made:
        def loss_fn(model: Experts, x: Tensor) -> Tensor:
            loss = loss_of(model, x)
            log["loss"] = loss
            return loss + model.aux_loss

        return loss_fn, []

    model, _, step = compared(make, backend=backend)
    assert model.state.shape == (4,) and not model.aux_loss.requires_grad
    step(X)
    program = step._choice.programs[-1]  # the one that reads a state
    assert len(program.compiled.run._batch) == 2  # batch and state move from step to step: a CUDA graph has to know
    total = log["loss"] + model.aux_loss
    torch.testing.assert_close(total, step(X) * 0 + total)  # both are real tensors of this step
    assert type(model.state) is Tensor and type(log["loss"]) is Tensor


def test_a_number_in_a_closure_may_change() -> None:
    weight, table = [1.0], {"power": 2}

    def make(model: nn.Module) -> Made:
        weight[0], table["power"] = 1.0, 2
        return lambda model, x: weight[0] * model(x).pow(table["power"]).mean(), []

    def between(model: nn.Module, number: int) -> None:
        weight[0], table["power"] = 1.0 + number // 2, 2 + 2 * (number // 3)
        model.gain = 1.0 if number < 1 else 0.5

    *_, step = compared(make, steps=4, between=between)
    count = step._choice.compilations
    step(X)
    assert step._choice.compilations == count


def learned_weights(model: nn.Module) -> Made:
    spread = nn.Parameter(torch.zeros(2))
    return lambda model, x: (torch.exp(-spread) * model(x).square().mean(0) + spread).sum(), [spread]


def learned_leaf(model: nn.Module) -> Made:
    spread = torch.zeros(2, requires_grad=True)
    return lambda model, x: (torch.exp(-spread) * model(x).square().mean(0) + spread).sum(), [spread]


def criterion(model: nn.Module) -> Made:
    head = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
    return lambda model, x: head(model(x)).square().mean(), list(head.parameters())


class Trainer:
    def __init__(self, model: nn.Module) -> None:
        self.model, self.scales = model, [nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))]

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        return (self.scales[0] * model(x)).square().mean() + (self.scales[1] - 2).square()


def method(model: nn.Module) -> Made:
    trainer = Trainer(model)
    return trainer.loss, trainer.scales


@pytest.mark.parametrize("make", [learned_weights, learned_leaf, criterion, method])
def test_parameters_beside_the_model_are_trained(make: Callable[[nn.Module], Made]) -> None:
    _, beside, step = compared(make)
    names = {learned_weights: "spread", learned_leaf: "spread", criterion: "head.0.weight", method: "scales_0"}
    assert names[make] in step.gradients()
    assert all(parameter.grad is None for parameter in beside)
    step(X[:2])
    count = step._choice.compilations
    step(X)
    assert step._choice.compilations == count  # another batch had it captured anew, and the first one's is still there


def test_a_parameter_that_joins_an_optimizer_later_is_trained() -> None:
    model, late = Experts(), nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = amp.training_step(model, lambda m, x: late * loss_of(m, x), optimizer, dtype="bf16", backend="eager")
    step(X)
    assert late.item() == 1.0
    optimizer.add_param_group({"params": [late]})
    step(X)
    assert late.item() < 1.0


def test_a_teacher_in_a_closure_is_read_as_it_is_now() -> None:
    teacher = nn.Linear(4, 2)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            goal = teacher(x)
        return (model(x) - goal).square().mean()

    model = Experts()
    step = amp.training_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.0), dtype="bf16", backend="eager")
    before = step(X)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(10)
    assert step(X) > before + 10
    teacher.weight = nn.Parameter(torch.zeros(2, 4))
    twin = copy.deepcopy(model)
    torch.testing.assert_close(step(X), loss_fn(twin, X).detach(), rtol=0.03, atol=0.01)


def test_hooks_on_parameters_are_run_or_named() -> None:
    model, seen = Experts(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = amp.training_step(model, loss_of, optimizer, dtype="bf16", backend="eager")
    step(X)
    model.out.weight.register_hook(lambda gradient: seen.append(gradient))
    before = model.out.weight.detach().clone()
    try:
        step(X)
    except amp.CaptureError as error:
        assert not isinstance(error, HookError)  # so that what runs hooks may take over
        assert "parameter 'out.weight' has a hook" in str(error)
        assert torch.equal(model.out.weight, before)
    else:
        assert seen
