"""The 16-bit copies of masters: laid out as they, the same tensors from step to step."""

from __future__ import annotations

import pytest
import torch

from amp_compiler.training.state import LowWeights

LAYOUTS = [torch.contiguous_format, torch.channels_last]


def master(layout):
    torch.manual_seed(0)
    return torch.nn.Parameter(torch.randn(6, 5, 3, 3).to(memory_format=layout))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_copy_lies_as_its_master_and_stays_where_it_is(layout):
    low_weights, weight = LowWeights(), master(layout)
    copy = low_weights.get(weight, torch.bfloat16)
    assert copy.stride() == weight.stride() and torch.equal(copy, weight.bfloat16())
    assert low_weights.get(weight, torch.bfloat16) is copy
    with torch.no_grad():
        weight.mul_(3)
    low_weights.follow(weight)
    assert torch.equal(copy, weight.bfloat16()) and low_weights.get(weight, torch.bfloat16) is copy


def test_it_is_made_anew_where_its_master_is_laid_out_anew():
    low_weights, weight = LowWeights(), master(torch.contiguous_format)
    before = low_weights.get(weight, torch.bfloat16)
    weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    after = low_weights.get(weight, torch.bfloat16)
    assert before.is_contiguous() and after.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(before, after)
