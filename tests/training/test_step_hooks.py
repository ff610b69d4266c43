"""Hooks around `optimizer.step()`: those behind it run as in a torch loop, those before it are refused."""

import contextlib

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
def test_a_hook_of_all_optimizers_runs_behind_it_or_is_refused(when):
    seen, model = [], small()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = eager_step(model, classes, optimizer, accumulate=1)
    register = getattr(torch_optimizer, f"register_optimizer_step_{when}_hook")
    handle = register(lambda one, args, kwargs: seen.append(one))
    try:
        with pytest.raises(amp.AmpError, match="hooks that run before") if when == "pre" else contextlib.nullcontext():
            step(X, Y)
    finally:
        handle.remove()
    assert seen == [optimizer][: when == "post"]


@pytest.mark.parametrize("begin", [0, 1])
def test_a_hook_before_the_update_is_refused(begin):
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = eager_step(model, classes, optimizer)
    for _ in range(begin):
        step(X, Y)
    before = [p.detach().clone() for p in model.parameters()]
    handle = optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(amp.AmpError, match="SGD has hooks that run before its steps"):
        step(X, Y)
    assert all(map(torch.equal, before, model.parameters()))
    handle.remove()
    step(X, Y)


def test_arguments_in_another_order_are_told():
    model = small()
    with pytest.raises(amp.AmpError, match=r"makes no optimizer.*model, loss_fn and optimizer in this order"):
        amp.training_step(model, torch.optim.SGD(model.parameters(), 0.1), classes)
