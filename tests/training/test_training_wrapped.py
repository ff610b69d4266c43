"""Optimizers and models that other libraries have put something around."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import amp_compiler as amp

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def loss_fn(model, x):
    return model(x).square().mean()


class LightningLike(torch.optim.Optimizer):
    """As Lightning does it: class and `__dict__` are those of an optimizer, and `.optimizer` is the real one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.__dict__ = {k: v for k, v in optimizer.__dict__.items() if k not in ("step", "__del__")}
        self._optimizer = optimizer

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer

    def step(self, closure=None, **kwargs):
        raise AssertionError("the training step makes the update itself")


def accelerated(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    import accelerate

    return accelerate.Accelerator(cpu=True).prepare(optimizer)


def trained(wrap_model, wrap_optimizer) -> tuple[list[torch.Tensor], nn.Module]:
    model = plain()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    step = amp.training_step(
        wrap_model(model), loss_fn, wrap_optimizer(optimizer), dtype="bf16", backend="eager", clip_norm=1.0
    )
    losses = [step(X) for _ in range(3)]
    assert len(optimizer.state) == 4  # the state is that of the real optimizer
    return [*losses, *[parameter.detach() for parameter in model.parameters()]], step.model


@pytest.mark.usefixtures("own_accelerate")
@pytest.mark.parametrize("wrap", [LightningLike, accelerated])
def test_a_wrapped_optimizer_is_unwrapped(wrap):
    expected, _ = trained(lambda model: model, lambda optimizer: optimizer)
    found, _ = trained(lambda model: model, wrap)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_compiled_models_are_unwrapped():
    expected, _ = trained(lambda model: model, lambda optimizer: optimizer)
    for wrap in (lambda model: torch.compile(model, backend="eager"), lambda model: amp.compile(model, dtype="fp16")):
        found, model = trained(wrap, lambda optimizer: optimizer)
        assert type(model) is nn.Sequential
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_compiled_models_in_a_nest_are_unwrapped():
    model = plain()
    step = amp.training_step(
        {"net": torch.compile(model, backend="eager"), "other": amp.compile(nn.Linear(8, 8), dtype="bf16")},
        lambda nest, x: nest["other"](nest["net"](x)).square().mean(),
        torch.optim.SGD(model.parameters(), 0.1),
        dtype="bf16",
        backend="eager",
    )
    before = copy.deepcopy(model)
    step(X)
    assert type(step.model["net"]) is nn.Sequential and type(step.model["other"]) is nn.Linear
    assert not torch.equal(before[0].weight, model[0].weight)


def test_a_parallel_model_of_one_device_is_what_is_in_it_and_over_several_it_is_named():
    model = nn.DataParallel(plain())
    step = amp.training_step(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1), dtype="bf16", backend="eager")
    step(X)
    assert step.model is model.module
    model.device_ids = [0, 1]
    with pytest.raises(amp.AmpError, match=r"DataParallel.*model\.module"):
        amp.training_step(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1))
