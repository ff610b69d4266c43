"""`torch.compile(model, backend="amp_compiler")` for sizes that vary: autocast's numbers, and no compilation a size."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

counters = torch._dynamo.utils.counters
OPTIONS = {"dtype": "bf16"}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 2, 8).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Arithmetic(nn.Module):
    """Computes with a size in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        size = x.shape[0]
        half = size // 2
        y = self.linear(x) * (1.0 / size) + torch.arange(size)[:, None] * 0.01
        return torch.cat([y[:half] * 2, y[half:]]) / size**0.5


class Broken(nn.Module):
    """Two subgraphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        y = self.first(x)
        torch._dynamo.graph_break()
        return self.second(y.relu())


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))


ROWS = [(8, 16), (9, 16), (10, 16), (11, 16)]
LENGTHS = [(2, 8, 16), (2, 9, 16), (2, 10, 16)]
BOTH = [(2, 8, 16), (3, 9, 16), (4, 11, 16), (5, 7, 16)]
# Model, shapes, options of torch.compile, and how many graphs are compiled.
CASES = {
    "batch": (mlp, ROWS, {}, 2),
    "sequence": (Attention, LENGTHS, {}, 2),
    "batch and sequence": (Attention, BOTH, {}, 2),
    "arithmetic": (Arithmetic, ROWS, {}, 2),
    "graph break": (Broken, ROWS, {}, 4),
    "dynamic=True": (mlp, ROWS, {"dynamic": True}, 1),
    "mark_dynamic": (mlp, ROWS, {}, 1),
}
# What is tried in every run of the tests; the others in the slow ones.
QUICK = {("arithmetic", False)}
RUNS = [
    pytest.param(
        name,
        trains,
        id=f"{name}-{'training' if trains else 'eval'}",
        marks=() if (name, trains) in QUICK else pytest.mark.slow,
    )
    for name in CASES
    for trains in (False, True)
]


def gradients(model: nn.Module, result: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(result.float().square().sum(), list(model.parameters())))


@pytest.mark.compiles
@pytest.mark.parametrize(("name", "trains"), RUNS)
def test_a_new_size_is_computed_as_by_autocast(name: str, trains: bool) -> None:
    make, shapes, options, graphs = CASES[name]
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = make().train(trains)
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend="amp_compiler", options=OPTIONS, **options)
    with torch.set_grad_enabled(trains):
        for shape in shapes:
            x = torch.randn(shape)
            if name == "mark_dynamic":
                torch._dynamo.mark_dynamic(x, 0)
            result = compiled(x)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                expected = plain(x)
            torch.testing.assert_close(result, expected.float(), rtol=2**-6, atol=2**-6, check_dtype=False)
            if trains:
                for got, wanted in zip(gradients(model, result), gradients(plain, expected), strict=True):
                    assert (got - wanted).norm() <= 2**-6 * wanted.norm()
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.compiles
@pytest.mark.slow
def test_a_cache_that_grows_with_every_token() -> None:
    """The prompt, the first token, and all that follow: three graphs."""
    transformers = pytest.importorskip("transformers")
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    prompt = torch.randint(3, 60, (2, 5))
    settings = {
        "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None,
        "return_dict_in_generate": True, "output_logits": True,
    }  # fmt: skip
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model.generate(prompt, **settings)
    model.forward = torch.compile(model.forward, backend="amp_compiler", options=OPTIONS)
    made = model.generate(prompt, **settings)
    assert torch.equal(made.sequences, expected.sequences)
    for got, wanted in zip(made.logits, expected.logits, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2**-6, atol=2**-6)
    assert counters["stats"]["unique_graphs"] == 3
