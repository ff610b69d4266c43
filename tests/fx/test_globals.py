"""Code that is of no module, as `exec`, `runpy.run_path`, doctest and notebooks' magics run it."""

from typing import Any

import pytest
import torch
from toys import eager_step

import amp_compiler as amp

CODE = """
import torch.nn.functional as F
from torch import nn

factor, calls = 1.0, 0

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return F.relu(self.inner(x)) * factor

def loss(model, x):
    return model(x).square().mean()

def counted(model, x):
    global calls
    calls += 1
    return loss(model, x)
"""


def scope(name: str | None) -> dict[str, Any]:
    result = {} if name is None else {"__name__": name}
    exec(CODE, result)
    torch.manual_seed(0)
    return result


def step_of(model: Any, loss: Any) -> amp.TrainingStep:
    return eager_step(model, loss, torch.optim.SGD(model.parameters(), 0.0), enabled=False)


@pytest.mark.parametrize("name", [None, "__main__", "is.nowhere"])
def test_its_globals_are_its_own(name):
    result, x = scope(name), torch.randn(3, 4)
    model = result["Model"]()
    step, compiled = step_of(model, result["loss"]), amp.compile(model, dtype="bf16", backend="eager")
    for factor in (1.0, 2.0):
        result["factor"], result[f"another_{factor:g}"] = factor, factor
        torch.testing.assert_close(step(x), result["loss"](model, x))
        torch.testing.assert_close(compiled(x), model(x), rtol=2**-6, atol=2**-6, check_dtype=False)
    assert "subgraph" not in step.execution and compiled.execution == "as one graph"
    compilations = len(step._choice.programs)
    result["unread"] = 0
    step(x)
    assert len(step._choice.programs) == compilations


def test_a_global_that_it_writes_is_written_at_each_call():
    result = scope(None)
    step = step_of(result["Model"](), result["counted"])
    for _ in range(3):
        step(torch.randn(3, 4))
    assert result["calls"] == 3
