"""`amp.training_step` against plain torch loops and against `torch.autocast` with `GradScaler`."""

import copy

import pytest
import torch
from torch import nn
from toys import classes, eager_step, train_beside_torch
from training_optimizers import X, Y, models

import amp_compiler as amp

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.1, weight_decay=1e-2),
    "nesterov": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 1e-2, weight_decay=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    "amsgrad": lambda p: torch.optim.AdamW(p, 1e-2, amsgrad=True),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_plain_fp32_equals_a_torch_loop(name):
    """SGD to the bit."""
    tolerance = {"rtol": 0, "atol": 1e-6 if name.startswith(("adam", "amsgrad")) else 0}
    train_beside_torch(models()[0], classes, [(X, Y)] * 12, OPTIMIZERS[name], tolerance=tolerance)


def test_clipping_is_torchs():
    model, reference = models()
    step = eager_step(model, classes, enabled=False, clip_norm=0.05)
    loss = step(X, Y)
    assert not loss.requires_grad and model.a.weight.grad is None and model.unused.weight.grad is None
    plain = torch.optim.SGD(reference.parameters(), 0.1)
    classes(reference, X, Y).backward()
    gradients = {n: p.grad.clone() for n, p in reference.named_parameters() if p.grad is not None}
    norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
    plain.step()
    assert torch.allclose(step.grad_norm, norm, rtol=1e-6)
    for got, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(got, wanted, rtol=0, atol=1e-7)
    assert set(step.gradients()) == set(gradients)
    assert all(torch.allclose(step.gradients()[n], g, rtol=1e-6, atol=1e-8) for n, g in gradients.items())


def weighted(model, x, gain):
    return (model(x) * gain).square().mean()


def dampened(disturb) -> None:
    """Dampened SGD beside torch's; `disturb` gets number, model and optimizer before each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False))
    gains = [0.0 if disturb is _gradients_of_zero_first and number == 0 else 1.0 for number in range(4)]
    batches = [(torch.ones(2 + number % 2, 4), torch.tensor(gain)) for number, gain in enumerate(gains)]  # two programs
    make = lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.5)  # noqa: E731
    train_beside_torch(model, weighted, batches, make, disturb, {"rtol": 1e-6, "atol": 1e-7})  # the order of a few sums


def _momentum_of_zeros(number, model, optimizer):
    if number == 0:
        for parameter in model.parameters():
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _gradients_of_zero_first(number, model, optimizer):
    pass


def _saved_and_loaded(number, model, optimizer):
    if number == 1:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _begun_anew(number, model, optimizer):
    if number > 1:  # twice in one program
        optimizer.state.clear()


_LATER = lambda number, model, optimizer: model[0].requires_grad_(number > 1)  # noqa: E731
DISTURBED = (_momentum_of_zeros, _gradients_of_zero_first, _LATER, _saved_and_loaded, _begun_anew)


@pytest.mark.parametrize("disturb", DISTURBED, ids=lambda disturb: disturb.__name__.strip("_"))
def test_whether_there_is_a_momentum_decides_what_is_dampened(disturb):
    dampened(disturb)


def test_a_group_with_the_momentum_of_some_of_its_parameters_is_refused():
    def disturb(number, model, optimizer):
        if number == 2:  # its program was made with the momentum of both
            optimizer.state[model[0].weight].pop("momentum_buffer")

    with pytest.raises(amp.AmpError, match="'momentum_buffer' for some parameters of a group"):
        dampened(disturb)


@pytest.mark.parametrize("made_anew", [False, True])
def test_a_first_step_that_is_skipped_leaves_the_first_one_to_come(made_anew):
    def run(skips: bool) -> list[torch.Tensor]:
        model, _ = models()
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        step = eager_step(model, classes, optimizer, dtype="fp16", loss_scale=128.0)
        if skips:
            step(X * float("inf"), Y)
        if made_anew:
            saved = copy.deepcopy(optimizer.state_dict())
            assert not saved["state"]  # under torch's keys, and not before the first update
            optimizer = OPTIMIZERS["momentum"](model.parameters())
            optimizer.load_state_dict(saved)
            step = eager_step(model, classes, optimizer, dtype="fp16", loss_scale=128.0)
        for _ in range(3):
            step(X, Y)
        assert all(set(state) == {"momentum_buffer"} for state in optimizer.state.values())
        assert {*map(tuple, optimizer.state_dict()["state"].values())} == {("momentum_buffer",)}
        return [p.detach().clone() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True), strict=True))


def test_the_next_call_updates_where_fewer_are_gathered():
    """As at the end of an epoch: the average is over all of `accumulate`, and the next calls gather anew."""
    model = nn.Linear(8, 5)
    plain = copy.deepcopy(model)
    reference = torch.optim.SGD(plain.parameters(), 0.1)
    step = eager_step(model, classes, accumulate=4, enabled=False)
    for gathered in (2, 1, 4):
        before = model.weight.clone()
        for number in range(gathered):
            assert torch.equal(model.weight, before)
            if number == gathered - 1 < 3:
                step.update_next()
            rows = slice(8 * number, 8 * number + 8)
            step(X[rows], Y[rows])
            (classes(plain, X[rows], Y[rows]) / 4).backward()
        reference.step()
        reference.zero_grad()
        torch.testing.assert_close(model.weight, plain.weight)
