"""`place_operands`: weights in FP8 are state that the update writes; they equal what a step without the pass makes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import amp_compiler as amp

pytestmark = pytest.mark.usefixtures("bf16_kernels")


class Net(nn.Module):
    """Layers of which one is called twice, and one is no product with some batches, which update it all the same."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        for one in self.parameters():
            one.data = torch.randn(one.shape, generator=generator) / 6

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](self.layers[0](x).relu())
        last = self.layers[1]
        return ((last(x) if len(x) % 32 == 0 else x * last.weight.mean() + last.bias) - y).square().mean()


def trained(pipelines: Any, preset: str, **options: Any) -> tuple[list[Any], Any]:
    """What a run leaves behind each call, in which weights are written in every way, and its step."""
    model = Net()
    if options.pop("low", False):
        model.bfloat16()
    optimizer = getattr(torch.optim, options.pop("kind", "AdamW"))(model.parameters(), 1e-2)
    calls = options.pop("calls", 10)
    settings = {"dtype": "bf16", "backend": "eager", "passes": pipelines, **options}
    step = amp.training_step(model, lambda m, *batch: m(*batch), optimizer, rules=preset, **settings)
    weight, generator = model.layers[0].weight, torch.Generator().manual_seed(1)
    kept = {name: one.clone() for name, one in model.state_dict().items()}
    seen: list[Any] = []
    for number in range(calls):
        if number == 3:
            weight.data.mul_(2)  # past its version counter
        elif number == 5:
            with torch.no_grad():
                weight.add_(0.25)
        elif number == 8:
            model.load_state_dict(kept)
        x = torch.randn(48 if number in (4, 6) else 64, 32, generator=generator).to(weight.dtype)
        x[0, 0] = torch.inf if number == 7 else 1.0
        seen.append(step(x, torch.ones(len(x), 32)).clone())
        seen += [one.detach().clone() for one in model.parameters()]
    return seen, step


@pytest.mark.parametrize(
    ("preset", "options"),
    [
        ("fp8", {}),
        ("fp8-rowwise", {"accumulate": 2}),
        ("fp8-delayed", {"dtype": "fp16"}),
        ("mxfp8", {"low": True}),
        pytest.param(  # whose code is traced into the step
            "fp8", {"backend": "inductor", "kind": "Adagrad", "calls": 4}, marks=pytest.mark.compiles
        ),
    ],
)
def test_weights_in_fp8_are_what_a_step_would_make(preset: str, options: dict[str, Any]) -> None:
    seen, step = trained((), preset, **options)
    expected, other = trained(amp.pipelines.STEP.skip("place_operands"), preset, **options)
    calls = options.get("calls", 10)
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(seen, expected, strict=True))
    assert len({float(one) for one in seen[:: len(seen) // calls]}) > calls - 2
    assert step.skipped_steps == other.skipped_steps
    texts = [step.stages[name].text.split("grad_check")[0] for name in ("gather_weights", "place_operands")]
    rounded, now = (len(re.findall(r": float8_\w+\[32.*= aten._to_copy", text)) for text in texts)
    assert rounded - now == {"fp8": 2, "fp8-rowwise": 4, "fp8-delayed": 0, "mxfp8": 4}[preset]
