"""The loss scale of a step: set by hand, shared by steps, loaded from other kinds of steps, ended where it is stuck."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from toys import eager_step

import amp_compiler as amp

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(6, 8, generator=GENERATOR)
Y = torch.randn(6, 4, generator=GENERATOR)
LABELS = torch.tensor([0, 3, 1, 2, 0, 1])
OPS = ("mse_loss", "mean", "add", "mul")
LOW = {
    "version": 1,
    "extends": "default",
    "rules": [{"match": {"op": f"aten.{op}"}, "precision": "low"} for op in OPS],
}
# Losses whose last ops are FP16, with rules that ask for it or by a cast of the user's.
TAILS = {
    "a mean": lambda m, x: m(x).half().square().mean(),
    "a mean square by rules": lambda m, x: F.mse_loss(m(x), Y),
    "a cross entropy in half": lambda m, x: F.cross_entropy(m(x).half(), LABELS),
    "numbers": lambda m, x: F.mse_loss(m(x), Y).half() * 0.5 + m(x).square().mean().half() / 3,
    "one with a weight": lambda m, x: (m(x).half().square().mean() * m.bias[:1].half().exp()).sum(),
}


def mean_square(model, x, y):
    return F.mse_loss(model(x), y)


def make(loss=mean_square, **options):
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    return model, eager_step(model, loss, **{"dtype": "fp16", **options})


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", list(TAILS))
def test_the_seed_alone_does_not_overflow(name):
    model, step = make(TAILS[name], rules=LOW)
    expected = torch.autograd.grad(TAILS[name](model, X).float(), list(model.parameters()))
    assert float(step.loss_scale) == 65536.0  # of FP32, not of FP16
    step(X)
    assert int(step.skipped_steps) == 0
    result = step.gradients()
    torch.testing.assert_close(list(result.values()), list(expected), rtol=1e-2, atol=2e-3)


def test_a_bf16_loss_is_left_as_it_was():
    _, step = make(lambda m, x: m(x).bfloat16().square().mean(), rules=LOW, dtype="bf16", loss_scale=1024.0)
    step(X)
    assert "bf16[] = aten._to_copy.default(loss_scale" in step.stages["fold_loss_scale"].text


def test_the_next_scale_can_be_set():
    _, step = make()
    step.loss_scale = 1024.0
    assert float(step.loss_scale) == 1024.0
    step(X, Y)
    programs = len(step._choice.programs)
    step.loss_scale = torch.tensor(2.0)
    step(X * float("inf"), Y)
    assert float(step.loss_scale) == 1.0 and len(step._choice.programs) == programs
    assert step.state_dict()["scale"] == 1.0


def test_a_static_scale_can_be_set():
    model, step = make(loss_scale=128.0)
    step(X, Y)
    before = copy.deepcopy(model.state_dict())
    step.loss_scale = 8.0
    step(X, Y)
    gradients = step.gradients()
    assert float(step.loss_scale) == 8.0
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name] - 0.1 * gradients[name])
    step.load_state_dict(step.state_dict())
    assert float(step.loss_scale) == 8.0


@pytest.mark.parametrize(
    ("options", "scale", "text"),
    [
        ({}, "much", "'much' cannot be set; assign one number"),
        ({}, True, "True cannot be set"),
        ({}, float("nan"), "outside of"),
        ({"loss_scale": amp.DynamicLossScale(min=1.0, max=1024.0)}, 4096.0, "outside of 1 to 1024; .*max="),
        ({"loss_scale": "norm_adaptive"}, 1000.0, "no power of two; assign 512"),
        ({"loss_scale": None}, 2.0, "mode 'none'; make the step with loss_scale='dynamic'"),
    ],
    ids=str,
)  # fmt: skip
def test_a_scale_that_cannot_be_had_is_refused(options, scale, text):
    _, step = make(**options)
    before = float(step.loss_scale)
    with pytest.raises(amp.AmpError, match=text):
        step.loss_scale = scale
    assert float(step.loss_scale) == before


def test_one_object_given_to_two_steps_is_one_scale():
    scale = amp.DynamicLossScale(init_scale=256.0, growth_interval=2)
    (_, first), (_, second), (_, other) = make(loss_scale=scale), make(loss_scale=scale), make(loss_scale="dynamic")
    first(X * float("inf"), Y)
    assert float(first.loss_scale) == float(second.loss_scale) == 128.0
    first(X, Y), second(X, Y)  # two finite steps, one of each
    assert float(first.loss_scale) == float(second.loss_scale) == 256.0
    second.loss_scale = 64.0
    assert float(first.loss_scale) == 64.0 and int(second.skipped_steps) == 1
    assert float(other.loss_scale) == 65536.0 and int(other.skipped_steps) == 0
    loaded = other.state_dict()
    first.load_state_dict(loaded)  # with other factors
    assert second.state_dict() == first.state_dict() and float(second.loss_scale) == 65536.0
    second(X * float("inf"), Y)
    assert float(first.loss_scale) == 32768.0


def test_a_copy_of_the_object_is_another_scale():
    scale = amp.DynamicLossScale(init_scale=256.0)
    _, step = make(loss_scale=scale)
    step(X * float("inf"), Y)
    for each in (copy.copy(scale), copy.deepcopy(scale), pickle.loads(pickle.dumps(scale))):
        assert each == scale and hash(each) == hash(scale) and repr(each) == repr(scale)
        assert float(make(loss_scale=each)[1].loss_scale) == 256.0


def test_states_of_steps_with_and_without_mixed_precision_load_into_each_other():
    (_, plain), (_, mixed), (_, fixed) = make(enabled=False), make(), make(loss_scale=512.0)
    for step in (plain, mixed, fixed):
        step(X, Y)
    mixed.loss_scale = 4096.0
    saved = {name: step.state_dict() for name, step in {"plain": plain, "mixed": mixed, "fixed": fixed}.items()}
    plain.load_state_dict(saved["mixed"])
    assert float(plain.loss_scale) == 1.0
    plain(X, Y)
    mixed.load_state_dict(saved["plain"])  # nothing was scaled there, so that this one starts as it always does
    assert float(mixed.loss_scale) == 65536.0
    mixed(X, Y)
    mixed(X * float("inf"), Y)
    assert float(mixed.loss_scale) == 32768.0  # with its own factors
    mixed.load_state_dict(saved["fixed"])
    assert float(mixed.loss_scale) == 512.0
    fixed.load_state_dict(saved["plain"])
    assert float(fixed.loss_scale) == 512.0
    _, adaptive = make(loss_scale="norm_adaptive")
    adaptive.load_state_dict(saved["plain"])
    adaptive(X, Y)
    assert float(adaptive.loss_scale) > 1.0
