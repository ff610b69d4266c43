"""Torch's own layers around a break: their files are closed to Dynamo, and yet all products run under the plan."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import amp_compiler as amp

pytestmark = pytest.mark.long

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


class Break(nn.Module):
    """A branch on values."""

    def forward(self, x):
        return -x if x.sum() > 1e9 else x * 2


class Loop(nn.Module):
    """Breaks in a loop, so that Dynamo gives up the whole forward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Conv1d(1, 1, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            if x.sum() > 1e9:
                break
        return self.head(x[:, None])


class BreakingEncoderLayer(nn.TransformerEncoderLayer):
    def forward(self, src, *args, **kwargs):
        result = super().forward(src, *args, **kwargs)
        return -result if result.sum() > 1e9 else result


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), Break(), nn.Linear(8, 4))

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


# name: model, products
MODELS = {
    "BatchNorm that averages": (
        lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16, momentum=None), nn.Linear(16, 4), nn.ReLU()),
        2,
    ),
    "a loop of the user's": (Loop, 2),  # the layers of one shape are one subgraph
    "an encoder around one's own layer": (
        lambda: nn.TransformerEncoder(BreakingEncoderLayer(8, 2, 16, 0.0), 1, enable_nested_tensor=False),
        4,
    ),
    "a checkpoint": (Checkpointed, 2),
}


def pair(name):
    torch.manual_seed(0)
    model = MODELS[name][0]()
    return model, copy.deepcopy(model)


@pytest.mark.parametrize("name", MODELS)
def test_a_break_within_torchs_layers(name):
    """Every product is in the plan; results, gradients and buffers are those of autocast."""
    model, plain = pair(name)
    compiled = amp.compile(model, dtype="bf16", backend="eager")
    for _ in range(2):
        result, expected = compiled(X), plain(X)
        result.sum().backward()
        expected.sum().backward()
    torch.testing.assert_close(result, expected, rtol=5e-2, atol=5e-2)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-1, atol=1e-1)
    torch.testing.assert_close(list(model.buffers()), list(plain.buffers()), rtol=1e-2, atol=1e-2)
    families = [node.op for node in compiled.plan.nodes if node.family in ("matmul", "convolution", "attention")]
    assert compiled.execution != "as one graph" and len(families) >= MODELS[name][1]
    assert not torch.equal(result, expected)  # 16 bits it was


def test_an_average_over_many_calls_is_no_new_form():
    """BatchNorm without momentum weighs each call by a number of its own."""
    model, plain = pair("BatchNorm that averages")
    compiled = amp.compile(model, dtype="bf16", backend="eager")
    with torch.no_grad():
        for _ in range(70):
            compiled(X), plain(X)
    assert compiled.compilations < 8
    torch.testing.assert_close(model[1].running_mean, plain[1].running_mean, rtol=1e-2, atol=1e-2)
