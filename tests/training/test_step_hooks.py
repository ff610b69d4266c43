"""Hooks around `optimizer.step()`: all run as in a torch loop."""

import pytest
import torch
from torch.optim import optimizer as torch_optimizer
from toys import classes, eager_step, small, train_beside_torch

import amp_compiler as amp

X, Y = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3


def clamp(optimizer, args, kwargs):
    """As a Lipschitz constraint writes the weights behind every update."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.data.clamp_(-0.25, 0.25)


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.3, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.05),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.05),  # traced
}


CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.mark.parametrize(("name", "begin"), [("SGD", 0), ("AdamW", 2), ("NAdam", 2)])
def test_a_hook_behind_the_update_writes_the_weights_as_in_a_torch_loop(name, begin):
    def between(number, model, optimizer):
        if number == begin:
            optimizer.register_step_post_hook(clamp)

    step, _ = train_beside_torch(small(), classes, [(X, Y)] * 5, OPTIMIZERS[name], between, CLOSE)
    assert max(float(p.detach().abs().max()) for p in step.model.parameters()) <= 0.25


def test_it_runs_at_updates_alone_and_not_where_one_is_skipped():
    """As under `GradScaler`; in a batch that is gathered there is no update."""
    model, seen = small(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.register_step_post_hook(lambda one, args, kwargs: seen.append((one, args, kwargs)))
    step = eager_step(model, classes, optimizer, dtype="fp16", accumulate=2, loss_scale="dynamic")
    for number, x in enumerate([X, X, X, torch.full_like(X, torch.inf), X, X]):
        step(x, Y)
        assert len(seen) == [0, 1, 1, 1, 1, 2][number]
    assert seen[0] == (optimizer, (), {}) and int(step.skipped_steps) == 1


@pytest.mark.parametrize("when", ["pre", "post"])
def test_a_hook_of_all_optimizers_runs_too(when):
    seen = []
    register = getattr(torch_optimizer, f"register_optimizer_step_{when}_hook")
    handle = register(lambda one, args, kwargs: seen.append(one))
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    try:
        eager_step(model, classes, optimizer)(X, Y)
    finally:
        handle.remove()
    assert seen == [optimizer]


def sparsify(optimizer, args, kwargs):
    """Changes gradients, takes one away, and sets a learning rate."""
    for group in optimizer.param_groups:
        group["lr"] *= 0.9
        for number, parameter in enumerate(group["params"]):
            if parameter.grad is not None:
                parameter.grad.masked_fill_(parameter.grad.abs() < 0.01, 0).mul_(0.5)
                if number == 2:
                    parameter.grad = None


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_hook_before_the_update_finds_and_writes_gradients_as_in_a_torch_loop(name):
    def between(number, model, optimizer):
        if number == 2:
            optimizer.register_step_pre_hook(sparsify)

    step, _ = train_beside_torch(small(), classes, [(X, Y)] * 5, OPTIMIZERS[name], between, CLOSE)
    assert all(one.grad is None for one in step.model.parameters())
    assert "hooks that run before its steps" in step.execution


def test_with_a_loss_scale_it_finds_gradients_without_it_and_not_those_of_a_skipped_step():
    model = small()
    optimizer, seen = torch.optim.SGD(model.parameters(), 0.1), []
    optimizer.register_step_pre_hook(lambda *_: seen.append([p.grad.clone() for p in model.parameters()]))
    step = eager_step(model, classes, optimizer, dtype="fp16", loss_scale=1024.0)
    expected = torch.autograd.grad(classes(model, X, Y), list(model.parameters()))
    step(X, Y)
    step(X * float("inf"), Y)
    assert len(seen) == 1 and step.skipped_steps == 1
    for one, other in zip(seen[0], expected, strict=True):
        assert one.dtype is torch.float32 and (one - other).norm() < 1e-2 * other.norm()


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"clip_norm": 1.0}], ids=str)
def test_a_hook_before_the_update_is_refused_where_more_stands_between(options):
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = eager_step(model, classes, optimizer, **options)
    step(X, Y)
    handle = optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(
        amp.AmpError, match=f"SGD has hooks that run before its steps, and {next(iter(options))}= stands"
    ):
        step(X, Y)
    handle.remove()
    step(X, Y)


def test_other_arguments_for_a_step_that_is_never_called_are_refused():
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.register_step_pre_hook(lambda *_: ((None,), {}))
    step = eager_step(model, classes, optimizer)
    with pytest.raises(amp.AmpError, match="other arguments for step"):
        step(X, Y)
    assert all(p.grad is None for p in model.parameters())


def test_arguments_in_another_order_are_told():
    model = small()
    with pytest.raises(amp.AmpError, match=r"makes no optimizer.*model, loss_fn and optimizer in this order"):
        amp.training_step(model, torch.optim.SGD(model.parameters(), 0.1), classes)
