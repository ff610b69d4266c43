"""The 16-bit copies of masters: laid out as they or with the channels last, the same tensors from step to step."""

from __future__ import annotations

import torch

from amp_compiler.training.state import LowWeights

LAST = torch.channels_last


def master():
    torch.manual_seed(0)
    return torch.nn.Parameter(torch.randn(6, 5, 3, 3))


def test_a_copy_has_its_channels_last_and_stays_where_it_is():
    lows, weight = LowWeights(), master()
    assert lows.channels_last(weight, torch.bfloat16) is None
    copy = lows.get(weight, torch.bfloat16, channels_last=True)
    assert copy.is_contiguous(memory_format=LAST) and not copy.is_contiguous()
    assert torch.equal(copy, weight.bfloat16())
    assert lows.get(weight, torch.bfloat16, channels_last=True) is copy
    assert lows.channels_last(weight, torch.bfloat16) is True and lows.channels_last(weight, torch.float16) is None


def test_it_follows_a_master_that_was_written_outside():
    lows, weight = LowWeights(), master()
    copy = lows.get(weight, torch.bfloat16, channels_last=True)
    with torch.no_grad():
        weight.mul_(3)
    lows.follow(weight)
    assert torch.equal(copy, weight.bfloat16()) and copy.is_contiguous(memory_format=LAST)
    assert lows.get(weight, torch.bfloat16, channels_last=True) is copy


def test_without_it_a_copy_lies_as_its_master():
    lows, weight = LowWeights(), master()
    copy = lows.get(weight, torch.bfloat16)
    assert copy.is_contiguous() and lows.channels_last(weight, torch.bfloat16) is False
    turned = lows.get(weight, torch.bfloat16, channels_last=True)
    assert turned.is_contiguous(memory_format=LAST) and torch.equal(turned, weight.bfloat16())
    back = lows.get(weight, torch.bfloat16)
    assert back.is_contiguous() and torch.equal(back, copy) and lows.channels_last(weight, torch.bfloat16) is False
