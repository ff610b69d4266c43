"""What autograd keeps for the backward where FP16 products are emulated in FP32 on a CPU: the FP16 operands."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import amp_compiler as amp

X = torch.randn(256, 32, generator=torch.Generator().manual_seed(0))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 32))


def saved_bytes(model, call, x=X) -> int:
    """Bytes of all memory that is kept beside the parameters."""
    held = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in held:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call(x)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_as_many_bytes_are_kept_as_by_autocast(backend):
    model = net()

    def autocast(x):
        with torch.autocast("cpu", torch.float16):
            return model(x)

    compiled = amp.compile(model, dtype="fp16", backend=backend)
    compiled(X)
    assert saved_bytes(model, compiled) <= saved_bytes(model, autocast) < 0.6 * saved_bytes(model, model)


class Behind(nn.Module):
    """A layer behind a product."""

    def __init__(self, layer) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.layer = nn.Linear(64, 64), layer

    def forward(self, x):
        return self.layer(self.fc(x))[0]


LAYERS = {
    "gru": lambda: Behind(nn.GRU(64, 64)),
    "gru, two layers, both ways": lambda: Behind(nn.GRU(64, 64, 2, bidirectional=True)),
    "rnn": lambda: Behind(nn.RNN(64, 64)),
    "lstm": lambda: Behind(nn.LSTM(64, 64)),
}


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "eager") for name in LAYERS),
        pytest.param("gru", "inductor", marks=pytest.mark.slow),
    ],
)
def test_what_layers_make_is_kept_in_16_bits(name, backend):
    model, x = LAYERS[name](), torch.randn(16, 32, 64)
    compiled = amp.compile(model, dtype="fp16", backend=backend)
    compiled(x)
    ours, plain = saved_bytes(model, compiled, x), saved_bytes(model, model, x)
    assert ours < 0.65 * plain
    if name != "lstm":  # torch.autocast in FP16 raises there on most processors
        with torch.autocast("cpu", torch.float16):
            assert ours <= 1.03 * saved_bytes(model, model, x)  # the last state of 16 is a tensor of its own


class Attention(nn.Module):
    """Written out, with operands that `matmul` copies."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = (one.view(4, 64, 4, 8).transpose(1, 2) for one in self.fc(x).chunk(3, -1))
        return torch.relu(q @ k.transpose(-1, -2)) @ v


def test_copies_of_operands_are_kept_in_16_bits_too():
    model, plain = Attention(), Attention()
    compiled = amp.compile(model, dtype="fp16", backend="eager")
    assert saved_bytes(model, compiled) < 0.6 * saved_bytes(model, model)
    compiled(X).square().mean().backward()

    def wide(one, other):
        return (one.float() @ other.float()).half()

    y = nn.functional.linear(*(one.half().float() for one in (X, plain.fc.weight, plain.fc.bias))).half()
    q, k, v = (one.view(4, 64, 4, 8).transpose(1, 2) for one in y.chunk(3, -1))
    wide(torch.relu(wide(q, k.transpose(-1, -2))), v).float().square().mean().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_the_gradients_are_those_of_the_emulated_products():
    model, plain = net(), net()
    amp.compile(model, dtype="fp16", backend="eager")(X).square().mean().backward()

    def linear(layer, x):
        wide = nn.functional.linear(*(one.half().float() for one in (x, layer.weight, layer.bias)))
        return wide.half()

    y = plain[1](linear(plain[0], X))
    y = plain[3](linear(plain[2], y))
    linear(plain[4], y).float().square().mean().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_a_double_backward_goes_through():
    grads = []
    for double in (False, True):
        model = net().double() if double else net()
        call = model if double else amp.compile(model, dtype="fp16", backend="eager")
        x = X[:4].to(next(model.parameters()).dtype).requires_grad_()
        (grad,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
        grad.square().sum().backward()
        grads.append(model[0].weight.grad.double())
    assert float((grads[0] - grads[1]).norm() / grads[1].norm()) < 1e-2


def test_forward_mode_is_left_alone():
    model = amp.compile(net(), dtype="fp16", backend="eager")
    model(X[:4])
    value, tangent = torch.func.jvp(model, (X[:4],), (torch.ones(4, 32),))
    assert value.isfinite().all() and tangent.abs().sum() > 0


def test_what_was_changed_after_the_forward_is_an_error():
    layer = nn.Linear(4, 4, bias=False)
    model = amp.compile(copy.deepcopy(layer), dtype="fp16", backend="eager")
    x = torch.ones(2, 4).half().requires_grad_()
    y = model(x)
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(amp.LoweringError, match="changed in place"):
        y.sum().backward()
