"""What autograd keeps for the backward where FP16 products are emulated in FP32 on a CPU: the FP16 operands."""

import pytest
import torch
from torch import nn
from toys import saved_bytes

import amp_compiler as amp

X = torch.randn(256, 32, generator=torch.Generator().manual_seed(0))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 32))


def kept(model, call, x=X) -> int:
    return saved_bytes(model, call, x)[0]


@pytest.mark.slow
@pytest.mark.compiles
def test_as_many_bytes_are_kept_as_by_autocast():
    model = net()

    def autocast(x):
        with torch.autocast("cpu", torch.float16):
            return model(x)

    compiled = amp.compile(model, dtype="fp16")
    compiled(X)
    assert kept(model, compiled) <= kept(model, autocast) < 0.6 * kept(model, model)


class Behind(nn.Module):
    """A recurrent layer behind a product."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.layer = nn.Linear(64, 64), nn.GRU(64, 64)

    def forward(self, x):
        return self.layer(self.fc(x))[0]


@pytest.mark.slow
@pytest.mark.compiles
def test_what_a_recurrent_layer_makes_is_kept_in_16_bits():
    model, x = Behind(), torch.randn(16, 32, 64)
    compiled = amp.compile(model, dtype="fp16")
    compiled(x)
    ours, plain = kept(model, compiled, x), kept(model, model, x)
    assert ours < 0.65 * plain
    with torch.autocast("cpu", torch.float16):
        assert ours <= 1.03 * kept(model, model, x)  # the last state of 16 is a tensor of its own
