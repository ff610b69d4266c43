"""What forward writes in place past autograd (`no_grad`, `detach()`, `.data`): values change, gradients stay."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import amp_compiler as amp

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def under_no_grad(write):
    def written(h):
        with torch.no_grad():
            return write(h)

    return written


def of_a_split(h):
    _, right = h.split(2, 1)
    right.add_(1)


def of_a_slice(h):
    h[:, 2:] = 1.0


def of_a_mask(h):
    h.masked_fill_(h > 0.2, 0.0)


# name: a write, which may give what it wrote to
WRITES = {
    "mul_": under_no_grad(lambda h: h.mul_(2)),
    "clamp_": under_no_grad(lambda h: h.clamp_(-0.1, 0.1)),
    "copy_": under_no_grad(lambda h: h.copy_(h * 2)),
    "split": under_no_grad(of_a_split),
    "slice": under_no_grad(of_a_slice),
    "mask": under_no_grad(of_a_mask),
    "data under no_grad": under_no_grad(lambda h: h.data.mul_(3)),
    "data": lambda h: h.data.mul_(3),
    "detach": lambda h: h.detach().mul_(3),
}


class Written(nn.Module):
    def __init__(self, write, breaks):
        super().__init__()
        self.layer, self.write, self.breaks = nn.Linear(4, 4), write, breaks

    def forward(self, x):
        if self.breaks and x.sum() > 1e9:
            return x
        hidden = self.layer(x)
        found = self.write(hidden)
        return self.layer(x) * hidden + (0 if found is None else found)


def loss(model, x):
    return model(x).float().square().sum()


@pytest.mark.sweep(6)
@pytest.mark.parametrize("breaks", [False, True], ids=["one graph", "pieces"])
@pytest.mark.parametrize("name", WRITES)
def test_it_changes_values_and_no_gradient(name, breaks):
    torch.manual_seed(0)
    plain = Written(WRITES[name], breaks)
    low, exact = copy.deepcopy(plain), copy.deepcopy(plain)
    wanted = loss(plain, X)
    wanted.backward()
    compiled = amp.compile(low, dtype="bf16", backend="eager")
    made = loss(compiled, X)
    made.backward()
    torch.testing.assert_close(made, wanted, rtol=0.05, atol=0)
    step = amp.training_step(exact, loss, torch.optim.SGD(exact.parameters(), 1.0), enabled=False, backend="eager")
    torch.testing.assert_close(step(X), wanted.detach())
    for ours, trained, theirs in zip(low.parameters(), exact.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=0.05 * float(theirs.grad.abs().max()))
        torch.testing.assert_close(trained.detach(), (theirs - theirs.grad).detach())


class Parts(nn.Module):
    """A buffer that is written through one of several views of it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        marks = torch.zeros(2, 4)
        _, last = marks.unbind(0)
        last.add_(1)
        left, _ = marks.chunk(2, 1)
        left.mul_(3)
        return self.layer(x) * marks.sum(0)


def test_what_is_written_through_one_of_several_views_is_seen():
    model = Parts()
    compiled = amp.compile(copy.deepcopy(model), dtype="bf16", backend="eager")
    torch.testing.assert_close(compiled(X).float(), model(X), rtol=0.05, atol=0.05)
    assert compiled(X).abs().sum() > 0
