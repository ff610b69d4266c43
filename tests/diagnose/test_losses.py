"""`loss_fn=` means the same to all that look at a model, and options that would be passed over are refused."""

import pytest
import torch
from torch import nn
from toys import sgd_step

import amp_compiler as amp

X, Y = torch.linspace(-1, 1, 12).view(3, 4), torch.ones(3, 2)


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (3, "loss_fn is a int"),
        (lambda model: model(X), "takes 1 positional argument but|calls a function with wrong arguments"),
        (lambda model, x: model(x).nope(), "nope"),
        (lambda model, x: x.sum(), "no gradient|no parameter"),
    ],
)
def test_a_loss_function_that_is_none_is_refused(loss_fn, message):
    model = nn.Linear(4, 2)
    for find in (lambda: amp.find_nonfinite(model, X, dtype="fp16", loss_fn=loss_fn),
                 lambda: amp.tune(model, [X], dtype="fp16", loss_fn=loss_fn)):  # fmt: skip
        with pytest.raises(amp.AmpError, match=message):
            find()


def test_options_that_would_be_passed_over_are_refused():
    model = nn.Linear(4, 2)
    step = sgd_step(model, lambda model, x: model(x).sum(), dtype="fp16")
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


@pytest.mark.parametrize("batch", [(X, Y), {"y": Y.numpy(), "x": X}], ids=["by position", "by name"])
def test_one_meaning_of_loss_fn_everywhere(batch):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)

    def loss_fn(model, x, y):
        loss = (model(x) - y).square().mean()
        return loss, {"accuracy": loss}

    assert not amp.find_nonfinite(model, batch, dtype="fp16", loss_fn=loss_fn)
    spoilt = amp.find_nonfinite(model, batch, dtype="fp16", loss_fn=loss_fn, loss_scale=1e38)
    assert set(spoilt.parameters) == {"weight", "bias"}
    assert amp.tune(model, [batch], dtype="fp16", loss_fn=loss_fn, tolerance=0.05).error <= 0.05
    assert amp.profile(model, [batch], dtype="fp16", loss_fn=loss_fn).of("weight gradient")
