"""On small models amp.compile is as accurate as torch.autocast and casts no more; `benchmarks/` has the larger ones."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import amp_compiler as amp

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
SLOW = ("gpt2", "bert", "llama", "t5", "resnet50", "segformer")  # seconds each
QUICK = (
    ("gpt2", 1),
    ("lstm", 2),
    *(pytest.param(name, 2, marks=pytest.mark.slow) for name in SLOW),
)


@pytest.fixture(scope="module")
def bench():
    """The benchmark's modules, which are scripts beside each other and not part of the package."""
    pytest.importorskip("transformers")
    sys.path.insert(0, BENCHMARKS)
    try:
        import autocast_parity
        import models
        import parity
    finally:
        sys.path.remove(BENCHMARKS)
    return {"models": models, "parity": parity, "table": autocast_parity}


def row(bench, **changes):
    numbers = {
        field.name: {"model": "m", "worst_grad": "w"}.get(field.name, 10)
        for field in dataclasses.fields(bench["parity"].Parity)
    }
    return bench["parity"].Parity(**{**numbers, **changes})


@pytest.mark.usefixtures("bf16_kernels")
@pytest.mark.parametrize(("name", "seeds"), QUICK)
def test_errors_and_bytes_are_within_the_bounds(bench, name, seeds, request):
    if name == "lstm":
        request.getfixturevalue("bf16_lstm")
    found = bench["parity"].measure(name, bench["parity"].Settings(size="tiny", seeds=seeds))
    assert not found.broken()
    assert found.low_nodes > 0
    # Without rounding anywhere the comparison would say nothing.
    assert found.autocast_output_error > 1e-4
    assert found.amp_output_error > 1e-4
    assert found.amp_bytes > 0


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5", "vit", "convnext", "whisper", "mamba", "rwkv", "lstm"])
def test_a_model_gives_the_same_loss_twice(bench, name):
    models = bench["models"]
    losses = []
    for _ in range(2):
        model, kwargs = models.build(name, "tiny", seed=1)
        assert model.training
        losses += [models.loss_and_logits(model(**kwargs))[0].item() for _ in range(2)]
    assert len(set(losses)) == 1


def test_an_unknown_model_is_named(bench):
    with pytest.raises(ValueError, match="bert"):
        bench["models"].build("brt")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, []),
        ({"amp_output_error": 12.1}, ["output error 1.21"]),
        ({"amp_grad_error": 13.0}, ["gradient error 1.30"]),
        ({"amp_bytes": 11}, ["11 bytes"]),
        ({"amp_counted_bytes": 11}, ["11 counted"]),
        ({"amp_grad_error": float("nan")}, ["gradient error nan"]),
        ({"autocast_output_error": 0}, ["output error inf"]),
    ],
)
def test_broken_bounds_are_told(bench, changes, words):
    told = "; ".join(row(bench, **changes).broken())
    assert bool(told) == bool(words)
    for word in words:
        assert word in told


def test_return_bytes(bench):
    outputs = {"loss": torch.ones(()), "logits": torch.ones(4, dtype=torch.bfloat16), "index": torch.ones(2).long()}
    exact = {"loss": torch.ones(()), "logits": torch.ones(4), "index": torch.ones(2).long()}
    assert bench["parity"].return_bytes(outputs, exact) == 4 * 6
    assert bench["parity"].return_bytes(exact, exact) == 0


@pytest.mark.usefixtures("bf16_kernels", "bf16_lstm")
def test_the_results_file(bench, tmp_path, capsys):
    threads = torch.get_num_threads()
    path = tmp_path / "deep" / "parity.json"
    code = bench["table"].main(["--models", "lstm", "--seeds", "1", "--size", "tiny", "--json", str(path)])
    torch.set_num_threads(threads)
    assert code == 0
    assert "every model is within the bounds" in capsys.readouterr().out
    text = path.read_text(encoding="utf-8")
    data = json.loads(text)
    assert data["models"][0]["model"] == "lstm"
    assert set(data["versions"]) == {"python", "torch", "transformers"}
    assert str(Path.home()) not in text


class Inner(nn.Module):
    def forward(self, a, b):
        return torch.inner(a, b)


@pytest.mark.parametrize("shape", [(64,), (4, 64)])
def test_an_inner_product_is_autocasts(shape):
    """Of vectors it is `dot`, which autocast on a CPU leaves in FP32; of matrices it is `mm`, which it runs in BF16."""
    a, b = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        expected = torch.inner(a, b)
    model = amp.compile(Inner(), dtype="bf16", backend="eager")
    assert torch.equal(model(a, b), expected.float())
    assert [node.precision for node in model.plan.nodes] == ["low" if expected.dtype is torch.bfloat16 else "fp32"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "op",
    [
        lambda y: nn.functional.softmax(y, -1, dtype=torch.float32),
        lambda y: nn.functional.log_softmax(y, -1, dtype=torch.float32),
        lambda y: y.cumsum(0, dtype=torch.float32),
        lambda y: y.cumprod(0, dtype=torch.float32),
    ],
)
def test_an_op_that_is_told_its_type_is_no_cast_that_a_product_reads_past(op, dtype):
    class Between(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x):
            return self.last(op(self.first(x)))

    torch.manual_seed(0)
    model, x = Between(), torch.randn(4, 8)
    with torch.autocast("cpu", dtype):
        expected = model(x).float().detach()
    found = amp.compile(model, dtype=dtype, backend="eager")(x)
    error = torch.finfo(dtype).eps * float(expected.abs().max())  # the last product's rounding, and one that it reads
    torch.testing.assert_close(found, expected, rtol=0, atol=2 * error)
