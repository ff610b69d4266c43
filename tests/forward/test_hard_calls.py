"""Calls that capture or a compiler stumbles over: torch.func, sparse matrices, sizes that depend on values."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn

import amp_compiler as amp

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
BF16_ERROR = 2e-2  # a few roundings of 2**-9 each


class Lambda(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function, self.fc = function, nn.Linear(8, 8)

    def forward(self, *args):
        return self.function(self.fc, *args)


def check(model: nn.Module, *args: torch.Tensor, backend: str = "eager") -> amp.CompiledModule:
    """Outputs and gradients are those of the plain module."""
    plain = copy.deepcopy(model)
    compiled = amp.compile(model, dtype="bf16", backend=backend)
    actual, expected = compiled(*args), plain(*args)
    assert type(actual) is torch.Tensor and not wrong(actual, expected)
    actual.sum().backward()
    expected.sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert theirs.grad is None or not wrong(ours.grad, theirs.grad)
    return compiled


def wrong(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    with torch.no_grad():
        return bool((actual.double() - expected.double()).norm() > BF16_ERROR * expected.double().norm())


def by_hand(fc, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(fc(forward_ad.make_dual(x, torch.ones_like(x))).sin()).tangent


TRANSFORMS = {
    "jvp": lambda fc, x: torch.func.jvp(lambda t: fc(t).sin(), (x,), (torch.ones_like(x),))[1],
    "grad": lambda fc, x: torch.func.grad(lambda t: fc(t).sin().sum())(x),
    "jacfwd": lambda fc, x: torch.func.jacfwd(lambda t: fc(t).sin())(x[0]),
    "jacrev": lambda fc, x: torch.func.jacrev(lambda t: fc(t).sin())(x[0]),
    "vmap": lambda fc, x: torch.func.vmap(lambda t: fc(t).sin())(x),
    "vmap of grad": lambda fc, x: torch.func.vmap(torch.func.grad(lambda t: fc(t).sin().sum()))(x),
    "forward_ad": by_hand,
}


@pytest.fixture
def transforms_work():
    """Behind the test torch's transforms are as they were."""
    yield
    assert forward_ad._current_level == -1 and torch._functorch.eager_transforms.JVP_NESTING == 0
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0
    x = torch.ones(3)
    assert torch.equal(torch.func.jvp(torch.sin, (x,), (x,))[1], x.cos())
    assert torch.equal(torch.func.grad(lambda t: t.sin().sum())(x), x.cos())


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_in_forward(name, transforms_work):
    assert check(Lambda(TRANSFORMS[name]), X).plan.low_nodes > 0


def test_a_capture_that_fails_within_a_transform_leaves_torch_as_it_was(transforms_work):
    def function(fc, x):
        def inner(t):
            raise ValueError("in the middle")

        return torch.func.jvp(inner, (fc(x),), (x,))[1]

    with pytest.raises((ValueError, amp.AmpError), match="in the middle"):
        amp.compile(Lambda(function), dtype="bf16", backend="eager")(X)
    with pytest.raises(amp.CaptureError, match=r"test_hard_calls\.py:\d+: .*ValueError: in the middle"):
        amp.explain(Lambda(function), X)


def step_of(model):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return amp.training_step(model, lambda m, x: m(x).square().mean(), optimizer, dtype="bf16", backend="eager")


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_step_with_a_transform_trains_or_is_refused(name, transforms_work):
    model = Lambda(TRANSFORMS[name])
    expected = copy.deepcopy(model)(X).square().mean()
    step = step_of(model)
    try:
        loss = step(X)
    except amp.CaptureError as error:
        assert name != "vmap" and "torch.func" in str(error)
    else:
        assert not wrong(loss, expected)


SPARSE = torch.eye(4).to_sparse()
PRODUCTS = {
    "mm": lambda fc, x, s: torch.sparse.mm(s, fc(x)),
    "matmul": lambda fc, x, s: s @ fc(x),
    "made inside": lambda fc, x, s: torch.sparse.mm(x.to_sparse(), fc(x).t()),
}


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_sparse_matrices(name, backend):
    check(Lambda(PRODUCTS[name]), X, SPARSE, backend=backend)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_sparse_matrix_in_a_step(backend):
    losses = {}
    for one in (backend, "torch"):
        model = Lambda(PRODUCTS["mm"])
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loss_fn = lambda m, x, s: m(x, s).square().mean()  # noqa: E731
        step = amp.training_step(model, loss_fn, optimizer, dtype="bf16", backend=backend)
        losses[one] = []
        for _ in range(3):
            if one == backend:
                losses[one].append(float(step(X, SPARSE)))
                continue
            optimizer.zero_grad()
            loss = loss_fn(model, X, SPARSE)
            loss.backward()
            optimizer.step()
            losses[one].append(float(loss.detach()))
    assert losses[backend] == pytest.approx(losses["torch"], rel=BF16_ERROR)


SIZES = {
    "nonzero": lambda fc, x: (fc(x) > 0).nonzero().reshape(2, -1).float() + 0 * fc(x).sum(),
    "numel": lambda fc, x: fc(x).sum() / (x > 0).nonzero().numel(),
    "tensor_split": lambda fc, x: torch.tensor_split(fc(x), torch.tensor([1, 3]))[1],
    "tensor_split by what is computed": lambda fc, x: torch.tensor_split(fc(x), (x[0, :2] * 0 + 2).long())[0],
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_depend_on_values(name):
    check(Lambda(SIZES[name]), X)


SIZES_WITH_GRADIENTS = {
    "mask": lambda fc, x: fc(x)[x.sum(1) > 0].square(),
    "nonzero": lambda fc, x: fc(x).index_add(0, (i := (x.sum(1) > 0).nonzero().squeeze(1)), fc(x)[i]),
    "repeat_interleave": lambda fc, x: torch.repeat_interleave(fc(x), (x.sum(1) > 0).long() + 1, dim=0),
    "unique": lambda fc, x: fc(x) * torch.unique((x * 3).long()).numel(),
    "tensor_split by a number": lambda fc, x: torch.tensor_split(fc(x), torch.tensor(1), dim=1)[0],
}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["inductor"])
@pytest.mark.parametrize("name", SIZES_WITH_GRADIENTS)
def test_sizes_that_depend_on_values_are_compiled(name, backend):
    """Inductor's trace has names of its own for such sizes; what reads a value outright runs node by node."""
    model = Lambda(SIZES_WITH_GRADIENTS[name])
    plain = copy.deepcopy(model)
    compiled = amp.compile(model, dtype="bf16", backend=backend)
    for seed in range(3):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))
        result, expected = compiled(x), plain(x)
        assert result.shape == expected.shape and not wrong(result, expected)
        for one in (model, plain):
            one.zero_grad()
        result.sum().backward()
        expected.sum().backward()
        assert not wrong(model.fc.weight.grad, plain.fc.weight.grad)


@pytest.mark.parametrize("name", ["numel", "tensor_split"])
def test_sizes_that_depend_on_values_in_a_step(name):
    """Trained, or refused with the line."""
    model = Lambda(SIZES[name])
    plain = copy.deepcopy(model)
    step = amp.training_step(
        model, lambda m, x: m(x).sum(), torch.optim.SGD(model.parameters(), 0.1), dtype="bf16", backend="eager"
    )
    try:
        assert not wrong(step(X), plain(X).sum())
    except amp.CaptureError as error:
        assert "test_hard_calls.py" in str(error)


@pytest.mark.parametrize("name", ["i0", "i0e", "i1", "i1e"])
def test_bessel_functions_have_a_backward(name):
    function = getattr(torch.special, name)
    check(Lambda(lambda fc, x: function(fc(x))), X)
    model = Lambda(lambda fc, x: function(fc(x)))
    before = copy.deepcopy(model)
    step = step_of(model)
    assert not wrong(step(X), before(X).square().mean()) and not torch.equal(before.fc.weight, model.fc.weight)


def test_a_number_that_changes_in_a_model_with_a_graph_break():
    def function(fc, x, k):
        y = fc(x) * k
        return y if y.sum() > 1e9 else -y

    model = Lambda(function)
    compiled = amp.compile(model, dtype="bf16", backend="eager")
    for k in (0.5, 0.25, 2.0):
        assert not wrong(compiled(X, k), model(X, k))
    assert compiled.execution != "as one graph"


def seeded(fc, x):
    torch.manual_seed(7)
    return fc(x) + torch.rand_like(x)


def test_a_seed_that_forward_sets_is_set_at_every_call():
    for _ in range(2):
        check(Lambda(seeded), X)
    model = amp.compile(Lambda(seeded), dtype="bf16", backend="eager")
    assert torch.equal(model(X), model(X))


def test_a_seed_that_a_loss_sets_is_set_at_every_step():
    model = Lambda(seeded)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    step = amp.training_step(model, lambda m, x: m(x).sum(), optimizer, dtype="bf16", backend="eager")
    assert not wrong(step(X), model(X).sum()) and not wrong(step(X), model(X).sum())


def test_a_plan_of_a_forward_that_sets_a_seed_is_refused_with_its_line():
    with pytest.raises(amp.CaptureError, match=r"test_hard_calls\.py:\d+: .* seed"):
        amp.explain(Lambda(seeded), X)
    assert type(torch.random.default_generator) is torch.Generator


@pytest.mark.parametrize("broken", [False, True])
def test_inference_mode_in_forward_keeps_gradients_out(broken):
    def function(fc, x):
        if broken and x.sum() > 1e9:
            return x
        with torch.inference_mode():
            h = fc(x)
        return fc(x) + h.clone()

    compiled = check(Lambda(function), X)
    assert ("graph break" in compiled.execution) is broken
    with torch.inference_mode():
        assert compiled(X).is_inference() and not amp.compile(Lambda(function), backend="eager")(X).requires_grad


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_weight_that_is_first_read_under_no_grad_has_its_gradient_behind_a_graph_break(backend):
    def function(fc, x):
        if x.sum() > 1e9:
            return x
        with torch.no_grad():
            h = fc(x)
        return fc(x) * h

    model = Lambda(function)
    assert check(model, X, backend=backend).execution != "as one graph" and model.fc.weight.grad is not None


def test_a_graph_that_reads_an_index_runs_as_it_is_written(caplog):
    place = torch.tensor(1)

    def function(fc, x):
        h = fc(x)
        if h.sum() > 1e9:
            return h
        return h[:, place] * 2

    with caplog.at_level("WARNING", "amp_compiler"):
        assert check(Lambda(function), X).execution != "as one graph"
    assert "without a plan" in caplog.text and "test_hard_calls.py" in caplog.text


@dataclasses.dataclass
class Held:
    x: object
    rows: object


class OfHeld(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, held):
        return self.layer(torch.as_tensor(held.x)[held.rows])


def test_inputs_that_pytree_does_not_flatten():
    """A dataclass, with a slice or an array in it: torch.compile looks into them."""
    model = OfHeld()
    compiled = amp.compile(model, dtype="bf16", backend="eager")
    x = torch.randn(6, 4)
    for held in (Held(x, slice(4)), Held(x * 2, slice(4)), Held(x, slice(2)), Held(x.numpy(), slice(2))):
        torch.testing.assert_close(compiled(held).float(), model(held), rtol=0.05, atol=0.05)
    assert compiled.execution == "as one graph" and any(node.precision == "low" for node in compiled.plan.nodes)


class Split(nn.Module):
    """Its only graph reads a size from a tensor."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 8)

    def forward(self, x):
        left, right = torch.tensor_split(self.layer(x), torch.tensor([5]), 1)
        return left.square().mean() + 2 * right.square().mean()


def test_a_model_of_which_no_graph_can_be_planned_runs_as_it_is_written(caplog):
    torch.manual_seed(0)
    model, x = Split(), torch.randn(3, 4)
    plain, stepped = copy.deepcopy(model), copy.deepcopy(model)
    compiled = amp.compile(model, dtype="bf16", backend="eager")
    with caplog.at_level("WARNING", "amp_compiler"):
        made = compiled(x)
    assert "without a plan" in caplog.text and "test_hard_calls.py" in caplog.text
    expected = plain(x)
    torch.testing.assert_close(made, expected, rtol=0, atol=0)
    with pytest.raises(amp.AmpError, match=r"the model has no plan: .*test_hard_calls\.py:\d+: "):
        _ = compiled.graph_module
    step = amp.training_step(
        stepped, lambda m, x: m(x), torch.optim.SGD(stepped.parameters(), 0.1), dtype="bf16", backend="eager"
    )
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for _ in range(2):
        loss = plain(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(step(x), loss.detach())
    assert "as they are written" in step.execution
    for ours, theirs in zip(stepped.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
