"""What is written to weights between two calls of a step counts from the next one on, known to autograd or not."""

import copy
import logging

import pytest
import torch
from torch import nn
from toys import classes, sgd_step, small
from weight_writes import WRITES, reset

import amp_compiler as amp
from amp_compiler.ops import stale_copies
from amp_compiler.training import hidden_writes

X = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
Y = small()(X).argmax(1)  # what the model finds as it begins, so that every write raises the loss
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
LOSS_ERROR = 0.02  # four roundings to eight bits of activations up to 3, in a loss that moves by a fraction of them


def step_of(model, dtype, backend="eager", rate=0.1, loss=classes, **options):
    return sgd_step(model, loss, rate, dtype=dtype, **{"backend": backend, "loss_scale": None, **options})


def weights(model):
    return [parameter.detach().float().clone() for parameter in model.parameters()]


def branching(model, x, y):
    loss = classes(model, x, y)
    return loss if loss < 1e9 else loss * 2  # no one graph


def traced(model, loss, rate, **options):
    """By an optimizer without a fused update; as SGD, nothing hangs on the steps before."""
    return amp.training_step(model, loss, torch.optim.RMSprop(model.parameters(), rate, alpha=0.0), **options)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", [sgd_step, traced])
@pytest.mark.parametrize("loss_fn", [classes, branching])
@pytest.mark.parametrize("dtype", LOW)
def test_a_step_trains_on_what_was_written(dtype, loss_fn, make, backend, loops):
    """A model whose weights are set by what autograd knows of gives the same to the bit, and plain torch the same."""
    model, other = small(), small()
    step, again = (make(m, loss_fn, 0.01, dtype=dtype, backend=backend, loss_scale=None) for m in (model, other))
    for name, write in WRITES.items():
        reset(model)
        step(X, Y), step(X, Y)
        before = float(classes(model, X, Y).detach())
        write(model)
        plain = float(classes(model, X, Y).detach())
        assert abs(plain - before) > 2 * LOSS_ERROR, name
        other.load_state_dict(copy.deepcopy(model.state_dict()))
        loss = step(X, Y)
        assert abs(float(loss) - plain) < LOSS_ERROR * max(1, plain), name
        assert torch.equal(loss, again(X, Y)), name
        assert all(map(torch.equal, weights(model), weights(other))), name


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", LOW)
def test_the_masters_of_16_bit_weights_follow(dtype, loops):
    """An update goes from what was written; masters of other elements stay, so that small updates add up."""
    model = small().to(LOW[dtype])
    step = step_of(model, dtype)
    x = X.to(LOW[dtype])
    for name, write in WRITES.items():
        reset(model)
        step(x, Y), step(x, Y)
        write(model)
        reference = copy.deepcopy(model).float()
        classes(reference, X, Y).backward()
        step(x, Y)
        for parameter, plain in zip(model.parameters(), reference.parameters(), strict=True):
            wanted = plain.detach() - 0.1 * plain.grad
            # Half a step of the type for the weight and as much for its master; gradients of 16-bit activations.
            error = wanted.abs() * torch.finfo(LOW[dtype]).eps + 0.1 * 0.03
            assert (parameter.detach().float() - wanted).abs().le(error).all(), name


@pytest.mark.parametrize("dtype", LOW)
def test_small_updates_add_up_beside_a_write_to_another_element(dtype):
    model = nn.Linear(2, 1, bias=False).to(LOW[dtype])
    model.weight.data.fill_(1.0)
    step = step_of(model, dtype, rate=1.0, loss=lambda m, x: -(m(x).sum()))
    x = torch.tensor([[2.0**-12, 0.0]]).to(LOW[dtype])
    for _ in range(64):  # each less than half of what moves 1.0 in BF16, and no more than that in FP16
        step(x)
        model.weight.data[0, 1] = -model.weight.data[0, 1]
    assert model.weight.tolist() == [[1.0 + 2.0**-6, 1.0]]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("last", [False, True])
def test_a_write_amid_an_accumulation_counts_at_the_next_call(dtype, last):
    model, other = small(), small()
    steps = [step_of(one, dtype, accumulate=2) for one in (model, other)]
    for _ in range(4 + last):
        assert torch.equal(steps[0](X, Y), steps[1](X, Y))
    for parameter, same in zip(model.parameters(), other.parameters(), strict=True):
        parameter.data.mul_(-2)
        with torch.no_grad():
            same.mul_(-2)
    for _ in range(3):
        assert torch.equal(steps[0](X, Y), steps[1](X, Y))
        assert all(map(torch.equal, weights(model), weights(other)))


def test_weights_stored_low_alone_are_what_was_written():
    model = small()
    step = step_of(model, "bf16", rules={"version": 1, "extends": "default", "weights": {"master": "low"}}, rate=0.0)
    step(X, Y)
    for parameter in model.parameters():
        parameter.data.mul_(-2)
    wanted = float(classes(copy.deepcopy(model).float(), X, Y).detach())
    assert abs(float(step(X, Y)) - wanted) < LOSS_ERROR


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_an_error_of_rounding_that_belongs_to_another_weight_is_left_out(backend):
    """What Kahan's summation keeps beside a weight that was large moves none that is small now."""
    model = nn.Linear(2, 1, bias=False).bfloat16()
    model.weight.data.fill_(256.0)
    rules = {"version": 1, "extends": "default", "weights": {"master": "low", "rounding": "kahan"}}
    step = step_of(model, "bf16", backend, 1.0, lambda m, x: -(m(x).sum()), rules=rules)
    x = torch.tensor([[0.5, 0.5]]).bfloat16()
    step(x)  # 256.5, of which 0.5 is the error
    assert model.weight.tolist() == [[256.0, 256.0]]
    model.weight.data[0, 0] = 2.0**-6
    step(x)
    assert model.weight.tolist() == [[0.5 + 2.0**-6, 256.0]]
    step(x), step(x)
    assert model.weight.tolist() == [[1.5 + 2.0**-6, 258.0]]


def test_a_watch_lasts_as_long_as_what_it_watches(monkeypatch):
    model, watches = small().bfloat16(), []

    class Counted(stale_copies.CopyWatch):
        def __init__(self, *arguments):
            watches.append(self)
            super().__init__(*arguments)

    monkeypatch.setattr(hidden_writes, "CopyWatch", Counted)
    step = step_of(model, "bf16")
    x = X.bfloat16()
    step(x, Y), step(x, Y)
    before = len(watches)
    for _ in range(3):
        step._detector.read()  # as at every call of a step in subgraphs
        step(x, Y)
    assert len(watches) == before
    model[0].weight.data = model[0].weight.data.clone()
    step(x, Y)
    assert len(watches) == before + 1
    state = step._optimizers[0].state[model[0].weight]
    state["master"] = state["master"].clone()
    step(x, Y)
    step(x, Y)
    assert before + 2 <= len(watches) <= before + 3


@pytest.mark.sweep(2)
@pytest.mark.parametrize("turned", [False, True])
def test_convolutions_of_both_layouts(turned, loops):
    def built():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 20, 3), nn.Flatten(), nn.Linear(320, 4))
        return model.to(memory_format=torch.channels_last) if turned else model

    model, other = built(), built()
    steps = [step_of(one, "bf16") for one in (model, other)]
    images = torch.randn(8, 3, 8, 8)
    labels = Y[:8]
    for _ in range(4):
        assert torch.equal(steps[0](images, labels), steps[1](images, labels))
        for parameter, same in zip(model.parameters(), other.parameters(), strict=True):
            parameter.data.mul_(-1.5)
            with torch.no_grad():
                same.mul_(-1.5)


def test_the_first_such_weight_is_named_once(caplog):
    model = small()
    step = step_of(model, "bf16")
    step(X, Y), step(X, Y)
    with caplog.at_level(logging.WARNING, "amp_compiler"):
        with torch.no_grad():
            model[0].weight.add_(1)
        step(X, Y)
        assert not caplog.records
        for _ in range(2):
            model[2].bias.data.add_(1)
            step(X, Y)
    assert [record.getMessage().partition("'")[2].partition("'")[0] for record in caplog.records] == ["2.bias"]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_nothing_is_found_where_nothing_was_written(caplog, optimizer, dtype, backend):
    model = small()
    step = amp.training_step(model, classes, optimizer(model.parameters(), 0.01), dtype=dtype, backend=backend)
    with caplog.at_level(logging.WARNING, "amp_compiler"):
        for _ in range(5):
            step(X, Y)
        model[0].weight.data[0, 0], model[0].bias.data[0] = float("nan"), float("inf")
        step(X, Y)
        caplog.clear()
        for _ in range(3):
            step(X, Y)
    assert not [record for record in caplog.records if "version counter" in record.getMessage()]


@pytest.mark.sweep(6)
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "16 bits"])
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_the_update_finds_what_the_look_has_missed(optimizer, half, dtype, backend, monkeypatch, caplog):
    """It goes on from what was written, of a 16-bit weight too, whose master knows nothing of it, and names it once."""
    monkeypatch.setattr(stale_copies.CopyWatch, "look", lambda self, turn=0: [])
    x, model = X, small()
    if half:
        x, model = x.to(LOW[dtype]), model.to(LOW[dtype])
    step = amp.training_step(model, classes, optimizer(model.parameters(), 2.0**-6), dtype=dtype, backend=backend)
    step(x, Y), step(x, Y)
    assert not caplog.records
    for weight, value in ((model[2].weight, 3.0), (model[0].weight, -3.0)):
        weight.data[0, 1] = value
        step(x, Y)
        assert abs(float(weight[0, 1].detach()) - value) < 0.2  # ten times the rate, and how the type rounds
    assert [one.getMessage().partition("'")[2].partition("'")[0] for one in caplog.records] == ["2.weight"]


class Bounded(nn.Sequential):
    """A forward that writes its weights, known to autograd or not."""

    def forward(self, x):
        self[0].weight.data.clamp_(-0.1, 0.1)
        with torch.no_grad():
            self[2].weight.copy_(nn.functional.normalize(self[2].weight))
        return super().forward(x)


@pytest.mark.parametrize("dtype", LOW)
def test_a_weight_that_the_forward_writes_is_read_as_it_was_written(dtype):
    model = Bounded(*small())
    plain = copy.deepcopy(model)
    step, optimizer = step_of(model, dtype, rate=1.0), torch.optim.SGD(plain.parameters(), 1.0)
    for _ in range(3):
        loss = classes(plain, X, Y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert abs(float(step(X, Y)) - float(loss)) < LOSS_ERROR * float(loss)
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=LOSS_ERROR, atol=LOSS_ERROR)
