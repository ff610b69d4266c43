"""Models of the kinds that a capture easily gets wrong: each result and gradient against the plain module."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import amp_compiler as amp

TOLERANCE = 3e-2  # a few BF16 roundings, which are 2**-9 each
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Lambda(nn.Module):
    def __init__(self, function, **modules) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *args):
        return self.function(self, *args)


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(8, 8)


def check(model: nn.Module, *args, dtype: str = "bf16", times: int = 1) -> amp.CompiledModule:
    """Outputs, parameter gradients and buffers of `times` calls agree with the plain module's."""
    plain = copy.deepcopy(model)
    compiled = amp.compile(model, dtype=dtype, backend="eager")
    for _ in range(times):
        torch.manual_seed(1)
        expected = plain(*args)
        torch.manual_seed(1)
        actual = compiled(*args)
        assert actual.dtype == expected.dtype and actual.shape == expected.shape
        check_close(actual, expected)
        if expected.requires_grad:
            expected.sum().backward()
            actual.sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if theirs.grad is not None:
            check_close(ours.grad, theirs.grad)
    for ours, theirs in zip(model.buffers(), plain.buffers(), strict=True):
        assert ours.requires_grad == theirs.requires_grad
        check_close(ours, theirs)
    return compiled


def check_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    with torch.no_grad():
        assert (actual.double() - expected.double()).norm() <= TOLERANCE * expected.double().norm() + 1e-6


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -g


class ReverseTwice(Reverse):
    @staticmethod
    def backward(ctx, g):
        return -2 * g


def test_custom_functions_of_which_one_is_made_of_the_other_keep_their_backwards():
    model = Lambda(lambda m, x: m.b(Reverse.apply(m.a(x)) + 3 * ReverseTwice.apply(m.a(x))), a=linear(), b=linear())
    assert check(model, X, times=2).execution == "as one graph"


def test_spectral_norm():
    check(nn.utils.parametrizations.spectral_norm(linear()), X, times=2)


def test_bits_are_not_reinterpreted_in_another_width():
    check(Lambda(lambda m, x: m.fc(x).view(torch.int32).view(torch.float32) * 1, fc=linear()), X)


@pytest.mark.parametrize(
    "alias", [lambda h: torch.einsum("ij->ji", h), torch.atleast_3d, lambda h: torch.broadcast_tensors(h, h[:1])[0]]
)
def test_writes_through_aliases_that_no_schema_marks(alias):
    def function(m, x):
        h = m.fc(x) * 1
        alias(h).add_(5)
        return h + 0

    check(Lambda(function, fc=linear()), X)


def test_writes_between_two_emulated_products():
    def function(m, x):
        h = m.a(x)
        view = h[:2]
        first = m.b(h)
        view.mul_(50)
        return first + m.b(h)

    with torch.no_grad():  # torch's own backward refuses the write
        check(Lambda(function, a=linear(), b=linear()), X, dtype="fp16")


def test_kept_weights_follow_fused_optimizers():
    model = linear()
    compiled = amp.compile(model, dtype="bf16", backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, fused=True)
    for _ in range(3):
        with torch.no_grad():
            check_close(compiled(X), model(X))
        optimizer.zero_grad()
        model(X).square().sum().backward()
        optimizer.step()


def test_kept_weights_of_inference_tensors():
    with torch.inference_mode():
        model = linear().eval()
        compiled = amp.compile(model, dtype="bf16", backend="eager")
        compiled(X)
        model.weight.mul_(3)
        check_close(compiled(X), model(X))


def test_a_region_for_another_device_means_nothing():
    def function(m, x):
        with torch.autocast("cuda", enabled=False):
            return m.fc(x)

    assert check(Lambda(function, fc=linear()), X).plan.low_nodes == 1
