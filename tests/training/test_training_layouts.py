"""Channels last in a step, tried on a CPU: it computes the same, and what it returns lies as before."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_compiler as amp
from amp_compiler.passes.step import channels_last

pytestmark = pytest.mark.usefixtures("bf16_kernels")

LAST = torch.channels_last


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.norm = nn.Conv2d(3, 80, 3, bias=False), nn.BatchNorm2d(80)
        self.wide, self.point = nn.Conv2d(80, 72, 3, 2, padding=1), nn.Conv2d(72, 80, 1)
        self.head = nn.Linear(80 * 9, 10)

    def forward(self, x):
        hidden = F.max_pool2d(F.relu(self.norm(self.stem(x))), 2)
        hidden = self.point(F.relu(self.wide(hidden)))
        return self.head(hidden.flatten(1)), hidden.view(-1), hidden.transpose(2, 3)


def loss_of(model, x, y):
    logits, *aux = model(x)
    return F.cross_entropy(logits, y), aux


@pytest.fixture
def anywhere(monkeypatch):
    """The pass works on a CPU, where the update's own code takes any layout with the backend that runs node by node."""
    monkeypatch.setattr(channels_last, "_DEVICE", "cpu")
    monkeypatch.setattr(channels_last, "puts_channels_last", lambda graph: True)


def run(steps=5, sizes=(4,), **options):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    step = amp.training_step(model, loss_of, optimizer, dtype="bf16", backend="eager", dynamic_shapes=None, **options)
    torch.manual_seed(1)
    made = []
    for number in range(steps):
        size = sizes[number % len(sizes)]
        made.append(step(torch.randn(size, 3, 14, 14), torch.randint(0, 10, (size,))))
    return model, step, made


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"clip_norm": 0.1}, {"sizes": (4, 6)}], ids=str)
def test_a_step_computes_the_same(options, request):
    plain = run(**options)
    request.getfixturevalue("anywhere")
    turned = run(**options)
    for (loss, aux), (loss_then, aux_then) in zip(turned[2], plain[2], strict=True):
        torch.testing.assert_close(loss, loss_then, rtol=1e-3, atol=0)  # a quarter of a unit in BF16's last place
        for one, other in zip(aux, aux_then, strict=True):
            assert one.stride() == other.stride() and one.dtype == other.dtype
            assert float((one - other).float().norm() / other.float().norm()) < 2e-3
    for one, other in zip(turned[0].parameters(), plain[0].parameters(), strict=True):
        assert one.is_contiguous()
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    assert any(program.stages.changed("channels_last") for program in turned[1]._programs.values())
    assert not any(program.stages.changed("channels_last") for program in plain[1]._programs.values())


def test_all_programs_share_one_copy_of_a_filter(anywhere, monkeypatch):
    """A program that would rather not have it so reads it all the same."""
    model, step, _ = run(3)
    before = {
        name: step._lows._copies[id(one)][torch.bfloat16] for name, one in model.named_parameters() if one.dim() == 4
    }
    assert {name: one.is_contiguous(memory_format=LAST) for name, one in before.items()} == dict.fromkeys(before, True)
    monkeypatch.setattr(channels_last, "puts_channels_last", lambda graph: False)
    for size in (6, 4, 6):
        step(torch.randn(size, 3, 14, 14), torch.randint(0, 10, (size,)))
    assert len(step._programs) == 2
    for name, one in model.named_parameters():
        if one.dim() == 4:
            copy = step._lows._copies[id(one)][torch.bfloat16]
            assert copy is before[name] and torch.equal(copy, one.bfloat16())


def test_a_loaded_state_reaches_the_copies(anywhere):
    model, step, _ = run(2)
    with torch.no_grad():
        model.load_state_dict({name: one * 0.5 for name, one in model.state_dict().items()})
    step(torch.randn(4, 3, 14, 14), torch.randint(0, 10, (4,)))
    for one in (model.stem.weight, model.wide.weight):
        copy = step._lows._copies[id(one)][torch.bfloat16]
        assert torch.equal(copy, one.bfloat16()) and copy.is_contiguous(memory_format=LAST)
