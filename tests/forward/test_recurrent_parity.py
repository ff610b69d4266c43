"""Recurrent layers and cells are no less exact than under torch.autocast, and no longer to compile for more steps."""

import copy
import statistics

import pytest
import torch
from torch import nn
from toys import relative

import amp_compiler as amp

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Cells(nn.Module):
    """A cell that is called step by step."""

    def __init__(self, cell, **options):
        super().__init__()
        self.cell = cell(16, 32, **options)

    def forward(self, x):
        state, result = None, []
        for step in x:
            state = self.cell(step, state)
            result.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(result)


class Layers(nn.Module):
    """A recurrent network, with more in front of it if asked; the states start at zeros, or where the caller says."""

    def __init__(self, kind, *sizes, behind=False, **options):
        super().__init__()
        self.front = nn.Linear(sizes[0], sizes[0]) if behind else nn.Identity()
        self.recurrent = kind(*sizes, **options)

    def forward(self, x, state=None):
        out, last = self.recurrent(self.front(x), state)
        return torch.cat([out, last]) if isinstance(last, torch.Tensor) and out.shape[1:] == last.shape[1:] else out


CASES = {
    "gru": (lambda: Layers(nn.GRU, 16, 32), 20),
    "gru behind a product": (lambda: Layers(nn.GRU, 16, 32, behind=True), 15),
    "gru, two layers, both ways": (lambda: Layers(nn.GRU, 16, 32, 2, bidirectional=True, bias=False), 8),
    "rnn": (lambda: Layers(nn.RNN, 16, 32, batch_first=True), 15),
    "lstm": (lambda: Layers(nn.LSTM, 16, 32), 20),
    "lstm with a projection": (lambda: Layers(nn.LSTM, 16, 32, proj_size=8), 10),
    "gru cell": (lambda: Cells(nn.GRUCell), 10),
    "lstm cell": (lambda: Cells(nn.LSTMCell, bias=False), 10),
}
ALL = [(name, ("bf16", "fp16")[number % 2]) for number, name in enumerate(CASES)]


def require_lstm(dtype):
    """Skips where torch's LSTM raises in training, as it does in types for which oneDNN has none for this CPU."""
    try:
        with torch.autocast("cpu", dtype=dtype):
            nn.LSTM(16, 32)(torch.ones(1, 4, 16, requires_grad=True))
    except RuntimeError as error:
        pytest.skip(f"torch.autocast raises on this processor: {error}")


def measured(run, model, x):
    """Output and gradients of one weighted sum."""
    x = x.clone().requires_grad_()
    out = run(x)
    generator = torch.Generator().manual_seed(1)
    (out.to(x.dtype) * torch.randn(out.shape, generator=generator).to(x.dtype)).sum().backward()
    return [out.detach(), x.grad, *[one.grad for one in model.parameters()]]


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("name", "dtype"), ALL)
def test_a_compiled_model_is_no_worse_than_autocast(name, dtype):
    """Errors are means over seeds, of gradients medians: that of relu jumps where a sum that is nearly 0 is rounded to
    the other side."""
    make, steps = CASES[name]
    if name == "lstm":
        require_lstm(TYPES[dtype])
    result = []
    for seed in range(3):
        torch.manual_seed(seed)
        model = make()
        x = torch.randn(steps, 4, next(iter(model.parameters())).shape[1])
        exact, autocast, mine = (copy.deepcopy(model) for _ in range(3))
        reference = measured(exact.double(), exact, x.double())
        with torch.autocast("cpu", dtype=TYPES[dtype]):
            theirs = measured(autocast, autocast, x)
        ours = measured(amp.compile(mine, dtype=dtype, backend="eager"), mine, x)
        result.append([list(map(relative, side, reference)) for side in (theirs, ours)])
    sides = ([*zip(*side, strict=True)] for side in zip(*result, strict=True))
    theirs, ours = ([statistics.mean(side[0]), *map(statistics.median, side[1:])] for side in sides)
    assert 0 < ours[0] < 1.05 * theirs[0]
    assert statistics.mean(a / b for a, b in zip(ours[1:], theirs[1:], strict=True)) < 1.05
    for one, other in zip(ours[1:], theirs[1:], strict=True):
        assert one < 1.25 * other + torch.finfo(TYPES[dtype]).eps / 2


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
def test_a_state_that_is_given_gets_its_gradient(kind):
    torch.manual_seed(0)
    model = Layers(kind, 16, 32)
    x, state = torch.randn(5, 3, 16), torch.randn(1, 3, 32)
    result = []
    for run in (amp.compile(copy.deepcopy(model), dtype="bf16", backend="eager"), model):
        first = state.clone().requires_grad_()
        run(x, first).float().square().sum().backward()
        result.append(first.grad)
    assert relative(*result) < 0.02
