"""`amp.training_step` with an optimizer of the user's own, with L1 decay, and with what it must refuse."""

import copy

import pytest
import torch
from torch import nn
from torch import optim as O
from toys import classes, eager_step, train_beside_torch
from training_optimizers import STEPS, X, Y, models, split

import amp_compiler as amp
from amp_compiler.errors import AmpError, LoweringError


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


TO_THE_BIT = {"rtol": 0, "atol": 0}


def test_an_optimizer_of_the_user_is_traced():
    def between(number, model, optimizer):
        optimizer.param_groups[0]["lr"] = 1e-2 / (number + 1)

    train_beside_torch(models()[0], classes, [(X, Y)] * STEPS, Sign, between, TO_THE_BIT)


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
    train_beside_torch(models()[0], classes, [(X, Y)] * 3, LooksBack, tolerance=TO_THE_BIT)


class Reads(Sign):
    def step(self, closure=None):
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / max(p.grad.norm().item(), 1.0))


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
        (Counts, "Counts changes 'step'"),
        (DoesNothing, "DoesNothing writes no parameter"),
        (StartsFromGradient, "'mean' in the state of StartsFromGradient begins from the first gradient"),
    ],
)
def test_what_cannot_be_traced_is_refused_by_name(kind, words):
    model, _ = models()
    before = copy.deepcopy(model.state_dict())
    step = eager_step(model, classes, kind(model.parameters()), enabled=False)
    with pytest.raises(LoweringError, match=words):
        step(X, Y)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))


def test_what_no_step_can_do_is_refused_at_once():
    model, _ = models()
    for optimizer, words in (
        (O.RMSprop([{"params": model.parameters(), "l1_decay": 1e-3}]), "RMSprop knows no l1_decay"),
        (O.SGD([{"params": model.parameters(), "l1_decay": -1e-3}]), "l1_decay is -0.001"),
        (O.SGD([{"params": model.parameters(), "l1_decay": "some"}]), "l1_decay is 'some'"),
    ):
        with pytest.raises(AmpError, match=words):
            amp.training_step(model, classes, optimizer)
    low = {"extends": "default", "version": 1, "weights": {"master": "low"}}
    with pytest.raises(AmpError, match="FP32 masters"):
        eager_step(model, classes, O.RMSprop(model.parameters()), rules=low)


def test_state_of_another_optimizer_is_refused():
    model, _ = models()
    optimizer = O.RMSprop(model.parameters(), 1e-2)
    step = eager_step(model, classes, optimizer, enabled=False)
    step(X, Y)
    optimizer.state[model.a.weight] = {"step": torch.tensor(1.0)}
    with pytest.raises(AmpError, match="state of RMSprop has no 'square_avg' of shape"):
        step(X, Y)


@pytest.mark.parametrize(("kind", "accumulate"), [("sgd", 1), ("adamw", 2)])
def test_l1_decay_of_a_group(kind, accumulate, builds):
    """Against torch with `l1 * sign(weight)` added to the clipped gradient by hand; a change of it compiles nothing."""
    makers = {"sgd": lambda g: O.SGD(g, 0.1, momentum=0.9, weight_decay=0.01), "adamw": lambda g: O.AdamW(g, 1e-2)}
    model, reference = models()
    matrices, vectors = split(model)
    groups = [{"params": matrices, "l1_decay": 0.01}, {"params": vectors}]
    optimizer, plain = makers[kind](groups), makers[kind](reference.parameters())
    step = eager_step(model, classes, optimizer, enabled=False, clip_norm=0.5, accumulate=accumulate)
    for l1 in (0.01, 0.01, 0.003, 0.0):
        optimizer.param_groups[0]["l1_decay"] = l1
        for _ in range(accumulate):
            step(X, Y)
            (classes(reference, X, Y) / accumulate).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        for weight in split(reference)[0]:
            if weight.grad is not None:
                weight.grad += l1 * weight.detach().sign()
        plain.step()
        plain.zero_grad()
    assert len(builds) == accumulate
    torch.testing.assert_close(list(model.parameters()), list(reference.parameters()), rtol=1e-5, atol=1e-6)


class Sharpness(O.SGD):
    """SAM: the gradient at the worst point nearby, for which its step runs forward and backward once more."""

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is not None, "SAM requires closure, but it was not provided"
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        moved = [0.05 * p.grad / norm for p in parameters]
        torch._foreach_add_(parameters, moved)
        self.zero_grad()
        loss = torch.enable_grad()(closure)()
        torch._foreach_sub_(parameters, moved)
        super().step()
        return loss


class ByAnotherName(Sharpness):
    def step(self, again=None):
        if again is None:
            raise NotImplementedError
        return super().step(again)


@pytest.mark.parametrize("kind", [Sharpness, ByAnotherName, O.LBFGS])
def test_an_optimizer_that_calls_a_closure_is_refused_with_a_recipe_that_runs(kind):
    model, reference = models()
    with pytest.raises(AmpError, match=rf"{kind.__name__} .*amp\.compile\(model\)"):
        amp.training_step(model, classes, kind(model.parameters(), 0.1), backend="eager")(X, Y)
    compiled, losses = amp.compile(model, dtype="bf16", backend="eager"), {}
    for trained in (compiled, reference):
        optimizer = kind(trained.parameters(), 0.1)

        def closure(trained=trained, optimizer=optimizer):
            optimizer.zero_grad()
            loss = classes(trained, X, Y)
            loss.backward()
            return loss

        for _ in range(5):
            closure()
            optimizer.step(closure)
        losses[trained] = closure().detach()
    torch.testing.assert_close(losses[compiled], losses[reference], rtol=2e-2, atol=2e-2)
