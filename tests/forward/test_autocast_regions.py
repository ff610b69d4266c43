"""`torch.autocast` regions in a model's own text that name a type; rows of tests/behaviour have the others."""

import pytest
import torch
from torch import nn

import amp_compiler as amp

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


LOWS = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Nested(nn.Module):
    """A region in the other 16-bit type, with one in it in which autocast is off, and a layer behind it.

    Its graph breaks in front of the region, within it, or not at all.
    """

    def __init__(self, broken: str, **region) -> None:
        super().__init__()
        self.before, self.inside, self.off, self.after = (nn.Linear(8, 8) for _ in range(4))
        self.broken, self.region = broken, region

    def forward(self, x):
        y = self.before(x)
        if self.broken == "before" and y.sum() > 1e9:
            y = -y
        with torch.autocast("cpu", **self.region):
            y = self.inside(y).softmax(-1)
            if self.broken == "within" and y.sum() > 1e9:
                y = -y
            with torch.autocast("cpu", enabled=False):
                y = self.off(y.float())
            y = self.inside(y)
        return self.after(y), y


@pytest.mark.parametrize(
    ("dtype", "named", "broken"), [("fp16", "bf16", ""), ("bf16", "fp16", "before"), ("fp16", "bf16", "within")]
)
def test_a_region_in_the_other_16_bit_type_gives_what_nested_autocast_gives(dtype, named, broken):
    """To the bit within the region; FP16 products on a CPU are FP32 ones of rounded operands, rounded once."""
    torch.manual_seed(0)
    model = Nested(broken, dtype=LOWS[named])
    with torch.autocast("cpu", LOWS[dtype]):
        after, within = model(X)
        wanted = torch.autograd.grad(model(X)[0].sum(), model.before.weight)[0]
    compiled = amp.compile(model, dtype=dtype, backend="eager")
    result = compiled(X)
    assert compiled.plan.nodes[0].name.startswith("graph0/") == bool(broken)
    assert result[1].dtype is LOWS[named] and torch.equal(result[1], within)
    assert torch.allclose(result[0], after.float(), rtol=2 * torch.finfo(LOWS[dtype]).eps, atol=4e-3)
    gradient = torch.autograd.grad(compiled(X)[0].sum(), model.before.weight)[0]
    assert torch.allclose(gradient, wanted, rtol=2**-5, atol=2**-7 * float(wanted.abs().max()))
    message = [node for node in compiled.plan.nodes if f"dtype={LOWS[named]}) region" in node.reason]
    assert {node.precision for node in message} == {"keep"}


@pytest.mark.parametrize("dtype", LOWS)
def test_a_region_without_a_type_has_the_plans_as_in_nested_autocast(dtype):
    torch.manual_seed(0)
    model, default = Nested(""), torch.get_autocast_dtype("cpu")
    with torch.autocast("cpu", LOWS[dtype]):
        wanted = model(X)[0].float()
    with torch.autocast("cpu", LOWS["fp16" if dtype == "bf16" else "bf16"]):  # the caller's counts for nothing
        compiled = amp.compile(model, dtype=dtype, backend="eager")
        result = compiled(X)[0]
    assert torch.allclose(result, wanted, rtol=2 * torch.finfo(LOWS[dtype]).eps, atol=4e-3)
    assert torch.get_autocast_dtype("cpu") is default
    precisions = {node.module: node.precision for node in compiled.plan.nodes if node.op == "aten.linear"}
    assert precisions == {"before": "low", "inside": "low", "off": "fp32", "after": "low"}
