"""`amp.training_step` with torch's optimizers that have no fused update: their own code, traced into the step."""

import copy
import io

import pytest
import torch
from torch import nn
from torch import optim as O
from toys import classes, eager_step, train_beside_torch
from training_optimizers import OPTIMIZERS, X, Y, models, split, tensors_of


def mixed(name):
    model, _ = models(name)
    optimizer = OPTIMIZERS[name](model.parameters())
    return model, optimizer, eager_step(model, classes, optimizer, clip_norm=1.0)


# A loop in FP32 is compared for every one; these stand for the kinds of state: buffers, counts, factors, products.
KINDS = ("rmsprop, all options", "radam, decoupled", "asgd", "rprop", "adafactor", "muon")


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in KINDS)) for name in OPTIMIZERS]
)
def test_a_step_that_is_not_finite_changes_nothing_and_a_saved_run_goes_on_bit_for_bit(name):
    model, optimizer, step = mixed(name)
    step(X, Y)
    before, bad = tensors_of(model, optimizer), X.clone()
    bad[3, 2] = float("inf")
    step(bad, Y)
    assert int(step.skipped_steps) == 1 and all(map(torch.equal, before, tensors_of(model, optimizer)))
    step(X, Y)
    after = tensors_of(model, optimizer)
    assert not torch.equal(after[0], before[0]) and not any(torch.isnan(tensor).any() for tensor in after)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict(), step.state_dict()), file)
    for _ in range(3):
        step(X, Y)
    expected = tensors_of(model, optimizer)
    file.seek(0)
    saved, saved_optimizer, saved_step = torch.load(file)
    resumed, other, again = mixed(name)
    resumed.load_state_dict(saved)
    other.load_state_dict(copy.deepcopy(saved_optimizer))  # torch takes the tensors over as they are
    again.load_state_dict(saved_step)
    # What was captured before a load works on what is loaded.
    model.load_state_dict(saved)
    optimizer.load_state_dict(saved_optimizer)
    step.load_state_dict(saved_step)
    for _ in range(3):
        again(X, Y)
        step(X, Y)
    for got in (tensors_of(resumed, other), tensors_of(model, optimizer)):
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    "name", ["adafactor", "asgd", *(pytest.param(name, marks=pytest.mark.slow) for name in ("rmsprop", "nadam"))]
)
def test_a_scheduler_changes_the_rate_without_a_recapture_and_other_numbers_with_one(name, builds):
    def between(number, model, optimizer):
        optimizer.param_groups[0]["lr"] *= 0.5
        if number == 4:
            assert len(builds) == 1
            optimizer.param_groups[0]["weight_decay"] = 0.2

    tolerance = {"rtol": 1e-6, "atol": 1e-6}
    train_beside_torch(models(name)[0], classes, [(X, Y)] * 6, OPTIMIZERS[name], between, tolerance)
    assert len(builds) == 2


def test_a_rate_that_is_a_tensor_is_followed():
    def between(number, model, optimizer):
        optimizer.param_groups[0]["lr"].mul_(0.5)

    make = lambda p: O.RMSprop(p, torch.tensor(1e-2))  # noqa: E731
    train_beside_torch(models()[0], classes, [(X, Y)] * 4, make, between, {"rtol": 1e-6, "atol": 1e-6})


def test_lookups_that_are_sparse_to_torch_train_with_an_optimizer_that_needs_dense_gradients():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4))
    step = eager_step(model, lambda m, ids: m(ids).square().mean(), O.AdamW(model.parameters(), 0.1))
    losses = [float(step(torch.tensor([[1, 2, 2], [0, 5, 1]]))) for _ in range(4)]
    assert losses[-1] < 0.5 * losses[0]


def two_groups(parameters):
    matrices, vectors = [p for p in parameters if p.dim() == 2], [p for p in parameters if p.dim() != 2]
    return O.RMSprop([{"params": matrices, "lr": 1e-3, "momentum": 0.9}, {"params": vectors, "alpha": 0.9}], 1e-2)


def two_optimizers(model):
    matrices, vectors = split(model)
    return {"matrices": O.Muon(matrices, 1e-2), "vectors": O.AdamW(vectors, 1e-2)}


def test_groups_clipping_and_accumulation():
    tolerance = {"rtol": 1e-5, "atol": 2e-6}
    make = lambda p: two_groups(list(p))  # noqa: E731
    train_beside_torch(models()[0], classes, [(X, Y)] * 8, make, tolerance=tolerance, accumulate=2, clip_norm=0.05)


def test_a_dict_of_optimizers():
    model, reference = models()
    result, plain = two_optimizers(model), two_optimizers(reference)
    step = eager_step(model, classes, result, enabled=False)
    for _ in range(4):
        step(X, Y)
        classes(reference, X, Y).backward()
        for one in plain.values():
            one.step()
            one.zero_grad()
    torch.testing.assert_close(list(model.parameters()), list(reference.parameters()), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["nadam", "muon"])
def test_under_inductor_16_bit_copies_are_written_and_bad_steps_skipped(name, compiler):
    model, _ = models(name)
    optimizer = OPTIMIZERS[name](model.parameters())
    step = eager_step(model, classes, optimizer, dtype="fp16", loss_scale=64.0, backend="inductor")
    first = float(step(X, Y))
    for _ in range(10):
        loss = step(X, Y)
    assert float(loss) < first
    bad = X.clone()
    bad[0, 0] = float("nan")
    before = tensors_of(model, optimizer)
    step(bad, Y)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors_of(model, optimizer), strict=True))
    weights = {id(parameter): parameter.detach().half() for parameter in model.parameters()}
    low_weights = {key: copies[torch.float16] for key, copies in step._state.low_weights._copies.items()}
    assert low_weights and all(torch.equal(low, weights[key]) for key, low in low_weights.items())
