"""`scaling: delayed`: the recipe of Transformer Engine by NumPy, and what a step keeps for it."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from test_fp8 import product, rounded_by_numpy, rules
from torch import nn

import amp_compiler as amp

pytestmark = pytest.mark.usefixtures("bf16_kernels")


class Recipe:
    """The delayed scaling of one tensor: its scale is of the largest of the last magnitudes, known behind its use."""

    def __init__(self, dtype: torch.dtype, history: int) -> None:
        self.dtype, self.scale, self.amaxes = dtype, np.float32(1), [np.float32(0)] * history

    def __call__(self, x: np.ndarray) -> np.ndarray:
        amax = max(self.amaxes)
        if amax > 0 and np.isfinite(amax):
            self.scale = np.float32(torch.finfo(self.dtype).max) / amax
        self.amaxes = [np.abs(x).max(), *self.amaxes[:-1]]
        result = rounded_by_numpy(np.float32(x * self.scale).astype(np.float64), self.dtype)
        return result.astype(np.float32) / self.scale


class Product(nn.Module):
    """A product of two weights; its loss has the gradient that is given."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.x = nn.Parameter(torch.randn(24, 32, generator=generator))
        self.layer = nn.Linear(32, 48, bias=False)
        self.layer.weight = nn.Parameter(torch.randn(48, 32, generator=generator))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.layer(self.x) * gradient).sum()


def loss(model: nn.Module, *batch: torch.Tensor) -> torch.Tensor:
    return model(*batch)  # type: ignore[no-any-return]


def step_of(model: nn.Module, math: Any, dtype: Any = "bf16", **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 2.0**-6)
    chosen = rules(math) if isinstance(math, dict) and "version" not in math else math
    return amp.training_step(model, loss, optimizer, rules=chosen, dtype=dtype, **{"backend": "eager", **options})


def gradients(number: int) -> list[torch.Tensor]:
    """Of some steps, some beyond what scales of the steps before can hold."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(24, 48, generator=generator).bfloat16() * 2.0 ** (3 * (i % 4)) for i in range(number)]


def bf16(x: Any) -> np.ndarray:
    return torch.as_tensor(x).bfloat16().float().numpy()


@pytest.mark.parametrize(("format_", "history"), [("hybrid", 3), ("e4m3", 1), ("hybrid", 16)])
def test_a_step_is_the_recipe(format_: str, history: int) -> None:
    model = Product()
    step = step_of(model, {"scaling": "delayed", "history": history, "format": format_})
    narrow, wide = torch.float8_e4m3fn, torch.float8_e5m2 if format_ == "hybrid" else torch.float8_e4m3fn
    recipes = [Recipe(dtype, history) for dtype in (narrow, narrow, wide)]
    for gradient in gradients(7):
        x, weight = (one.detach().clone() for one in model.parameters())
        result = step(gradient.float())
        left, right, incoming = (recipe(bf16(one)) for recipe, one in zip(recipes, (x, weight, gradient), strict=True))
        built = product(left, right.T)
        torch.testing.assert_close(result, (built.float() * gradient.float()).sum(), rtol=1e-2, atol=0.5)
        near((x - model.x) * 2**6, product(incoming, right))
        near((weight - model.layer.weight) * 2**6, product(incoming.T, left))
        (kept,) = step.state_dict()["amp_compiler"]["amaxes"].values()
        assert kept == [[float(one) for one in (recipe.scale, *recipe.amaxes)] for recipe in recipes]


def near(built: torch.Tensor, wanted: torch.Tensor) -> None:
    """To the last bit of BF16: FP32 sums are made in another order."""
    torch.testing.assert_close(built, wanted.float(), rtol=2**-7, atol=1e-4 * float(wanted.abs().max()))


def test_a_skipped_step_leaves_what_is_kept() -> None:
    model = Product()
    step = step_of(model, "fp8-delayed", "fp16", loss_scale=2.0**4)
    first, large, last = (one.float() for one in gradients(3))
    step(first)
    before = step.state_dict()["amp_compiler"]["amaxes"]
    step(large * 1e5)  # beyond FP16, with the loss scale
    assert int(step.skipped_steps) == 1
    assert step.state_dict()["amp_compiler"]["amaxes"] == before
    step(last)
    assert step.state_dict()["amp_compiler"]["amaxes"] != before and int(step.skipped_steps) == 1


@pytest.mark.parametrize("way", ["state_dict", "checkpoint"])
def test_a_run_goes_on_from_what_was_saved(way: str, tmp_path: Path) -> None:
    model = Product()
    step, inputs = step_of(model, "fp8-delayed"), [one.float() for one in gradients(5)]
    for gradient in inputs[:3]:
        step(gradient)
    again = Product()
    other = step_of(again, "fp8-delayed")
    if way == "checkpoint":
        amp.save_checkpoint(step, tmp_path, 3)
        amp.load_checkpoint(other, tmp_path)
    else:
        again.load_state_dict(model.state_dict())
        other.load_state_dict(step.state_dict())
    for gradient in inputs[3:]:
        assert torch.equal(step(gradient), other(gradient))
    assert torch.equal(model.x, again.x)
    with pytest.raises(amp.AmpError, match="has a history of 16, and was given one of 4"):
        fewer = step_of(Product(), {"scaling": "delayed", "history": 4})
        fewer.load_state_dict(step.state_dict())
        fewer(inputs[0])
    with pytest.raises(amp.AmpError, match="saved magnitudes"):
        other.load_state_dict({**step.state_dict(), "amp_compiler": {"amaxes": {"layer:0": "many"}}})


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Conv2d(3, 16, 3), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).relu().mean((2, 3))).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "backward", [None, {"math": "fp32"}, {"math": "fp8"}, {"math": {"scaling": "delayed", "history": 2}}]
)
def test_convolutions_and_gradients_that_are_computed_otherwise(backward: Any) -> None:
    inputs = rules({"scaling": "delayed"}, **({} if backward is None else {"backward": backward}))
    model = Convolutions()
    step = step_of(model, inputs)
    losses = [float(step(torch.ones(4, 3, 8, 8))) for _ in range(6)]
    assert losses[-1] < losses[0]
    kept = step.state_dict()["amp_compiler"]["amaxes"]
    assert sorted(kept) == ["a:0", "b:0"]
    assert (kept["b:0"][2][1] > 0) == (backward != {"math": "fp32"})


def test_batches_that_are_gathered_are_remembered_each() -> None:
    model = Product()
    step = step_of(model, "fp8-delayed", accumulate=2)
    for gradient in gradients(4):
        step(gradient.float())
    (kept,) = step.state_dict()["amp_compiler"]["amaxes"].values()
    assert [row.index(0.0) for row in kept] == [5, 5, 5]


@pytest.mark.compiles
@pytest.mark.parametrize("preset", ["fp8-delayed", pytest.param("fp8", marks=pytest.mark.slow)])
def test_a_compiled_step_keeps_the_same(preset: str) -> None:
    kept, losses = [], []
    for backend in ("eager", "inductor"):
        step = step_of(Product(), preset, backend=backend)
        losses.append([float(step(gradient.float())) for gradient in gradients(4)])
        kept.append(list(step.state_dict()["amp_compiler"].get("amaxes", {}).values()))
    np.testing.assert_allclose(*kept, rtol=0.01)
    np.testing.assert_allclose(*losses, rtol=0.02)


def test_what_remembers_nothing_is_refused() -> None:
    compiled = amp.compile(nn.Sequential(nn.Linear(32, 16)), rules="fp8-delayed", dtype="bf16", backend="eager")
    with pytest.raises(amp.AmpError, match=r"'linear' in 0 has delayed scaling.*scaling: tensorwise"):
        compiled(torch.ones(2, 32))

    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher, self.own = nn.Linear(32, 16), nn.Linear(32, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.own(x) - self.teacher(x).detach()).square().mean()

    with pytest.raises(amp.AmpError, match=r"a product in teacher has delayed scaling, and no gradient"):
        step_of(Detached(), "fp8-delayed")(torch.ones(2, 32))


@pytest.mark.parametrize("larger", ["operand", "gradient"])
def test_an_operand_beyond_its_scale_is_named_with_rules_that_hold_it(larger: str) -> None:
    model = Product()
    step, gradient = step_of(model, "fp8-delayed"), torch.ones(24, 48)
    assert not amp.find_nonfinite(step, gradient), "nothing is known yet"
    assert [one.op for one in amp.find_nonfinite(step, gradient * 1e-12).nodes] == ["aten._to_copy"], "no history"
    step(gradient)
    assert not amp.find_nonfinite(step, gradient * 0.5)
    if larger == "operand":
        model.x.data *= 100
    before = step.state_dict()
    report = amp.find_nonfinite(step, gradient * (100 if larger == "gradient" else 1))
    assert step.state_dict() == before
    assert report and not report.nodes and not report.parameters
    (said,) = report.saturated
    start, end = ("the parameter x, bf16", "4.09") if larger == "operand" else ("the gradient, bf16", "1")
    assert re.fullmatch(
        rf"{start}.* in the FP8 product linear \(aten.linear, .* in layer, .*: .* steps before holds {end}", said
    )
    inputs = yaml.safe_load(report.rule)
    assert [rule["math"] for rule in inputs["rules"]] == [{"scaling": "tensorwise"}]
    other = Product()
    other.load_state_dict(model.state_dict())
    assert not amp.find_nonfinite(step_of(other, inputs), gradient * 100)


def test_an_operand_of_two_products_is_named_alike_for_both() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.query(x) * self.key(x)).square().mean()

    model, x = Two(), torch.linspace(-1, 1, 64 * 32).view(64, 32)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    step = amp.training_step(model, lambda m, x: m(x), optimizer, dtype="bf16", backend="eager", rules="fp8-delayed")
    step(x)
    said = [one for one in amp.find_nonfinite(step, x * 100).saturated if "the gradient" not in one]
    assert "\nand 2 more\n" in str(amp.NonfiniteReport(saturated=tuple("abcdefg")))
    assert len(said) == 2 and all(one.startswith("the batch itself (batch[0])") for one in said)
