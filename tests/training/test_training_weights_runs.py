"""16-bit weights and FP32 masters in a whole run: resume, skipped steps, groups, GANs, and what is refused."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from torch import nn
from toys import classes
from training_weights import LOW, OPTIMIZERS, X, Y, everything, net, rules, same

import amp_compiler as amp

MODES = {
    "fp32, sgd": ("momentum", "fp16", "default", False),
    "fp32, adam": ("amsgrad", "bf16", "default", False),
    "masters, sgd": ("momentum", "fp16", "default", True),
    "masters, adam": ("amsgrad", "bf16", "default", True),
    "nearest, sgd": ("momentum", "fp16", rules(), False),
    "nearest, adam": ("adamw", "fp16", rules("nearest"), False),
    "stochastic, sgd": ("nesterov", "bf16", rules("stochastic"), False),
    "stochastic, adam": ("adamw", "fp16", rules("stochastic"), False),
    "kahan, sgd": ("momentum", "bf16", rules("kahan"), False),
    "kahan, adam": ("amsgrad", "bf16", rules("kahan"), False),
    "kahan, 16-bit in": ("adamw", "bf16", rules("kahan"), True),
}


def setup(mode: str, seed: int = 0, backend: str = "eager", **options):
    name, dtype, given, half = MODES[mode]
    model = net(seed)
    x = X
    if half:
        model, x = model.to(LOW[dtype]), X.to(LOW[dtype])
    optimizer = OPTIMIZERS[name](model.parameters())
    step = amp.training_step(
        model, classes, optimizer, rules=given, dtype=dtype, loss_scale="dynamic", backend=backend, **options
    )
    return model, optimizer, step, x


ONCE = ("masters, adam", "stochastic, sgd")  # what of the rest a second variant repeats is slow


def each_with(quick, more):
    """Every mode with one value, and some with another."""
    return [
        pytest.param(mode, value, marks=[pytest.mark.slow] * (value is more and mode not in ONCE))
        for mode in MODES
        for value in (quick, more)
    ]


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("mode", "warm"), each_with(True, False))
def test_a_resumed_run_is_the_same_to_the_bit(mode, warm):
    model, optimizer, step, x = setup(mode)
    for _ in range(3):
        step(x, Y)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), step.state_dict()], file)
    losses = [step(x, Y) for _ in range(3)]
    file.seek(0)
    weights, state, scale = torch.load(file)
    again, optimizer2, step2, _ = setup(mode, seed=5)
    if warm:  # a step that has run, and converted its weights, loads as well as a fresh one
        step2(x, Y)
    step2.load_state_dict(scale)
    optimizer2.load_state_dict(state)
    again.load_state_dict(weights)
    assert all(torch.equal(step2(x, Y), loss) for loss in losses)
    assert same(everything(model, optimizer), everything(again, optimizer2))
    assert step.state_dict() == step2.state_dict()


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("mode", "poison"), each_with(float("inf"), float("nan")))
def test_a_skipped_step_changes_nothing_but_the_scale(mode, poison):
    model, optimizer, step, x = setup(mode, clip_norm=1.0)
    step(x, Y), step(x, Y)
    before, random = everything(model, optimizer), step.state_dict()["amp_compiler"].get("rounding")
    scale, skipped = float(step.loss_scale), int(step.skipped_steps)
    step(x * poison, Y)
    assert same(before, everything(model, optimizer))
    assert step.state_dict()["amp_compiler"].get("rounding") == random
    assert (float(step.loss_scale), int(step.skipped_steps)) == (scale / 2, skipped + 1)
    step(x, Y)
    assert not same(before, everything(model, optimizer))
    assert (random is None) or step.state_dict()["amp_compiler"]["rounding"] == [random[0], random[1] + 1]


@pytest.mark.parametrize(
    "mode",
    [*(pytest.param(mode, marks=pytest.mark.slow) for mode in ("masters, sgd", "stochastic, adam")), "kahan, adam"],
)
def test_the_compiled_step_does_the_same(mode, compiler):
    results = []
    for backend in ("eager", "inductor"):
        model, optimizer, step, x = setup(mode, backend=backend, clip_norm=1.0)
        losses = [float(step(x, Y)) for _ in range(8)]
        before, random = everything(model, optimizer), step.state_dict()["amp_compiler"].get("rounding")
        step(x * float("inf"), Y)
        assert same(before, everything(model, optimizer))
        assert step.state_dict()["amp_compiler"].get("rounding") == random
        results.append((losses, random))
    assert np.allclose(results[0][0], results[1][0], rtol=0.02)
    assert results[0][1] == results[1][1]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("mode", ["masters, sgd", "nearest, sgd", "kahan, adam"])
def test_accumulated_batches_are_averaged(mode):
    model, optimizer, step, x = setup(mode, accumulate=2)
    whole, optimizer2, once, _ = setup(mode)
    before = [p.detach().float() for p in model.parameters()]
    low = [p.detach().clone() for p in model.parameters()]
    step(x, Y)
    assert all(torch.equal(a.to(p.dtype), p) for a, p in zip(low, model.parameters(), strict=True))
    step(x, Y), once(x, Y)
    # The sum of two equal gradients halved is the gradient.
    assert same(everything(model, optimizer), everything(whole, optimizer2))
    assert any(not torch.equal(a, b.float()) for a, b in zip(before, model.parameters(), strict=True))
    assert set(step.gradients()) == {name for name, _ in model.named_parameters()}


def test_tied_and_later_frozen_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(7, 16), nn.Linear(16, 7, bias=False)
            self.head.weight = self.embedding.weight
            self.mix = nn.Linear(16, 16)

        def forward(self, tokens):
            return self.head(self.mix(self.embedding(tokens)))

    torch.manual_seed(0)
    model = Tied()
    tokens = torch.arange(7)
    step = amp.training_step(
        model, classes, torch.optim.SGD(model.parameters(), 0.5), rules=rules(), dtype="fp16", loss_scale=64.0,
        backend="eager",
    )  # fmt: skip
    first = float(step(tokens, tokens))
    assert model.head.weight is model.embedding.weight and model.head.weight.dtype is torch.float16
    model.mix.weight.requires_grad_(False)
    frozen = model.mix.weight.detach().clone()
    losses = [float(step(tokens, tokens)) for _ in range(10)]
    assert losses[-1] < first and torch.equal(frozen, model.mix.weight)


def test_plain_fp32_ignores_the_section():
    model, reference = net(), net()
    for given, one in ((rules("stochastic"), model), ("default", reference)):
        optimizer = OPTIMIZERS["momentum"](one.parameters())
        step = amp.training_step(one, classes, optimizer, rules=given, enabled=False, backend="eager")
        step(X, Y), step(X, Y)
    assert same(list(model.parameters()), list(reference.parameters()))
    assert all(p.dtype is torch.float32 for p in model.parameters())


@pytest.mark.parametrize(
    ("convert", "options", "text"),
    [
        ("half", {"enabled": False}, "plain FP32, and parameter 'a.weight' is float16"),
        ("bfloat16", {"dtype": "fp16"}, "is bfloat16 and the low type is float16; pass dtype='bf16'"),
        ("float", {"rules": {"version": 1, "weights": {"rounding": "kahan"}}}, "write weights: {master: low"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(convert, options, text):
    model = getattr(net(), convert)()
    with pytest.raises(amp.AmpError, match=text):
        amp.training_step(model, classes, torch.optim.SGD(model.parameters(), 0.1), backend="eager", **options)


@pytest.mark.parametrize(("given", "column"), [("default", "master"), (rules(), "exp_avg")])
def test_state_that_was_narrowed_before_the_step_was_made_is_refused(given, column):
    model = net().half()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    amp.training_step(model, classes, optimizer, rules=given, dtype="fp16", backend="eager")(X.half(), Y)
    late = net().half()
    narrow = OPTIMIZERS["adamw"](late.parameters())
    narrow.load_state_dict(optimizer.state_dict())
    step = amp.training_step(late, classes, narrow, rules=given, dtype="fp16", backend="eager")
    with pytest.raises(amp.AmpError, match=f"holds '{column}' in float16"):
        step(X.half(), Y)
