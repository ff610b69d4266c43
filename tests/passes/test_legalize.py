"""FP16 on a CPU: FP32 arithmetic on rounded inputs, one rounding at the end, inf where FP16 overflows."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_compiler as amp


def half(x: torch.Tensor) -> torch.Tensor:
    return x.half().float()


def make_mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))


def by_hand(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    """The MLP with every rounding written out."""
    for layer in model:
        if isinstance(layer, nn.Linear):
            x = half(F.linear(half(x), half(layer.weight), half(layer.bias)))
        else:
            x = torch.relu(x)
    return x


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_fp16_on_a_cpu_agrees_to_the_bit_with_rounding_by_hand(backend):
    model = make_mlp()
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
    actual = amp.compile(model, dtype="fp16", backend=backend)(x)
    assert actual.dtype == torch.float32
    assert torch.equal(actual, by_hand(model, x))


@pytest.mark.parametrize("plain", ["0", "1"])
def test_bf16_is_emulated_on_a_cpu_without_kernels_for_it(plain, monkeypatch):
    monkeypatch.setenv("AMP_PLAIN_CPU", plain)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 5))
    x = torch.randn(2, 3, 8, 8)
    compiled = amp.compile(model, dtype="bf16", backend="eager")
    actual = compiled(x)

    def low(t):
        return t.bfloat16().float()

    convolved = low(F.conv2d(low(x), low(model[0].weight), low(model[0].bias)))
    expected = low(F.linear(convolved.flatten(1), low(model[2].weight), low(model[2].bias)))
    assert torch.allclose(actual, expected, rtol=2**-7, atol=2**-9)
    legalized = dict(compiled.stages)["legalize"]
    assert ("linear: bf16[2, 5] = aten.linear" in legalized) == (plain == "0")
    if plain == "1":
        assert torch.equal(actual, expected)


def test_a_word_for_the_cpu_that_is_none_is_refused(monkeypatch):
    monkeypatch.setenv("AMP_PLAIN_CPU", "yes")
    with pytest.raises(amp.AmpError, match="AMP_PLAIN_CPU='yes' is neither 0 nor 1"):
        amp.compile(nn.Linear(2, 2), dtype="bf16", backend="eager")(torch.ones(1, 2))


def test_it_overflows_where_fp16_overflows_and_only_there():
    model = make_mlp()
    with torch.no_grad():
        model[0].weight.mul_(3e5)
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
    actual = amp.compile(model, dtype="fp16", backend="eager")(x)
    expected = by_hand(model, x)
    assert not torch.isfinite(expected).all() and torch.isfinite(model(x)).all()
    assert torch.equal(actual, expected) or torch.equal(actual.isnan(), expected.isnan())
    hidden = amp.compile(model[0], dtype="fp16", backend="eager")(x)
    exact = F.linear(half(x), half(model[0].weight), half(model[0].bias))
    assert torch.equal(hidden.isinf(), exact.abs() >= 65520)  # halfway between 65504 and 65536 rounds to inf


def test_gradients_are_rounded_at_the_same_places():
    model = nn.Linear(8, 4)
    x = torch.randn(3, 8, requires_grad=True)
    seed = torch.randn(3, 4)
    compiled = amp.compile(model, dtype="fp16", backend="eager")
    (gx, gw) = torch.autograd.grad(compiled(x), (x, model.weight), seed)
    assert torch.equal(gx, half(half(seed) @ half(model.weight)))
    assert torch.equal(gw, half(half(seed).t() @ half(x)))


class WrittenBetween(nn.Module):
    """Two products of one value, which is written between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        first = self.b(h)
        h[:2].mul_(50)
        return first + self.b(h)


def test_what_is_written_between_two_emulated_products_is_read_by_the_second_alone():
    model, x = WrittenBetween(), torch.randn(4, 8)
    with torch.no_grad():  # torch's own backward refuses the write
        result, expected = amp.compile(model, dtype="fp16", backend="eager")(x), model(x)
    assert (result - expected).norm() <= 1e-2 * expected.norm()
