"""`amp.training_step` with optimizers that have no fused update: their own code, traced into the step."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch import optim as O

import amp_compiler as amp
from amp_compiler.errors import AmpError, LoweringError

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(32, 8, generator=GENERATOR)
Y = torch.randint(0, 5, (32,), generator=GENERATOR)
STEPS = 10


class Net(nn.Module):
    """A matrix, vectors, a scalar, a buffer that moves, and a layer without a gradient."""

    def __init__(self, biases: bool = True) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16, affine=biases)
        self.b, self.unused = nn.Linear(16, 5, bias=biases), nn.Linear(3, 3, bias=biases)
        if biases:
            self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.b(F.relu(self.norm(self.a(x)))) * (self.gain if hasattr(self, "gain") else 1)


def loss_fn(model, x, y):
    return F.cross_entropy(model(x), y)


OPTIMIZERS = {
    "rmsprop": lambda p: O.RMSprop(p, 1e-2),
    "rmsprop, all options": lambda p: O.RMSprop(p, 1e-2, momentum=0.5, centered=True, weight_decay=0.01, maximize=True),
    "radam": lambda p: O.RAdam(p, 1e-2),
    "radam, decoupled": lambda p: O.RAdam(p, 1e-2, weight_decay=0.1, decoupled_weight_decay=True),
    "nadam": lambda p: O.NAdam(p, 1e-2, weight_decay=0.01),
    "adamax": lambda p: O.Adamax(p, 1e-2, weight_decay=0.01),
    "adadelta": lambda p: O.Adadelta(p, 1.0, weight_decay=0.01),
    "adagrad": lambda p: O.Adagrad(p, 1e-2, lr_decay=0.1, initial_accumulator_value=0.1),
    "asgd": lambda p: O.ASGD(p, 1e-2, t0=3, weight_decay=0.01),
    "rprop": lambda p: O.Rprop(p, 1e-3),
    "adafactor": lambda p: O.Adafactor(p, 1e-2, weight_decay=0.1),
    "muon": lambda p: O.Muon(p, 1e-2),
}
# The step of these is the one of torch's CPU loop to the last bit; the others compute bias corrections in another order
# where they are capturable, or take a norm, and the last bit of a step of 0.01 is below 1e-8.
EXACT = ("rmsprop", "rmsprop, all options", "adadelta", "rprop", "asgd", "muon")


def models(name="") -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Net(biases=name != "muon")
    return model, copy.deepcopy(model)


def states(optimizer):
    return {
        (number, key): value
        for number, entries in optimizer.state_dict()["state"].items()
        for key, value in entries.items()
    }


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_plain_fp32_equals_a_torch_loop(name):
    model, reference = models(name)
    optimizer, plain = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](reference.parameters())
    step = amp.training_step(model, loss_fn, optimizer, backend="eager", enabled=False)
    for _ in range(STEPS):
        step(X, Y)
        plain.zero_grad()
        loss_fn(reference, X, Y).backward()
        plain.step()
    tolerance = {"rtol": 0, "atol": 0} if name in EXACT else {"rtol": 1e-6, "atol": 1e-6}
    for got, wanted in zip(model.state_dict().values(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(got, wanted, **tolerance)
    ours, theirs = states(optimizer), states(plain)
    assert set(ours) == set(theirs) and len(ours) > 0
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, **tolerance)
    assert optimizer.param_groups[0]["params"][0].grad is None
    assert {k: v for k, v in optimizer.param_groups[0].items() if k != "params"} == {
        k: v for k, v in plain.param_groups[0].items() if k != "params"
    }


def tensors_of(model, optimizer):
    held = [value for value in states(optimizer).values() if isinstance(value, torch.Tensor)]
    return [tensor.detach().clone() for tensor in (*model.state_dict().values(), *held)]


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_a_step_with_a_non_finite_gradient_changes_nothing(name):
    model, _ = models(name)
    optimizer = OPTIMIZERS[name](model.parameters())
    step = amp.training_step(model, loss_fn, optimizer, dtype="bf16", clip_norm=1.0, backend="eager")
    step(X, Y)
    bad = X.clone()
    bad[3, 2] = float("inf")
    before = tensors_of(model, optimizer)
    step(bad, Y)
    assert int(step.skipped_steps) == 1
    assert all(torch.equal(a, b) for a, b in zip(before, tensors_of(model, optimizer), strict=True))
    step(X, Y)
    after = tensors_of(model, optimizer)
    assert int(step.skipped_steps) == 1 and not any(torch.isnan(tensor).any() for tensor in after)
    assert not torch.equal(after[0], before[0])


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_a_saved_run_goes_on_bit_for_bit(name):
    model, _ = models(name)
    optimizer = OPTIMIZERS[name](model.parameters())
    step = amp.training_step(model, loss_fn, optimizer, dtype="bf16", backend="eager")
    for _ in range(3):
        step(X, Y)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict(), step.state_dict()), file)
    for _ in range(3):
        step(X, Y)
    expected = tensors_of(model, optimizer)
    file.seek(0)
    saved, saved_optimizer, saved_step = torch.load(file)
    resumed, _ = models(name)
    resumed.load_state_dict(saved)
    other = OPTIMIZERS[name](resumed.parameters())
    other.load_state_dict(copy.deepcopy(saved_optimizer))  # torch takes the tensors over as they are
    again = amp.training_step(resumed, loss_fn, other, dtype="bf16", backend="eager")
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


@pytest.fixture
def builds(monkeypatch):
    """How often a step was captured."""
    import amp_compiler.training as training

    seen, real = [], training.build_step
    monkeypatch.setattr(training, "build_step", lambda *arguments: (seen.append(1), real(*arguments))[1])
    return seen


@pytest.mark.parametrize("name", ["rmsprop", "nadam", "adafactor", "asgd"])
def test_a_scheduler_changes_the_rate_without_a_recapture_and_other_numbers_with_one(name, builds):
    model, reference = models(name)
    optimizer, plain = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](reference.parameters())
    step = amp.training_step(model, loss_fn, optimizer, backend="eager", enabled=False)
    step(X, Y)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (optimizer, plain)]
    for number in range(6):
        plain.zero_grad()
        loss_fn(reference, X, Y).backward()
        plain.step()
        if number:
            step(X, Y)
        if number == 3:
            assert len(builds) == 1
            optimizer.param_groups[0]["weight_decay"] = plain.param_groups[0]["weight_decay"] = 0.2
        for scheduler in schedulers:
            scheduler.step()
    assert len(builds) == 2
    for got, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)


def test_a_rate_that_is_a_tensor_is_followed():
    model, reference = models()
    rate = torch.tensor(1e-2)
    step = amp.training_step(model, loss_fn, O.RMSprop(model.parameters(), rate), backend="eager", enabled=False)
    plain = O.RMSprop(reference.parameters(), 1e-2)
    for number in range(4):
        step(X, Y)
        plain.zero_grad()
        loss_fn(reference, X, Y).backward()
        plain.step()
        rate.mul_(0.5)
        plain.param_groups[0]["lr"] = 1e-2 * 0.5 ** (number + 1)
    for got, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-7)


def split(model):
    return [p for p in model.parameters() if p.dim() == 2], [p for p in model.parameters() if p.dim() != 2]


def two_groups(model):
    matrices, vectors = split(model)
    return O.RMSprop([{"params": matrices, "lr": 1e-3, "momentum": 0.9}, {"params": vectors, "alpha": 0.9}], 1e-2)


def two_optimizers(model):
    matrices, vectors = split(model)
    return {"matrices": O.Muon(matrices, 1e-2), "vectors": O.AdamW(vectors, 1e-2)}


@pytest.mark.parametrize("make", [two_groups, two_optimizers])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_groups_dicts_clipping_and_accumulation(make, accumulate):
    model, reference = models()
    optimizer, plain = make(model), make(reference)
    step = amp.training_step(
        model, loss_fn, optimizer, clip_norm=0.05, accumulate=accumulate, backend="eager", enabled=False
    )
    plains = list(plain.values()) if isinstance(plain, dict) else [plain]
    for number in range(4 * accumulate):
        step(X, Y)
        (loss_fn(reference, X, Y) / accumulate).backward()
        if (number + 1) % accumulate == 0:
            nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
            for one in plains:
                one.step()
                one.zero_grad()
    for got, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["rmsprop", "adafactor"])
def test_under_inductor_the_step_does_what_it_does_node_by_node(name):
    found = []
    for backend in ("eager", "inductor"):
        model, _ = models(name)
        optimizer = OPTIMIZERS[name](model.parameters())
        step = amp.training_step(model, loss_fn, optimizer, backend=backend, enabled=False)
        for _ in range(5):
            step(X, Y)
        found.append(tensors_of(model, optimizer))
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["nadam", "muon"])
def test_under_inductor_16_bit_copies_are_written_and_bad_steps_skipped(name):
    model, _ = models(name)
    optimizer = OPTIMIZERS[name](model.parameters())
    step = amp.training_step(model, loss_fn, optimizer, dtype="fp16", loss_scale=64.0, backend="inductor")
    first = float(step(X, Y))
    for _ in range(10):
        loss = step(X, Y)
    assert float(loss) < first
    bad = X.clone()
    bad[0, 0] = float("nan")
    before = tensors_of(model, optimizer)
    step(bad, Y)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors_of(model, optimizer), strict=True))
    lows = {id(copy): copy for copy in step._lows._copies.values()}
    weights = [parameter.detach().half() for parameter in model.parameters()]
    assert lows and all(any(torch.equal(low, weight) for weight in weights) for low in lows.values())


def test_16_bit_parameters_get_masters_and_fp32_state():
    model, reference = models()
    model, reference = model.bfloat16(), reference.bfloat16().float()
    model.norm.float()
    optimizer, plain = O.NAdam(model.parameters(), 1e-2), O.NAdam(reference.parameters(), 1e-2)
    step = amp.training_step(model, loss_fn, optimizer, dtype="bf16", backend="eager")
    for _ in range(5):
        step(X, Y)
        plain.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_fn(reference, X, Y)
        loss.backward()
        plain.step()
    state = optimizer.state[model.a.weight]
    assert {state[key].dtype for key in ("master", "exp_avg", "exp_avg_sq", "step")} == {torch.float32}
    assert torch.equal(state["master"].bfloat16(), model.a.weight) and float(state["step"]) == 5
    assert (state["master"] - reference.a.weight).abs().mean() < 2e-3


class Sign(torch.optim.Optimizer):
    """A user's own: the sign of a running mean (signSGD with momentum), its state made in step()."""

    def __init__(self, params, lr=1e-2, keep=0.9):
        super().__init__(params, {"lr": lr, "keep": keep})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                    state["start"] = p.clone()
                state["mean"].lerp_(p.grad, 1 - group["keep"])
                p.data.add_(state["mean"].sign(), alpha=-group["lr"])
                p.data.lerp_(state["start"], 0.01)


def test_an_optimizer_of_the_user_is_traced():
    model, reference = models()
    optimizer, plain = Sign(model.parameters()), Sign(reference.parameters())
    step = amp.training_step(model, loss_fn, optimizer, backend="eager", enabled=False)
    for number in range(STEPS):
        step(X, Y)
        plain.zero_grad()
        loss_fn(reference, X, Y).backward()
        plain.step()
        optimizer.param_groups[0]["lr"] = plain.param_groups[0]["lr"] = 1e-2 / (number + 2)
    for got, wanted in zip(tensors_of(model, optimizer), tensors_of(reference, plain), strict=True):
        assert torch.equal(got, wanted)


class LooksBack(Sign):
    def step(self, closure=None):
        group = self.param_groups[0]
        with torch.no_grad():
            for p in group["params"]:
                if p.grad is not None:
                    last = self.state[p].setdefault("last", torch.zeros_like(p))
                    before = p.clone()
                    p.sub_(p.grad * group["lr"] + last * 1e-3)
                    copied = self.state[p].setdefault("before", torch.zeros_like(p))
                    last.copy_(before.view(-1).flip(0).view_as(p) + copied * 1e-3)
                    copied.copy_(before)
                    self.state[p].setdefault("flat", torch.zeros_like(p.view(-1))).copy_(before.view(-1))


def test_a_view_of_the_old_weight_is_read_before_the_new_one_is_written():
    model, reference = models()
    optimizer, plain = LooksBack(model.parameters()), LooksBack(reference.parameters())
    step = amp.training_step(model, loss_fn, optimizer, backend="eager", enabled=False)
    for _ in range(3):
        step(X, Y)
        plain.zero_grad()
        loss_fn(reference, X, Y).backward()
        plain.step()
    for got, wanted in zip(tensors_of(model, optimizer), tensors_of(reference, plain), strict=True):
        assert torch.equal(got, wanted)


class Reads(Sign):
    def step(self, closure=None):
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / max(p.grad.norm().item(), 1.0))


class Branches(Sign):
    def step(self, closure=None):
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                if p.grad is not None and (p.grad.norm() < 1e9):
                    p.sub_(p.grad)


class Counts(Sign):
    def step(self, closure=None):
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    self.state[p]["step"] = self.state[p].get("step", 0) + 1
                    p.sub_(p.grad / self.state[p]["step"])


class StartsFromGradient(Sign):
    def step(self, closure=None):
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", p.grad.clone())
                    p.sub_(mean)


class DoesNothing(Sign):
    def step(self, closure=None):
        return None


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Reads, "Reads reads the value of a tensor .item"),
        (Branches, "Branches reads the value of a tensor .__bool__"),
        (Counts, "Counts changes 'step'"),
        (StartsFromGradient, "'mean' in the state of StartsFromGradient begins from the first gradient"),
        (DoesNothing, "DoesNothing writes no parameter"),
    ],
)
def test_what_cannot_be_traced_is_refused_by_name(kind, words):
    model, _ = models()
    before = copy.deepcopy(model.state_dict())
    step = amp.training_step(model, loss_fn, kind(model.parameters()), backend="eager", enabled=False)
    with pytest.raises(LoweringError, match=words):
        step(X, Y)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))


def test_what_no_step_can_do_is_refused_at_once():
    model, _ = models()
    for optimizer, words in (
        (O.LBFGS(model.parameters()), "LBFGS needs a closure.*such as AdamW"),
        (O.SparseAdam(model.parameters()), "SparseAdam needs sparse gradients"),
        (O.RMSprop([{"params": model.parameters(), "l1_decay": 1e-3}]), "RMSprop knows no l1_decay"),
        (O.SGD([{"params": model.parameters(), "l1_decay": -1e-3}]), "l1_decay is -0.001"),
        (O.SGD([{"params": model.parameters(), "l1_decay": "some"}]), "l1_decay is 'some'"),
    ):
        with pytest.raises(AmpError, match=words):
            amp.training_step(model, loss_fn, optimizer)
    hooked = O.RMSprop(model.parameters())
    hooked.register_step_post_hook(lambda *arguments: None)
    with pytest.raises(AmpError, match="hooks"):
        amp.training_step(model, loss_fn, hooked)
    low = {"extends": "default", "version": 1, "weights": {"master": "low"}}
    with pytest.raises(AmpError, match="FP32 masters"):
        amp.training_step(model, loss_fn, O.RMSprop(model.parameters()), rules=low, dtype="bf16", backend="eager")


def test_state_of_another_optimizer_is_refused():
    model, _ = models()
    optimizer = O.RMSprop(model.parameters(), 1e-2)
    step = amp.training_step(model, loss_fn, optimizer, backend="eager", enabled=False)
    step(X, Y)
    optimizer.state[model.a.weight] = {"step": torch.tensor(1.0)}
    with pytest.raises(AmpError, match="state of RMSprop has no 'square_avg' of shape"):
        step(X, Y)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_l1_decay_of_a_group(kind, accumulate, builds):
    """Against torch with `l1 * sign(weight)` added to the clipped gradient by hand; a change of it compiles nothing."""
    classes = {"sgd": lambda g: O.SGD(g, 0.1, momentum=0.9, weight_decay=0.01), "adamw": lambda g: O.AdamW(g, 1e-2)}
    model, reference = models()
    matrices, vectors = split(model)
    groups = [{"params": matrices, "l1_decay": 0.01}, {"params": vectors}]
    optimizer, plain = classes[kind](groups), classes[kind](reference.parameters())
    step = amp.training_step(
        model, loss_fn, optimizer, backend="eager", enabled=False, clip_norm=0.5, accumulate=accumulate
    )
    for l1 in (0.01, 0.01, 0.003, 0.0):
        optimizer.param_groups[0]["l1_decay"] = l1
        for _ in range(accumulate):
            step(X, Y)
            (loss_fn(reference, X, Y) / accumulate).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        for weight in split(reference)[0]:
            if weight.grad is not None:
                weight.grad += l1 * weight.detach().sign()
        plain.step()
        plain.zero_grad()
    assert len(builds) == accumulate
    for got, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
