"""`torch.autocast` regions in a model's own text that name a type."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import amp_compiler as amp

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Region(nn.Module):
    """A linear layer in a region of its own; `whole` says whether torch.export can take the model."""

    def __init__(self, whole: bool = True, **region) -> None:
        super().__init__()
        self.before, self.inside = nn.Linear(8, 8), nn.Linear(8, 8)
        self.whole, self.region = whole, region

    def forward(self, x):
        y = self.before(x)
        if not self.whole and y.sum() > 1e9:
            y = -y
        with torch.autocast("cpu", **self.region):
            return self.inside(y).float()


def trained(model, dtype):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = amp.training_step(model, lambda m, x: m(x).square().mean(), optimizer, dtype=dtype, backend="eager")
    return step(X)


def called(model, dtype):
    return amp.compile(model, dtype=dtype, backend="eager")(X)


def explained(model, dtype):
    return amp.explain(model, (X,), dtype=dtype)


@pytest.mark.parametrize("run", [trained, called, explained])
@pytest.mark.parametrize(("dtype", "named"), [("fp16", torch.bfloat16), ("bf16", torch.float16)])
def test_a_region_in_the_other_16_bit_type_is_refused_with_its_line(dtype, named, run):
    with pytest.raises(amp.LoweringError, match=rf"dtype={named}.*planned for is {dtype}") as caught:
        run(Region(dtype=named), dtype)
    assert "test_autocast_regions.py:" in caught.value.where and f"'{'bf16' if dtype == 'fp16' else 'fp16'}'" in str(
        caught.value
    )


def test_a_region_without_a_type_has_torchs_default():
    called(Region(), "bf16")
    with pytest.raises(amp.LoweringError, match=r"dtype=torch\.bfloat16"):
        called(Region(), "fp16")


def test_it_is_refused_in_a_model_that_runs_in_pieces():
    with pytest.raises(amp.LoweringError, match="planned for is fp16") as caught:
        called(Region(whole=False, dtype=torch.bfloat16), "fp16")
    assert "test_autocast_regions.py:" in caught.value.where


@pytest.mark.parametrize("run", [trained, called, explained])
@pytest.mark.parametrize("region", [{"dtype": torch.float16}, {"dtype": torch.bfloat16, "enabled": False}])
def test_a_region_that_asks_for_no_other_type_is_taken(region, run):
    """Its node runs in the plan's type, or in FP32 where autocast is off."""
    made = run(Region(**region), "fp16")
    if run is not explained:
        assert made.isfinite().all()
        return
    precisions = [node.precision for node in made.nodes if node.op == "aten.linear"]
    assert precisions == ["low", "low" if region.get("enabled", True) else "fp32"]


def test_a_step_that_plans_nothing_refuses_nothing():
    model = Region(dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = amp.training_step(model, lambda m, x: m(x).mean(), optimizer, enabled=False, backend="eager")
    assert step(X).isfinite()
