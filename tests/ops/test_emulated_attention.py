"""Attention in FP16 on a CPU: what the fused kernel makes in FP32 of the rounded operands, rounded once."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import amp_compiler as amp
from amp_compiler.ops import attention

OWN = torch.ops.amp_compiler
UNIT = torch.finfo(torch.float16).eps / 2


def operands(batch=2, heads=3, rows=5, columns=7, width=8, seed=0):
    """Query, key and value as a projection leaves them in memory, and the gradient of the result."""
    random = torch.Generator().manual_seed(seed)
    shapes = [(batch, n, heads, width) for n in (rows, columns, columns, rows)]
    return [torch.randn(shape, generator=random).half().transpose(1, 2) for shape in shapes]


def bools(*shape):
    random = torch.Generator().manual_seed(1)
    return (torch.rand(shape, generator=random) > 0.3) | (torch.arange(shape[-1]) == 0)


CALLS = {
    "plain": ({}, True),
    "causal": ({"is_causal": True, "scale": 0.7}, True),
    "mask of each head": ({"attn_mask": bools(2, 3, 5, 7)}, True),
    "mask of all": ({"attn_mask": bools(5, 7)}, True),
    "numbers to add": ({"attn_mask": torch.linspace(-3, 3, 35).view(1, 1, 5, 7).half()}, True),
    "mask of columns": ({"attn_mask": bools(2, 1, 1, 7)}, False),
    "mask with a gradient": ({"attn_mask": torch.zeros(5, 7, dtype=torch.half, requires_grad=True)}, False),
}


@pytest.mark.parametrize("name", CALLS)
def test_only_results_and_what_is_kept_are_rounded(name):
    options, fused = CALLS[name]
    *low, gradient = operands()
    low = [one.detach().requires_grad_() for one in low]
    exact = [one.detach().double().requires_grad_() for one in low]
    mask = options.get("attn_mask")
    wide = options if mask is None or mask.dtype is torch.bool else {**options, "attn_mask": mask.detach().double()}
    expected = F.scaled_dot_product_attention(*exact, **wide)
    expected.backward(gradient.double())
    found = OWN.attention(*low, **options)
    names, todo = set(), [found.grad_fn]
    while todo:
        node = todo.pop()
        names.add(node.name())
        todo += [one for one, _ in node.next_functions if one is not None]
    assert any("emulated_attention" in one for one in names) == fused
    found.backward(gradient)
    for mine, true in [
        (found.detach(), expected.detach()),
        *((a.grad, b.grad) for a, b in zip(low, exact, strict=True)),
    ]:
        assert mine.dtype is torch.float16
        assert float((mine.double() - true).abs().max()) < 4 * UNIT * float(true.abs().max())


def test_a_gradient_may_be_differentiated():
    """Torch's own kernel cannot."""
    *low, gradient = operands()
    seeds = operands(seed=1)[:3]

    def slopes(read, attend):
        read = [one.detach().requires_grad_() for one in read]
        made = torch.autograd.grad(attend(*read), read, gradient.to(read[0].dtype), create_graph=True)
        torch.autograd.backward(made, [seed.to(one.dtype) for seed, one in zip(seeds, made, strict=True)])
        return [one.grad for one in read]

    def written_out(query, key, value):
        return torch.softmax(query @ key.transpose(-1, -2) / 8**0.5, -1) @ value

    exact = slopes([one.double() for one in low], written_out)
    for mine, true in zip(slopes(low, OWN.attention), exact, strict=True):
        assert float((mine.double() - true).norm() / true.norm()) < 4 * UNIT


def test_no_heads_are_no_attention():
    assert OWN.attention(*[torch.zeros(2, 0, 5, 8).half()] * 3).shape == (2, 0, 5, 8)


def test_it_holds_to_what_operators_promise():
    query, key, value, _ = (one.requires_grad_() for one in operands())
    for mask in (None, bools(5, 7)):
        torch.library.opcheck(OWN.emulated_attention.default, (query, key, value, mask, False, None))


def test_heads_that_share_keys_are_left_to_torch():
    query, key, value, _ = operands()
    assert attention.takes_forward(query, key, value)
    assert not attention.takes_forward(query, key, value, enable_gqa=True)
    assert not attention.takes_forward(query.float(), key, value)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = (one.unflatten(-1, (2, 8)).transpose(1, 2) for one in self.fc(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize(
    ("backend", "sizes"),
    [
        ("eager", ((2, 6), (3, 9), (5, 17))),
        pytest.param("inductor", ((2, 6), (3, 9), (5, 17)), marks=(pytest.mark.compiles, pytest.mark.slow)),
    ],
)
def test_a_model_uses_it_in_every_shape(backend, sizes):
    model = Model()
    compiled = amp.compile(model, dtype="fp16", backend=backend, dynamic_shapes="auto")
    for batch, rows in sizes:
        x = torch.randn(batch, rows, 16, generator=torch.Generator().manual_seed(rows))
        model.zero_grad()
        compiled(x).float().square().mean().backward()
        ours = model.fc.weight.grad.clone()
        model.zero_grad()
        model(x).square().mean().backward()
        assert float((ours - model.fc.weight.grad).norm() / model.fc.weight.grad.norm()) < 3e-3
    assert any(node.target is OWN.attention.default for node in compiled.graph_module.graph.nodes)
