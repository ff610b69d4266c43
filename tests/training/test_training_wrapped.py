"""Optimizers and models that other libraries have put something around."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from toys import eager_step

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


def trained(wrap) -> list[torch.Tensor]:
    model = plain()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    step = eager_step(model, loss_fn, wrap(optimizer), clip_norm=1.0)
    losses = [step(X) for _ in range(3)]
    assert len(optimizer.state) == 4  # the state is that of the real optimizer
    return [*losses, *model.parameters()]


@pytest.mark.usefixtures("own_accelerate")
@pytest.mark.parametrize("wrap", [LightningLike, accelerated])
def test_a_wrapped_optimizer_is_unwrapped(wrap):
    assert all(map(torch.equal, trained(wrap), trained(lambda optimizer: optimizer)))


def test_compiled_models_in_a_nest_are_unwrapped():
    """As those that are the whole model are."""
    model, other = plain(), amp.compile(nn.Linear(8, 8), dtype="bf16")
    nest = {"net": torch.compile(model, backend="eager"), "other": other}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = eager_step(nest, lambda nest, x: nest["other"](nest["net"](x)).square().mean(), optimizer)
    before = model[0].weight.detach().clone()
    step(X)
    assert type(step.model["net"]) is nn.Sequential and type(step.model["other"]) is nn.Linear
    assert not torch.equal(before, model[0].weight)
    assert type(eager_step(other, loss_fn).model) is nn.Linear


def test_a_parallel_model_of_one_device_is_what_is_in_it_and_over_several_it_is_named():
    model = nn.DataParallel(plain())
    step = eager_step(model, loss_fn)
    step(X)
    assert step.model is model.module
    model.device_ids = [0, 1]
    with pytest.raises(amp.AmpError, match=r"DataParallel.*model\.module"):
        amp.training_step(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1))
