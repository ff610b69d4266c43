"""On small models amp.compile is as accurate as torch.autocast and casts no more; `benchmarks/` has the larger ones."""

from pathlib import Path

import pytest
import torch
from torch import nn

import amp_compiler as amp

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
SLOW = ("gpt2", "bert", "llama", "t5", "resnet50", "segformer")  # seconds each
QUICK = (
    ("lstm", 2),
    *(pytest.param(name, 2, marks=pytest.mark.slow) for name in SLOW),
)


@pytest.mark.usefixtures("bf16_kernels")
@pytest.mark.parametrize(("name", "seeds"), QUICK)
def test_errors_and_bytes_are_within_the_bounds(bench, name, seeds, request):
    if name == "lstm":
        request.getfixturevalue("bf16_lstm")
    parity = bench["parity"]
    result = parity.measure(name, parity.Settings(size="tiny", seeds=seeds))
    assert not result.broken()
    assert result.low_nodes > 0
    # Without rounding anywhere the comparison would say nothing.
    assert result.autocast_output_error > 1e-4
    assert result.amp_output_error > 1e-4
    assert result.amp_bytes > 0


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


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        (lambda y: nn.functional.softmax(y, -1, dtype=torch.float32), torch.bfloat16),
        (lambda y: y.cumsum(0, dtype=torch.float32), torch.float16),
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
    result = amp.compile(model, dtype=dtype, backend="eager")(x)
    error = torch.finfo(dtype).eps * float(expected.abs().max())  # the last product's rounding, and one that it reads
    torch.testing.assert_close(result, expected, rtol=0, atol=2 * error)
