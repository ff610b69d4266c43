"""16-bit weights and FP32 masters in a whole run: resume, skipped steps, groups, GANs, and what is refused."""

import io

import numpy as np
import pytest
import torch
from torch import nn
from toys import classes, eager_step
from training_weights import LOW, OPTIMIZERS, X, Y, everything, net, rules, same

import amp_compiler as amp

MODES = {
    "fp32": ("amsgrad", "bf16", "default", False),
    "masters, sgd": ("momentum", "fp16", "default", True),
    "masters, adam": ("amsgrad", "bf16", "default", True),
    "nearest, sgd": ("momentum", "fp16", rules(), False),
    "stochastic, sgd": ("nesterov", "bf16", rules("stochastic"), False),
    "stochastic, adam": ("adamw", "fp16", rules("stochastic"), False),
    "kahan, adam": ("amsgrad", "bf16", rules("kahan"), False),
    "kahan, 16-bit in": ("adamw", "bf16", rules("kahan"), True),
}


def setup(mode: str, seed: int = 0, backend: str = "eager", **options):
    name, dtype, inputs, half = MODES[mode]
    model = net(seed)
    x = X
    if half:
        model, x = model.to(LOW[dtype]), X.to(LOW[dtype])
    optimizer = OPTIMIZERS[name](model.parameters())
    step = eager_step(
        model, classes, optimizer, rules=inputs, dtype=dtype, loss_scale="dynamic", backend=backend, **options
    )
    return model, optimizer, step, x


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("mode", "warm"), [(mode, number % 2 == 0) for number, mode in enumerate(MODES)])
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


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("mode", "poison"), [(mode, ("inf", "nan")[number % 2]) for number, mode in enumerate(MODES)])
def test_a_skipped_step_changes_nothing_but_the_scale(mode, poison):
    model, optimizer, step, x = setup(mode, clip_norm=1.0)
    step(x, Y), step(x, Y)
    before, random = everything(model, optimizer), step.state_dict()["amp_compiler"].get("rounding")
    scale, skipped = float(step.loss_scale), int(step.skipped_steps)
    step(x * float(poison), Y)
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


@pytest.mark.parametrize("mode", ["masters, sgd", "kahan, adam"])
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
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 16), nn.Linear(16, 16), nn.Linear(16, 7, bias=False))
    model[2].weight = model[0].weight
    tokens, optimizer = torch.arange(7), torch.optim.SGD(model.parameters(), 0.5)
    step = eager_step(model, classes, optimizer, rules=rules(), dtype="fp16", loss_scale=64.0)
    first = float(step(tokens, tokens))
    assert model[2].weight is model[0].weight and model[2].weight.dtype is torch.float16
    model[1].weight.requires_grad_(False)
    frozen = model[1].weight.detach().clone()
    losses = [float(step(tokens, tokens)) for _ in range(10)]
    assert losses[-1] < first and torch.equal(frozen, model[1].weight)


def test_plain_fp32_ignores_the_section():
    model, reference = net(), net()
    for inputs, one in ((rules("stochastic"), model), ("default", reference)):
        optimizer = OPTIMIZERS["momentum"](one.parameters())
        step = eager_step(one, classes, optimizer, rules=inputs, enabled=False)
        step(X, Y), step(X, Y)
    assert same(list(model.parameters()), list(reference.parameters()))
    assert all(p.dtype is torch.float32 for p in model.parameters())


@pytest.mark.parametrize(
    ("convert", "options", "text"),
    [
        ("half", {"enabled": False}, "plain FP32, and parameter 'a.weight' is float16"),
        ("bfloat16", {"dtype": "fp16"}, "is bfloat16 and the low type is float16; pass dtype='bf16'"),
        ("float", {"rules": {"version": 1, "weights": {"rounding": "kahan"}}}, "write weights: {master: low"),
        ("float", {"rules": {"version": 1, "weights": {"overflow": "skip"}}}, "master: low, overflow: skip"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(convert, options, text):
    model = getattr(net(), convert)()
    with pytest.raises(amp.AmpError, match=text):
        eager_step(model, classes, **options)


@pytest.mark.parametrize(("inputs", "column"), [("default", "master"), (rules(), "exp_avg")])
def test_state_that_was_narrowed_before_the_step_was_made_is_refused(inputs, column):
    model = net().half()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    eager_step(model, classes, optimizer, rules=inputs, dtype="fp16")(X.half(), Y)
    late = net().half()
    narrow = OPTIMIZERS["adamw"](late.parameters())
    narrow.load_state_dict(optimizer.state_dict())
    step = eager_step(late, classes, narrow, rules=inputs, dtype="fp16")
    with pytest.raises(amp.AmpError, match=f"holds '{column}' in float16"):
        step(X.half(), Y)
