"""What a prompt and a cell of a notebook show: a line or two, and a small table."""

import pytest
import torch
from torch import nn
from toys import sgd_step

import amp_compiler as amp

X = torch.ones(2, 4)


class Net(nn.Module):
    """Its name and its names of modules are text of a user's."""

    def __init__(self, times: int = 30) -> None:
        super().__init__()
        self.times = times
        self.layers = nn.ModuleDict({"<b>": nn.Linear(4, 4)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = self.layers["<b>"](x)
        return x


def step_of(model: nn.Module, calls: int = 1) -> amp.TrainingStep:
    step = sgd_step(model, lambda m, x: m(x).mean())
    for _ in range(calls):
        step(X)
    return step


SHOWN = {
    "plan": lambda: amp.explain(Net(), X, dtype="bf16"),
    "step": lambda: step_of(Net()),
    "stages": lambda: step_of(Net()).stages,
    "profile": lambda: amp.profile(Net(), [X], dtype="bf16"),
    "tune": lambda: amp.tune(Net(3), [X], dtype="bf16", tolerance=1e-6),
    "nonfinite": lambda: amp.find_nonfinite(Net(3), X * 1e30, dtype="fp16"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", SHOWN)
def test_a_cell_shows_a_small_table_or_text_and_a_prompt_a_line(name):
    shown = SHOWN[name]()
    cell = shown._repr_html_()
    assert "<table>" in cell or "<pre>" in cell
    assert "<b>" not in cell.replace("<p><b>", "")  # escaped
    assert len(cell) < 30_000
    for prompt in [repr(amp.load_rules("default")), *([repr(shown)] if name in ("plan", "stages", "step") else ())]:
        assert "\n" not in prompt and "object at" not in prompt and len(prompt) < 1000


def test_a_step_that_was_not_called_has_something_to_show():
    step = step_of(nn.Linear(4, 2), calls=0)
    assert repr(step) == "TrainingStep(Linear, SGD, bf16, not called yet)"
    assert "not called yet" in step._repr_html_()
