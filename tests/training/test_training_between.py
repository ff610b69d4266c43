"""What users do to model and optimizer between the calls of a training step, and what it must make of that."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from toys import classes, eager_step, mean_square, small, train_beside_torch

import amp_compiler as amp
from amp_compiler.errors import AmpError, CaptureError

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(32, 8, generator=GENERATOR)
Y = torch.randint(0, 4, (32,), generator=GENERATOR)
IMAGES = torch.randn(4, 3, 8, 8, generator=GENERATOR)
BACKENDS = pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])


def convnet() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 4))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), 1e-2)


def assert_same_weights(first, second, **tolerance):
    torch.testing.assert_close(
        list(first.parameters()), list(second.parameters()), **(tolerance or {"rtol": 0, "atol": 0})
    )


@pytest.mark.parametrize(("fused", "half"), [(True, False), (False, True)])
def test_steps_that_the_optimizer_makes_itself_are_seen(fused, half):
    """Fused optimizers of torch move no version counter."""
    model = small().bfloat16() if half else small()
    optimizer = torch.optim.SGD(model.parameters(), 1.0, fused=fused)
    step = eager_step(model, classes, optimizer)
    x = X.bfloat16() if half else X
    step(x, Y)
    with torch.autocast("cpu", torch.bfloat16):
        before = classes(model, x, Y)
    before.backward()
    optimizer.step()
    with torch.autocast("cpu", torch.bfloat16):  # another context: autocast keeps its casts inside one
        expected = classes(model, x, Y)
    assert float(before) - float(expected) > 0.03
    torch.testing.assert_close(step(x, Y), expected.detach(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("enabled", "accumulate"), [(False, 1), (True, 2)])
def test_a_model_may_become_channels_last(enabled, accumulate):
    results = []
    for convert in (False, True):
        model = convnet()
        step = eager_step(model, classes, adamw(model), enabled=enabled, accumulate=accumulate)
        for number in range(6):
            if number == 3 and convert:
                model.to(memory_format=torch.channels_last)
            step(IMAGES, Y[:4])
        results.append(model)
    assert_same_weights(*results, rtol=0, atol=2e-3 if enabled else 1e-4)


@pytest.mark.parametrize("kind", ["rmsprop", "kahan", "master"])
def test_a_checkpoint_of_another_memory_format_is_taken(kind):
    """Moments, masters and compensations have the strides of the model that was saved."""
    rules = {"version": 1, "extends": "default", "weights": {"master": "low", "rounding": "kahan"}}
    make = lambda p: (torch.optim.RMSprop if kind == "rmsprop" else torch.optim.AdamW)(p, 1e-2)  # noqa: E731
    options = {"rules": rules if kind == "kahan" else "default"}
    model = convnet().bfloat16() if kind == "master" else convnet()
    images = IMAGES.bfloat16() if kind == "master" else IMAGES
    optimizer = make(model.parameters())
    step = eager_step(model, classes, optimizer, **options)
    step(images, Y[:4])
    step(images, Y[:4])
    other = (convnet().bfloat16() if kind == "master" else convnet()).to(memory_format=torch.channels_last)
    other.load_state_dict(model.state_dict())
    resumed = make(other.parameters())
    again = eager_step(other, classes, resumed, **options)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(2):
        torch.testing.assert_close(again(images, Y[:4]), step(images, Y[:4]), rtol=2e-2, atol=1e-3)


@BACKENDS
def test_weights_that_are_slices_are_trained(backend):
    model = small()
    model[2].weight = nn.Parameter(torch.stack([model[2].weight.detach()] * 2, -1)[..., 0])
    assert not model[2].weight.is_contiguous()
    make = lambda p: torch.optim.AdamW(p, 1e-2)  # noqa: E731
    train_beside_torch(model, classes, [(X, Y)] * 4, make, tolerance={"rtol": 0, "atol": 1e-6}, backend=backend)


def test_weights_that_are_tied_later_have_one_gradient():
    def tie(number, model, optimizer):
        if number == 2:
            model[2].weight = model[0].weight

    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 8, bias=False))
    make = lambda p: torch.optim.AdamW(p, 1e-2)  # noqa: E731
    step, _ = train_beside_torch(model, mean_square, [(X,)] * 4, make, tie, {"rtol": 0, "atol": 1e-6})
    assert len(step.gradients()) == 1


def test_a_loss_without_a_gradient_and_odd_parameters_are_refused_by_name():
    model = small()
    step = eager_step(model, lambda m, x, y: classes(m, x, y).detach(), adamw(model))
    with pytest.raises(CaptureError, match=r"depends on no parameter.*detach nothing"):
        step(X, Y)
    with pytest.raises(AmpError, match="no finished call"):
        _ = step.grad_norm
    wide = small().double()
    for enabled in (False, True):
        with pytest.raises(AmpError, match=r"'0.weight' is float64.*\.float\(\)"):
            amp.training_step(wide, classes, adamw(wide), enabled=enabled)
    for options in ({"clip_norm": "1"}, {"clip_norm": True}, {"accumulate": True}):
        with pytest.raises(AmpError, match=next(iter(options))):
            amp.training_step(model, classes, adamw(model), **options)


class Sometimes(nn.Linear):
    """A weight that is read in 16 bits, or in FP32, as a Python value says."""

    wide = False

    def forward(self, x):
        with torch.autocast("cpu", enabled=False) if self.wide else contextlib.nullcontext():
            return super().forward(x)


def test_a_copy_that_a_graph_does_not_read_follows_its_master():
    model, x = Sometimes(8, 4), torch.randn(16, 8)
    step = eager_step(model, mean_square)
    for wide in (False, True, False, True, False):
        model.wide = wide
        fresh = copy.deepcopy(model)
        assert torch.equal(step(x), eager_step(fresh, mean_square)(x))
        assert all(map(torch.equal, model.parameters(), fresh.parameters()))
