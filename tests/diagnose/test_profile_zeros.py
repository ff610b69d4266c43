"""A gradient of zeros alone: unknown where FP16 may have lost it, and nothing lost where it is zero anyway."""

from typing import Any

import pytest
import torch
from planted import linear
from torch import nn
from toys import sgd_step

import amp_compiler as amp

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def model_of(between: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(linear(8, 8, seed=1), between or nn.ReLU(), linear(8, 2, seed=2))


def dead() -> nn.Module:
    model = model_of()
    nn.init.constant_(model[0].bias, -1e3)
    return model


def idle_head() -> nn.Module:
    model = model_of(nn.Tanh())
    nn.init.zeros_(model[2].weight)
    return model


def mean(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().mean()


def masked(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x).float() * torch.zeros(4, 2)).sum()


def faint(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().mean() * 1e-9


def profile(model: nn.Module, loss_fn: Any, stepped: bool, dtype: str = "fp16", scale: float = 1.0,
            rules: Any = "default") -> amp.Profile:  # fmt: skip
    if not stepped:
        return amp.profile(model, [X, X], dtype=dtype, loss_fn=loss_fn, loss_scale=scale, rules=rules)
    return amp.profile(sgd_step(model, loss_fn, 0.0, dtype=dtype, loss_scale=scale, rules=rules), [X, X])


@pytest.mark.sweep(3)
@pytest.mark.parametrize("stepped", [True, False], ids=["step", "model"])
@pytest.mark.parametrize(
    ("make", "loss_fn", "names"),
    [(dead, mean, {"0.weight", "0.bias", "2.weight"}), (idle_head, mean, {"0.weight", "0.bias"}),
     (model_of, masked, {"0.weight", "0.bias", "2.weight", "2.bias"})],
    ids=["dead ReLU", "zero weights behind", "masked loss"],
)  # fmt: skip
def test_gradients_that_are_zero_in_fp32_too_lose_nothing(make: Any, loss_fn: Any, names: Any, stepped: bool) -> None:
    result = profile(make(), loss_fn, stepped)
    zero = [row for row in result.of("weight gradient") if row.stored.zeros == row.stored.total]
    assert {row.name for row in zero} == names
    assert not any(row.vanished for row in result.rows) and result.loss_scale().unknown == ()
    assert "unknown" not in str(result) and "none loses 0.00%" in str(result)
    plain = make()
    loss_fn(plain, X).backward()
    assert all((name in names) == (not one.grad.any()) for name, one in plain.named_parameters())


@pytest.mark.parametrize("stepped", [True, False], ids=["step", "model"])
def test_gradients_that_fp16_lost_are_not_told_as_harmless(stepped: bool) -> None:
    result = profile(model_of(nn.Tanh()), faint, stepped)
    names = ("0.weight", "0.bias", "2.weight", "2.bias")
    assert set(result.loss_scale().unknown) == set(names)
    assert result.worst()[0].vanished and {row.name for row in result.worst() if row.vanished} >= set(names)
    assert "what a static loss scale keeps is unknown" in str(result) and "%" not in str(result.loss_scale())
    assert "unknown: gradients of " in str(result) and "profile in BF16 or with a scale" in str(result)
    for dtype, scale in (("bf16", 1.0), ("fp16", 2.0**28)):
        seen = profile(model_of(nn.Tanh()), faint, stepped, dtype, scale)
        assert seen.loss_scale().unknown == () and "unknown" not in str(seen)
        assert (seen.loss_scale("fp16").lost_without == 1.0) and not any(row.vanished for row in seen.rows)


@pytest.mark.parametrize("stepped", [True, False], ids=["step", "model"])
def test_an_fp32_gradient_made_of_one_that_fp16_lost_is_unknown(stepped: bool) -> None:
    wide = {
        "version": 1,
        "extends": "default",
        "rules": [{"match": {"module": "0"}, "backward": {"precision": "fp32"}}],
    }
    result = profile(model_of(nn.Tanh()), faint, stepped, rules=wide)
    (row,) = [row for row in result.of("weight gradient") if row.name == "0.weight"]
    assert row.dtype == "fp32" and row.vanished


def test_both_in_one_model() -> None:
    """A dead unit before a gradient that FP16 loses: what is lost behind says nothing of what is zero anyway."""
    result = profile(dead(), faint, True)
    assert set(result.loss_scale().unknown) == {"2.bias", "0.weight", "0.bias"}


def test_a_gradient_that_was_infinite_too_is_not_told_as_zeros() -> None:
    """One batch underflows, and another overflows: the infinite share is what counts."""
    tiny = sgd_step(model_of(), lambda m, x: (m(x).float() * 1e-12).mean(), 0.0, dtype="fp16", loss_scale=1.0)

    def first(batches: Any) -> Any:
        rows = amp.profile(tiny, batches).of("weight gradient")
        return next(row for row in rows if row.name.startswith("0.weight"))

    assert first([(X,)]).vanished
    assert not first([(X,), (X * float("inf"),)]).vanished
