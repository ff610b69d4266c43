"""Dynamic sizes of models whose forward takes `**keywords`, as those of transformers do."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import amp_compiler as amp

BF16_ERROR = 2e-2


class Gathers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(8, 4)

    def forward(self, x, y=None, **others):
        z = self.fc(x) if y is None else self.fc(x) + y
        return z * others["others"].mean() / others["count"]


def call(size: int) -> dict[str, torch.Tensor]:
    data = torch.Generator().manual_seed(size)
    x, y, others = (torch.randn(size, width, generator=data) for width in (8, 4, 3))
    return {"y": y, "count": torch.tensor(3.0), "x": x, "others": others}


def right(compiled: nn.Module, reference: nn.Module, size: int) -> bool:
    expected = reference(**call(size))
    return bool((compiled(**call(size)) - expected).norm() < BF16_ERROR * expected.norm())


def programs(compiled: amp.CompiledModule) -> int:
    return compiled.compilations


def test_gathered_keywords_leave_sizes_dynamic():
    reference = Gathers()
    compiled = amp.compile(copy.deepcopy(reference), dtype="bf16", backend="eager")
    seen = []
    for size in (4, 3, 7, 2, 9):
        assert right(compiled, reference, size)
        seen.append(programs(compiled))
    assert seen[1:] == [seen[1]] * 4 and seen[1] <= 2 and "forward" not in vars(compiled.original)


def test_an_own_forward_is_as_it_was():
    reference = Gathers()
    model = copy.deepcopy(reference)
    mine = model.forward = lambda x, y=None, **others: 2 * Gathers.forward(model, x, y, **others)
    compiled = amp.compile(model, dtype="bf16", backend="eager")
    for size in (4, 3, 7):
        expected = 2 * reference(**call(size))
        assert (compiled(**call(size)) - expected).norm() < BF16_ERROR * expected.norm()
    assert vars(model)["forward"] is mine and programs(compiled) <= 2


@pytest.mark.parametrize("nested", [True, False])
def test_sizes_that_are_given_by_name(nested):
    rows = {0: torch.export.Dim.AUTO}
    gathered = {"count": None, "others": rows}
    shapes = {"x": rows, "y": rows, **({"others": gathered} if nested else gathered)}
    reference = Gathers()
    compiled = amp.compile(copy.deepcopy(reference), dtype="bf16", backend="eager", dynamic_shapes=shapes)
    for size in (4, 3, 7):
        assert right(compiled, reference, size)
    assert programs(compiled) == 1
