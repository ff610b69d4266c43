"""`torch.compile(model, backend="amp_compiler")` for sizes that vary: autocast's numbers, and no compilation a size."""

from __future__ import annotations

import pytest
import torch
from torch import nn

counters = torch._dynamo.utils.counters
OPTIONS = {"dtype": "bf16"}


@pytest.mark.parametrize("options", [{"dynamic": True}, {}], ids=["dynamic=True", "mark_dynamic"])
def test_sizes_that_are_said_to_vary_are_one_graph(options) -> None:
    torch._dynamo.reset()
    counters.clear()
    model = nn.Linear(16, 4)
    compiled = torch.compile(model, backend="amp_compiler", options={**OPTIONS, "backend": "eager"}, **options)
    for rows in (8, 9, 10):
        x = torch.randn(rows, 16)
        if not options:
            torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(x), model(x), rtol=2**-6, atol=2**-6)
    assert counters["stats"]["unique_graphs"] == 1


def test_a_block_is_compiled_once_for_all_layers_of_its_kind() -> None:
    """The input of the first layer needs no gradient, that of the others does: two graphs of six layers."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.relu(self.up(self.norm(x))))

    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = nn.Sequential(*[Block() for _ in range(6)]), torch.randn(8, 16)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
    expected.square().mean().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    counters.clear()
    for block in model:
        block.compile(backend="amp_compiler", options={**OPTIONS, "backend": "eager"})
    result = model(x)
    torch.testing.assert_close(result, expected, rtol=2**-6, atol=2**-6)
    result.square().mean().backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert (parameter.grad - gradient).norm() <= 2**-6 * gradient.norm()
    assert counters["stats"]["unique_graphs"] == 2
