"""Convolutions on a CUDA device: channels last both ways, weights copied so by the update, as exact as eager torch."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_compiler as amp

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.norm = nn.Conv2d(3, 128, 3, bias=False), nn.BatchNorm2d(128)
        self.wide, self.point = nn.Conv2d(128, 96, 3, 2), nn.Conv2d(96, 128, 1)
        self.head = nn.Linear(128 * 6 * 6, 10)

    def forward(self, x):
        hidden = self.point(F.relu(self.wide(F.relu(self.norm(self.stem(x))))))
        return self.head(hidden.flatten(1)), hidden


def loss_of(model, x, y):
    logits, hidden = model(x)
    return F.cross_entropy(logits.float(), y), hidden


def batches(count, size=32):
    generator = torch.Generator("cuda").manual_seed(0)
    for _ in range(count):
        x = torch.randn(size, 3, 16, 16, device="cuda", generator=generator)
        yield x, torch.randint(0, 10, (size,), device="cuda", generator=generator)


def make(kind=torch.optim.AdamW, dtype="bf16", **options):
    model = Net().cuda()
    return model, amp.training_step(model, loss_of, kind(model.parameters(), 1e-3), dtype=dtype, **options)


def lows(step, model):
    """The 16-bit copies of the filters, by name."""
    found = {name: step._lows._copies.get(id(one)) for name, one in model.named_parameters() if one.dim() == 4}
    return {name: next(iter(kept.values())) for name, kept in found.items()}


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("dtype", list(TYPES))
def test_a_step_learns_as_eager_torch_does(kind, dtype):
    model, step = make(kind, dtype, loss_scale=None)
    eager = copy.deepcopy(model)
    optimizer = kind(eager.parameters(), 1e-3)
    mine, theirs = [], []
    for x, y in batches(30):
        loss, hidden = step(x, y)
        assert hidden.is_contiguous(), "what a step returns lies as the model made it"
        mine.append(loss)
        with torch.autocast("cuda", dtype=TYPES[dtype]):
            loss, _ = loss_of(eager, x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        theirs.append(loss.detach())
    assert step.execution == "replayed as one CUDA graph"
    error = (torch.stack(mine) - torch.stack(theirs)).abs() / torch.stack(theirs)
    assert float(error.max()) < 0.05 and float(error[0]) < 5e-3
    for name, low in lows(step, model).items():
        weight = model.get_parameter(name)
        assert weight.is_contiguous() and torch.equal(low, weight.to(TYPES[dtype]))
        assert low.is_contiguous(memory_format=torch.channels_last)


def test_nothing_turns_a_weight_in_a_step():
    _, step = make()
    for x, y in batches(6):
        step(x, y)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step(x, y)
        torch.cuda.synchronize()
    names = [event.key for event in profile.key_averages()]
    turned = [name for name in names if "nchwToNhwc" in name or "nhwcToNchw" in name or "direct_copy" in name]
    assert not turned, turned


@pytest.mark.parametrize("accumulate", [1, 3])
def test_signatures_share_the_copies_and_a_loaded_state_reaches_them(accumulate):
    model, step = make(accumulate=accumulate, dynamic_shapes=None)
    for number in range(12):
        for x, y in batches(1, size=32 if number % 2 else 16):
            step(x, y)
    before = {name: low.data_ptr() for name, low in lows(step, model).items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    for x, y in batches(accumulate):
        step(x, y)
    assert before == {name: low.data_ptr() for name, low in lows(step, model).items()}
    for name, low in lows(step, model).items():
        assert torch.equal(low, model.get_parameter(name).bfloat16())
