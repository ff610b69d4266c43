"""A loss function taken apart into what it gives the model and what it makes of the output."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import amp_compiler as amp
from amp_compiler.diagnose.losses import LossCall, arguments

X, Y = torch.linspace(-1, 1, 12).view(3, 4), torch.ones(3, 2)


def test_what_the_loss_computes_before_and_behind_the_model_counts():
    model = nn.Linear(4, 2)

    def loss_fn(model, x, y):
        return (model(x * 2) - y).square().mean() + model.weight.sum()

    call = LossCall(model, loss_fn, arguments((X, Y)))
    assert torch.equal(call.model_args[0][0], X * 2) and not call.model_args[1]
    assert torch.equal(call.of(model(*call.model_args[0])), loss_fn(model, X, Y))


def test_batches_by_name_and_arguments_by_name():
    model = nn.Linear(4, 2)
    call = LossCall(model, lambda model, x, y: (model(input=x) - y).sum(), arguments({"y": Y.numpy(), "x": X}))
    assert call.model_args == ((), {"input": X}) and torch.equal(call.of(Y), torch.zeros(()))


def test_an_exception_of_the_loss_functions_own_is_not_mistaken_for_the_call():
    def careful(model, x):
        try:
            return model(x).sum()
        except ValueError:
            return x.sum()

    assert LossCall(nn.Linear(4, 2), careful, arguments(X)).model_args == ((X,), {})


def test_losses_that_do_not_call_the_model_or_call_it_twice():
    model = nn.Linear(4, 2)
    with pytest.raises(amp.AmpError, match="does not call the model"):
        LossCall(model, lambda model, x: x.sum(), arguments(X))
    twice = LossCall(model, lambda model, x: (model(x) - model(-x)).sum(), arguments(X))
    with pytest.raises(amp.AmpError, match="more than once"):
        twice.of(Y)
    for find in (lambda loss_fn: amp.find_nonfinite(model, X, dtype="fp16", loss_fn=loss_fn),
                 lambda loss_fn: amp.tune(model, [X], dtype="fp16", loss_fn=loss_fn)):  # fmt: skip
        with pytest.raises(amp.AmpError, match="does not call the model"):
            find(lambda model, x: x.sum())


@pytest.mark.parametrize(
    ("loss_fn", "told"),
    [
        (3, "loss_fn is a int"),
        (lambda model: model(X), "loss_fn raises TypeError"),
        (lambda model, x: x / 0 // model(x).nope(), "loss_fn raises AttributeError"),
        (lambda model, x: [][0], "loss_fn raises IndexError"),
    ],
)
def test_what_a_loss_function_raises_is_told_with_its_line(loss_fn, told):
    model = nn.Linear(4, 2)
    for find in (lambda: amp.find_nonfinite(model, X, dtype="fp16", loss_fn=loss_fn),
                 lambda: amp.tune(model, [X], dtype="fp16", loss_fn=loss_fn)):  # fmt: skip
        with pytest.raises(amp.AmpError, match=told):
            find()


def test_options_that_would_be_passed_over_are_refused():
    model = nn.Linear(4, 2)
    step = amp.training_step(
        model, lambda model, x: model(x).sum(), torch.optim.SGD(model.parameters(), 0.1), dtype="fp16", backend="eager"
    )
    compiled = amp.compile(model, dtype="fp16", backend="eager")
    every = (amp.find_nonfinite, lambda one, x, **options: amp.profile(one, [x], **options),
             lambda one, x, **options: amp.tune(one, [x], **options))  # fmt: skip
    for look in every:
        with pytest.raises(amp.AmpError, match="loss_fn= is given with a training step"):
            look(step, X, loss_fn=lambda model, x: model(x).sum())
        with pytest.raises(amp.AmpError, match="loss_scale= is given with a training step"):
            look(step, X, loss_scale=2.0)
        with pytest.raises(amp.AmpError, match="dtype= is given with a training step"):
            look(step, X, dtype="bf16")
        with pytest.raises(amp.AmpError, match="dtype= is given with a compiled module"):
            look(compiled, X, dtype="bf16")
        for wrong in ("high", 0, float("nan"), float("inf"), True):
            with pytest.raises(amp.AmpError, match="is no scale"):
                look(model, X, loss_fn=lambda model, x: model(x).sum(), loss_scale=wrong)
        with pytest.raises(amp.AmpError, match=r"loss_scale=8\.0 without a loss"):
            look(model, X, loss_scale=8.0)
    for look in every[:2]:
        with pytest.raises(amp.AmpError, match="rules= is given with a compiled module"):
            look(compiled, X, rules="safe")


def test_a_loss_with_something_beside_it():
    model = nn.Linear(4, 2)
    call = LossCall(model, lambda model, x: (model(x).sum(), {"accuracy": 1.0}), arguments(X))
    assert torch.equal(call.of(Y), Y.sum())


def test_random_numbers_of_the_loss_stay_as_they_are():
    model, before = nn.Linear(4, 2), torch.get_rng_state()
    call = LossCall(model, lambda model, x: model(x + torch.randn(3, 4)).sum(), arguments(X))
    again = LossCall(model, call.loss_fn, call.batch)
    assert torch.equal(torch.get_rng_state(), before) and torch.equal(call.model_args[0][0], again.model_args[0][0])


def test_one_meaning_of_loss_fn_everywhere():
    torch.manual_seed(0)
    model = nn.Linear(4, 2)

    def loss_fn(model, x, y):
        return (model(x) - y).square().mean()

    assert not amp.find_nonfinite(model, (X, Y), dtype="fp16", loss_fn=loss_fn)
    spoilt = amp.find_nonfinite(model, (X, Y), dtype="fp16", loss_fn=loss_fn, loss_scale=1e38)
    assert set(spoilt.parameters) == {"weight", "bias"}
    assert amp.tune(model, [(X, Y)], dtype="fp16", loss_fn=loss_fn, tolerance=0.05).error <= 0.05
    assert amp.profile(model, [(X, Y)], dtype="fp16", loss_fn=loss_fn).of("weight gradient")
