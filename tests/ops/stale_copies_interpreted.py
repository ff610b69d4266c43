"""The Triton kernels that compare copies, under Triton's interpreter; `test_kernels.py` runs this file.

It needs TRITON_INTERPRET=1 before Triton is imported; see `kernels_interpreted.py` for where the interpreter differs.
"""

import pytest
import torch
from interpreting import convert_as_devices_do

from amp_compiler.ops.cuda import update
from amp_compiler.ops.cuda.pointer_tables import TableCache
from amp_compiler.ops.cuda.stale_copies import DeviceCopies

SHAPES = [(3,), (1024,), (1025,), (100, 77), (64, 65, 3, 3)]


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch):
    convert_as_devices_do(monkeypatch)
    monkeypatch.setattr(update, "TABLES", TableCache())


def pair(shape, dtype):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    weight.view(-1)[:3] = torch.tensor([float("nan"), float("inf"), 1e30])
    return weight, weight.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("takes", [False, True])
def test_what_differs_is_brought_together(dtype, takes):
    pairs = [pair(shape, dtype) for shape in SHAPES]
    copies = DeviceCopies(pairs, takes)
    before = [(weight.clone(), low.clone()) for weight, low in pairs]
    for turn in range(3):
        copies.follow(turn)
    assert copies.unread()() == []
    for (weight, low), (old, old_low) in zip(pairs, before, strict=True):
        assert torch.equal(weight.view(torch.int32), old.view(torch.int32))
        assert torch.equal(low.view(torch.int16), old_low.view(torch.int16))
    for place in (1, 3, 4):
        weight, low = pairs[place]
        (low if takes else weight).mul_(-1)
    copies.follow(3)
    assert copies.unread()() == [1, 3, 4]
    for place, (weight, low) in enumerate(pairs):
        assert torch.equal(weight.to(dtype).nan_to_num(5.0), low.nan_to_num(5.0)), place
        sign = -1 if place in (1, 3, 4) else 1
        wanted = before[place][1].float() if takes and sign < 0 else before[place][0]
        assert torch.equal(weight.nan_to_num(5.0), (wanted * sign).nan_to_num(5.0)), place


def test_every_element_is_looked_at_in_turn():
    weight, low = pair((100, 77), torch.bfloat16)
    copies = DeviceCopies([(weight, low)], False)
    weight[99, 76] = 7.0
    for turn in range(-(-7700 // 1024)):
        copies.follow(turn)
    assert float(low[99, 76]) == 7.0
