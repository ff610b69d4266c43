"""The LSTM operator against torch's own LSTM, forward and backward, and its native BF16 form against oneDNN's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from amp_compiler.ops import lstm as operators
from amp_compiler.ops.cpu import lstm as cpu_lstm
from amp_compiler.ops.cpu import update as cpu_update
from amp_compiler.ops.lstm import lstm


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layers", [1, 2])
def test_it_is_torchs_lstm_to_the_last_bits(layers, bias, bidirectional, batch_first):
    torch.manual_seed(0)
    layer = nn.LSTM(6, 5, layers, bias=bias, bidirectional=bidirectional, batch_first=batch_first)
    x = torch.randn(3, 4, 6, requires_grad=True)
    batch = 3 if batch_first else 4
    states = [torch.randn(layers * (1 + bidirectional), batch, 5, requires_grad=True) for _ in range(2)]
    leaves = [x, *states, *layer.parameters()]
    out, (h, c) = layer(x, tuple(states))
    expected = torch.autograd.grad((out.sum() + (h * c).sum()), leaves)
    got = lstm(x, states, list(layer._flat_weights), bias, layers, 0.0, True, bidirectional, batch_first)
    for ours, theirs in zip(got, (out, h, c), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    gradients = torch.autograd.grad(got[0].sum() + (got[1] * got[2]).sum(), leaves)
    for ours, theirs in zip(gradients, expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def relative(values, references):
    return [
        float((v.detach().float() - r.detach()).norm() / r.detach().norm())
        for v, r in zip(values, references, strict=True)
    ]


def layer_of(dtype, steps, features, hidden, batch):
    """The operands of a layer, and seeds of its gradients."""
    torch.manual_seed(0)
    data, state = (steps, batch, features), (1, batch, hidden)
    shapes = [data, (4 * hidden, features), (4 * hidden, hidden), (4 * hidden,), (4 * hidden,), state, state]
    scales = [1.0, features**-0.5, hidden**-0.5, 0.5, 0.5, 0.5, 1.0]
    low = [(scale * torch.randn(shape)).to(dtype) for shape, scale in zip(shapes, scales, strict=True)]
    return low, [torch.randn(shape).to(dtype) for shape in ((steps, batch, hidden), state, state)]


def run_layer(low, seeds, dtype, reverse):
    leaves = [value.to(dtype).requires_grad_() for value in low]
    results = torch.ops.amp_compiler.lstm_layer(*leaves, reverse)[:3]
    return [*results, *torch.autograd.grad(results, leaves, [seed.to(dtype) for seed in seeds])]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("steps", "features", "hidden", "batch"), [(1, 3, 5, 2), (7, 32, 96, 1), (40, 20, 45, 9)])
def test_in_steps_nothing_is_rounded_but_what_is_kept_and_the_results(
    steps, features, hidden, batch, reverse, dtype, monkeypatch
):
    """In FP16, and in BF16 on a processor without products in it: no error grows from step to step."""
    monkeypatch.setattr(operators, "_in_steps", lambda dtype: dtype in (torch.float16, torch.bfloat16))
    low, seeds = layer_of(dtype, steps, features, hidden, batch)
    exact, found = run_layer(low, seeds, torch.float32, reverse), run_layer(low, seeds, dtype, reverse)
    unit = torch.finfo(dtype).eps / 2
    for number, (mine, error) in enumerate(zip(found, relative(found, exact), strict=True)):
        assert mine.dtype == dtype
        assert error < (unit if number < 3 else 2 * unit), (number, error / unit)


@pytest.mark.skipif(cpu_update.most_inner() == 0, reason="no C++ compiler, or a processor without bf16 products")
@pytest.mark.parametrize("batch", [1, 3, 16, 17, 33, 70])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("steps", "features", "hidden"), [(1, 32, 32), (2, 64, 32), (7, 32, 96)])
def test_the_native_bf16_layer_errs_no_more_than_onednns(steps, features, hidden, batch, reverse, monkeypatch):
    low, seeds = layer_of(torch.bfloat16, steps, features, hidden, batch)
    assert cpu_lstm.can_run(low[0], hidden)
    exact, native = (run_layer(low, seeds, dtype, reverse) for dtype in (torch.float32, torch.bfloat16))
    monkeypatch.setattr(cpu_lstm, "can_run", lambda data, hidden: False)
    library = run_layer(low, seeds, torch.bfloat16, reverse)
    for number, (ours, theirs) in enumerate(zip(relative(native, exact), relative(library, exact), strict=True)):
        assert ours < max(1.2 * theirs, 2**-8), (number, ours, theirs)


@pytest.mark.skipif(cpu_update.most_inner() == 0, reason="no C++ compiler, or a processor without bf16 products")
def test_the_native_layer_gives_the_same_bits_with_any_number_of_threads():
    torch.manual_seed(0)
    shapes = [(5, 9, 64), (4 * 96, 64), (4 * 96, 96), (4 * 96,), (4 * 96,), (1, 9, 96), (1, 9, 96)]
    low = [(0.2 * torch.randn(shape)).bfloat16().requires_grad_() for shape in shapes]
    found = []
    before = torch.get_num_threads()
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        out = torch.ops.amp_compiler.lstm_layer(*low, False)
        found.append([*out[:3], *torch.autograd.grad(out[0].float().square().sum(), low[:3])])
    torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


@pytest.mark.skipif(cpu_update.most_inner() == 0, reason="no C++ compiler, or a processor without bf16 products")
def test_the_native_layers_functions_hold_at_their_ends():
    hidden, batch = 32, 4
    bias = torch.tensor([200.0, -200.0, float("nan"), 1e-4]).repeat(hidden)[: 4 * hidden].bfloat16()
    zeros = [torch.zeros(shape).bfloat16() for shape in ((1, batch, 32), (4 * hidden, 32), (4 * hidden, hidden))]
    state = torch.ones(1, batch, hidden).bfloat16()
    out, h, c, _ = torch.ops.amp_compiler.lstm_layer(*zeros, bias, torch.zeros_like(bias), state, state, False)
    i, f, g, o = bias.float().view(4, hidden).unbind()
    cell = f.sigmoid() + i.sigmoid() * g.tanh()
    expected = (o.sigmoid() * cell.tanh()).expand(1, batch, hidden)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.allclose(out.float(), expected, rtol=8e-3, atol=1e-6, equal_nan=True)
    assert torch.allclose(c.float(), cell.expand_as(c), rtol=8e-3, atol=1e-6, equal_nan=True)
    assert torch.equal(h[0].isnan(), out[0].isnan())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_lstm_with_a_projection_keeps_its_states_in_fp32(dtype):
    torch.manual_seed(0)
    layer = nn.LSTM(16, 32, proj_size=8)
    x, h, c = torch.randn(60, 4, 16), torch.zeros(1, 4, 8), torch.zeros(1, 4, 32)
    low = [one.detach().to(dtype) for one in (x, h, c, *layer._flat_weights)]
    wide = [one.double() for one in low]
    options = (True, 1, 0.0, True, False, False)
    expected = torch.ops.aten.lstm.input(wide[0], wide[1:3], wide[3:], *options)
    found = torch.ops.amp_compiler.lstm(low[0], low[1:3], low[3:], *options)
    for mine, other in zip(found, expected, strict=True):
        assert mine.dtype == dtype
        assert relative([mine], [other])[0] < torch.finfo(dtype).eps / 4
