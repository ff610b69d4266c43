"""`buffers: skip_nonfinite` in a rule file: a batch that is not finite leaves BatchNorm as it was."""

import copy

import pytest
import torch
from torch import nn

import amp_compiler as amp

SKIP = {"version": 1, "extends": "default", "buffers": "skip_nonfinite"}
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """What `large` multiplies overflows in FP16 behind the norm; `broken` breaks the graph there."""

    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((2,), -torch.inf))  # what is not written is not looked at
        self.register_buffer("eighth", torch.ones(2).to(torch.float8_e4m3fn))
        self.fc, self.norm, self.out, self.broken = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2), broken

    def forward(self, x, large: float = 1.0):
        y = self.norm(self.fc(x))
        if self.broken:
            torch._dynamo.graph_break()
        return self.out(y * large)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.compiles])])
@pytest.mark.parametrize("grad", [True, False])
def test_a_batch_that_is_not_finite_leaves_the_buffers(grad, backend):
    torch.manual_seed(0)
    net = Net()
    plain = amp.compile(copy.deepcopy(net), dtype="fp16", backend=backend)
    model = amp.compile(net, rules=SKIP, dtype="fp16", backend=backend)
    with torch.set_grad_enabled(grad):
        for x, large in ((X, 1.0), (X * 1e6, 1.0), (X, 1e6), (-X, 1.0)):
            before = [one.clone() for one in model.buffers()]
            y = model(x, large)
            if bool(y.isfinite().all()):
                assert torch.equal(y, plain(x, large)) and not torch.equal(before[2], model.norm.running_mean)
            else:
                assert all(map(torch.equal, before, model.buffers()))
        assert all(map(torch.equal, plain.buffers(), model.buffers())) and int(model.norm.num_batches_tracked) == 2


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_call_in_subgraphs_is_looked_at_whole(momentum):
    """An average of all batches breaks the graph itself: it reads how many there were."""
    net = Net(broken=momentum is not None)
    net.norm.momentum = momentum
    model = amp.compile(net, rules=SKIP, dtype="fp16", backend="eager")
    for x, large, count in ((X, 1e6, 0), (X, 1.0, 1), (X * 1e6, 1.0, 1), (X, 1e6, 1), (-X, 1.0, 2)):
        before = [one.clone() for one in model.buffers()]
        model(x, large)
        assert int(model.norm.num_batches_tracked) == count and len(model._amp_subgraphs.last) > 1
        assert all(map(torch.equal, before, model.buffers())) == (count == int(before[-1]))


def test_the_word_is_inherited_and_another_is_refused():
    model = amp.compile(Net(), rules={"version": 1, "extends": "default"}, dtype="fp16", backend="eager")
    model(X * 1e6)
    assert int(model.norm.num_batches_tracked) == 1 and not model.norm.running_mean.isfinite().all()
    assert amp.load_rules(SKIP).buffers == "skip_nonfinite" and amp.load_rules("default").buffers == "always"
    with pytest.raises(amp.RuleError, match="skip_nonfinite"):
        amp.load_rules({**SKIP, "buffers": "skip_nonfinit"})
