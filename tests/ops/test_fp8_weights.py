"""`place_operands`: weights in FP8 are state of a step, and of inference; they equal what is made without the pass."""

import re
from typing import Any

import pytest
import torch
from torch import nn

import amp_compiler as amp
from amp_compiler.passes.step.place_operands import Operands

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


@pytest.mark.parametrize("preset", ["fp8", "fp8-rowwise", pytest.param("mxfp8", marks=pytest.mark.compiles)])
def test_inference_makes_them_once_and_where_a_weight_was_written(preset: str, monkeypatch: Any) -> None:
    backend = "inductor" if preset == "mxfp8" else "eager"
    calls, make, seen = [0], Operands.__call__, list[Any]()
    monkeypatch.setattr(Operands, "__call__", lambda self, weight: calls.append(1) or make(self, weight))
    x, y = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)), torch.ones(64, 32)
    for passes in ((), amp.pipelines.INFERENCE.skip("place_operands")):
        model = Net().eval()
        compiled = amp.compile(model, rules=preset, dtype="bf16", backend=backend, passes=passes)
        with torch.no_grad():
            for number in range(5):
                if number == 2:
                    model.layers[0].weight.data.mul_(2)  # past its version counter
                elif number == 4:
                    model.layers[1].weight.mul_(2)
                seen.append((float(compiled(x, y)), sum(calls)))
        exported = amp.export(model, (x, y), rules=preset, dtype="bf16").module()
        assert backend == "inductor" or float(exported(x, y)) == seen[-1][0]
    values, counts = zip(*seen, strict=True)
    assert values[:5] == values[5:] and len({*values[:5]}) == 3
    assert counts == (2, 2, 4, 4, 6, *[6] * 5)
