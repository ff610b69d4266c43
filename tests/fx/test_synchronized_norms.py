"""A `SyncBatchNorm` in a capture: each of its calls is marked with its ranks, or the capture is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from amp_compiler.errors import CaptureError
from amp_compiler.fx.capture import capture_module
from amp_compiler.fx.synchronized_norms import GROUPS, marked_norms


class Model(nn.Module):
    def __init__(self, run) -> None:
        super().__init__()
        self.run, self.norm = run, nn.SyncBatchNorm(4)
        self.__dict__[GROUPS] = lambda norm: ("all", 2)

    def forward(self, x):
        return self.run(self.norm, x)


@pytest.mark.parametrize(
    ("run", "count"), [(lambda norm, x: norm(x), 1), (lambda norm, x: norm(x) + norm(2 * x), 2)], ids=["once", "twice"]
)
def test_each_call_is_marked(run, count):
    assert marked_norms(capture_module(Model(run), (torch.randn(6, 4),)).graph_module) == count


@pytest.mark.parametrize(
    "run", [lambda norm, x: norm.forward(x), lambda norm, x: norm(x) + norm.forward(2 * x)], ids=["alone", "beside"]
)
def test_a_call_past_the_module_is_refused(run):
    with pytest.raises(CaptureError, match=r"lacks a batch norm of the SyncBatchNorm 'norm'.*norm\(x\)"):
        capture_module(Model(run), (torch.randn(6, 4),))
