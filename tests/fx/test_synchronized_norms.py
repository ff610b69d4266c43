"""A `SyncBatchNorm` in the capture of a step: each of its calls is marked with its ranks, or the capture is refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from toys import Composed, mean_square

from amp_compiler.errors import CaptureError
from amp_compiler.fx.synchronized_norms import GROUPS, marked_norms
from amp_compiler.training.capture import capture_once
from amp_compiler.training.loss_module import LossModule


def marked(run, train=True):
    """How many batch norms are marked."""
    inner = Composed(lambda m, x: run(m.norm, x), norm=nn.SyncBatchNorm(4)).train(train)
    model = LossModule(inner, mean_square)
    model.__dict__[GROUPS] = lambda norm: ("all", 2)
    return marked_norms(capture_once(model, (torch.randn(6, 4),), None).captured.graph_module)


def alone(norm, x):
    """Over the rows of this rank, as torch computes it too."""
    return F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, True)


@pytest.mark.parametrize(
    ("run", "count"),
    [
        pytest.param(lambda norm, x: norm(x), 1, id="once"),
        pytest.param(lambda norm, x: norm(x) + norm(2 * x), 2, id="twice"),
        pytest.param(alone, 0, id="its tensors"),
        pytest.param(lambda norm, x: norm(x) + alone(norm, x), 1, id="beside its tensors"),
    ],
)
def test_each_call_is_marked(run, count):
    assert marked(run) == count
    assert marked(run, train=False) == 0


@pytest.mark.parametrize(
    "run", [lambda norm, x: norm.forward(x), lambda norm, x: norm(x) + norm.forward(2 * x)], ids=["alone", "beside"]
)
def test_a_call_past_the_module_is_refused(run):
    with pytest.raises(CaptureError, match=r"test_synchronized_norms\.py:\d+: .*of which SyncBatchNorm.*norm\(x\)"):
        marked(run)
