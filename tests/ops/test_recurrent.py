"""The operators for LSTM, GRU and plain recurrent layers against torch's own, forward and backward."""

import itertools

import pytest
import torch
from torch import nn
from toys import relative

from amp_compiler.errors import AmpError
from amp_compiler.ops import recurrent
from amp_compiler.ops.cpu import update as cpu_update
from amp_compiler.ops.recurrent import KINDS

ATEN, OWN = torch.ops.aten, torch.ops.amp_compiler
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
NATIVE = pytest.mark.skipif(
    cpu_update.most_inner() == 0, reason="no C++ compiler, or a processor without bf16 products"
)


def module(kind, *sizes, **options):
    torch.manual_seed(0)
    if kind in ("lstm", "gru"):
        return getattr(nn, kind.upper())(*sizes, **options)
    return nn.RNN(*sizes, nonlinearity=kind.removeprefix("rnn_"), **options)


def first_states(kind, *shape, **options):
    """A hidden state and, for an LSTM, a cell state."""
    return [torch.randn(shape, **options) for _ in range(2 if kind == "lstm" else 1)]


def call(op, kind, data, states, weights, options):
    return op(data, states if kind == "lstm" else states[0], list(weights), *options)


def layer_inputs(kind, steps, features, hidden, batch, dtype=torch.float32, scale=1.0):
    """What `recurrent_layer` reads."""
    width = GATES[kind] * hidden
    shapes = [(steps, batch, features), (width, features), (width, hidden), (width,), (width,)]
    inputs = [(scale * torch.randn(shape)).to(dtype) for shape in shapes]
    states = [(scale * one).to(dtype) for one in first_states(kind, 1, batch, hidden)]
    return [*inputs, *states, *([] if kind == "lstm" else [None])]


def results_and_gradients(op, kind, leaves, options, seeds):
    """Results of a network, and gradients by all that it reads: data, states and weights."""
    read = [leaf.detach().requires_grad_() for leaf in leaves]
    count = 3 if kind == "lstm" else 2
    results = call(op, kind, read[0], read[1:count], read[count:], options)
    return [*results, *torch.autograd.grad(results, read, [s.to(r.dtype) for s, r in zip(seeds, results, strict=True)])]


FORMS = [(a, b, c, a == b, a == c) for a, b, c in itertools.product((True, False), repeat=3)]  # any two meet any two


@pytest.mark.parametrize(("bias", "bidirectional", "batch_first", "double", "deep"), FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_torchs_network_to_the_last_bits(kind, bias, bidirectional, batch_first, double, deep):
    layers, dtype = 1 + 2 * deep, torch.float64 if double else torch.float32
    layer = module(kind, 6, 5, layers, bias=bias, bidirectional=bidirectional, batch_first=batch_first).to(dtype)
    x = torch.randn(3, 4, 6, dtype=dtype)
    states = first_states(kind, layers * (1 + bidirectional), 3 if batch_first else 4, 5, dtype=dtype)
    options = (bias, layers, 0.0, True, bidirectional, batch_first)
    leaves, aten = [x, *states, *layer._flat_weights], getattr(ATEN, kind).input
    seeds = [torch.randn_like(one) for one in call(aten, kind, x, states, layer._flat_weights, options)]
    theirs = results_and_gradients(aten, kind, leaves, options, seeds)
    ours = results_and_gradients(getattr(OWN, kind), kind, leaves, options, seeds)
    few = 1e-5 if dtype == torch.float32 else 1e-13
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.dtype, mine.shape, mine.stride()) == (other.dtype, other.shape, other.stride())
        assert torch.allclose(mine, other, rtol=few, atol=few)


@pytest.mark.parametrize("native", [pytest.param(True, marks=NATIVE), False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("steps", "batch", "features", "hidden"), [(1, 33, 32, 32), (7, 1, 20, 45), (7, 33, 20, 45), (40, 3, 70, 96)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_in_16_bits_results_are_rounded_once(kind, steps, batch, features, hidden, dtype, native, monkeypatch):
    """No error grows from step to step: outputs are as near as two roundings, of the inputs of a product and theirs."""
    if not native:
        monkeypatch.setattr(recurrent, "runs_natively", lambda data: False)
    assert recurrent.runs_natively(torch.zeros(1, 1, 1, dtype=dtype)) == (native and dtype == torch.bfloat16)
    layer = module(kind, features, hidden, bidirectional=True)
    x, states = torch.randn(steps, batch, features), first_states(kind, 2, batch, hidden)
    leaves = [one.to(dtype) for one in (x, *states, *layer._flat_weights)]
    options = (True, 1, 0.0, True, True, False)
    seeds = [torch.randn(steps, batch, 2 * hidden).to(dtype)]
    seeds += [one.to(dtype) for one in first_states(kind, 2, batch, hidden)]
    theirs = results_and_gradients(getattr(ATEN, kind).input, kind, [one.double() for one in leaves], options, seeds)
    ours = results_and_gradients(getattr(OWN, kind), kind, leaves, options, seeds)
    unit = torch.finfo(dtype).eps / 2
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert mine.dtype == dtype and mine.shape == other.shape
        # A gradient of relu jumps where a sum that is nearly 0 is rounded to the other side.
        bound = unit if number < len(seeds) else 3 * unit if kind != "rnn_relu" else 20 * unit
        assert relative(mine, other) < bound, number


@pytest.mark.sweep(4)
@pytest.mark.parametrize("kind", KINDS)
def test_its_backward_and_the_backward_of_that_are_the_derivatives(kind):
    torch.manual_seed(3)
    layer = module(kind, 3, 2, bidirectional=True).double()
    count = 3 if kind == "lstm" else 2
    leaves = [torch.randn(3, 2, 3, dtype=torch.double), *first_states(kind, 2, 2, 2, dtype=torch.double)]
    leaves = [one.detach().requires_grad_() for one in (*leaves, *layer._flat_weights)]

    def run(*read):
        options = (True, 1, 0.0, True, True, False)
        return call(getattr(OWN, kind), kind, read[0], read[1:count], read[count:], options)

    assert torch.autograd.gradcheck(run, leaves)
    assert torch.autograd.gradgradcheck(run, leaves)


@NATIVE
@pytest.mark.parametrize("kind", KINDS)
def test_the_backward_of_a_native_layer_can_be_differentiated(kind):
    torch.manual_seed(3)
    low = [one for one in layer_inputs(kind, 3, 3, 2, 2, torch.bfloat16) if one is not None]

    def penalty(run, leaves):
        leaves = [one.detach().requires_grad_() for one in leaves]
        (slope,) = torch.autograd.grad(run(leaves).sum(), leaves[:1], create_graph=True)
        return torch.autograd.grad(slope.square().sum(), leaves[1:3])

    def layer(leaves):
        return OWN.recurrent_layer(*leaves, *[None] * (7 - len(leaves)), kind, False)[0]

    def exact(leaves):
        options = (True, 1, 0.0, True, False, False)
        return call(getattr(ATEN, kind).input, kind, leaves[0], leaves[5:], leaves[1:5], options)[0]

    expected = penalty(exact, [one.double() for one in low])
    for mine, other in zip(penalty(layer, low), expected, strict=True):
        assert float((mine - other).abs().max()) <= 0.05 * float(other.abs().max())  # six roundings on the way


@NATIVE
@pytest.mark.parametrize("kind", KINDS)
def test_the_operators_are_as_torch_wants_them(kind):
    torch.manual_seed(0)
    layer = layer_inputs(kind, 3, 64, 32, 2, torch.bfloat16)
    results = OWN.recurrent_layer(*layer, kind, True)
    first, memory = [one for one in layer[5:] if one is not None], list(results[3:])
    inputs = [torch.randn_like(one) for one in results[:3]]
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(OWN.recurrent_layer, (*layer, kind, True), test_utils=tests)
    torch.library.opcheck(OWN.recurrent_sums_backward, (layer[2], first, memory, inputs, kind, True), test_utils=tests)


def test_what_the_loops_do_not_take_is_refused_by_name():
    with pytest.raises(AmpError, match=r"float64.*call amp_compiler\.lstm"):
        OWN.recurrent_layer(*layer_inputs("gru", 3, 3, 2, 2, torch.float64), "gru", False)


def test_dropout_between_layers_draws_what_torch_draws():
    """A seed, and the state of the generator, count as for any other dropout; behind the last layer there is none."""
    layer = module("gru", 6, 5, 3, dropout=0.5)
    x, h = torch.randn(4, 3, 6), torch.zeros(3, 3, 5)
    options = (True, 3, 0.5, True, False, False)
    torch.manual_seed(5)
    expected = ATEN.gru.input(x, h, layer._flat_weights, *options)[0]
    torch.manual_seed(5)
    result = OWN.gru(x, h, layer._flat_weights, *options)[0]
    assert torch.allclose(result, expected, rtol=1e-5, atol=1e-6)
    assert not torch.equal(OWN.gru(x, h, layer._flat_weights, *options)[0], result)
    idle = OWN.gru(x, h, layer._flat_weights, True, 3, 0.5, False, False, False)[0]
    assert torch.allclose(idle, layer.eval()(x)[0], rtol=1e-5, atol=1e-6)


@NATIVE
@pytest.mark.parametrize("kind", KINDS)
def test_the_native_layer_gives_the_same_bits_with_any_number_of_threads(kind):
    torch.manual_seed(0)
    low = layer_inputs(kind, 5, 64, 96, 9, torch.bfloat16, 0.2)
    leaves = [one.requires_grad_() for one in low if one is not None]
    result = []
    before = torch.get_num_threads()
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        out = OWN.recurrent_layer(*low, kind, False)
        result.append([*out[:3], *torch.autograd.grad(out[0].float().square().sum(), leaves)])
    torch.set_num_threads(before)
    for other in result[1:]:
        assert all(torch.equal(one, two) for one, two in zip(result[0], other, strict=True))


@NATIVE
@pytest.mark.parametrize("kind", KINDS)
def test_the_native_layers_functions_hold_at_their_ends(kind):
    """Saturated, not a number, and small."""
    width, batch = GATES[kind] * 32, 4
    bias = torch.tensor([200.0, -200.0, float("nan"), 1e-4]).repeat(width)[:width].bfloat16()
    zeros = [torch.zeros(shape).bfloat16() for shape in ((1, batch, 32), (width, 32), (width, 32))]
    states = [torch.ones(1, batch, 32).bfloat16()] * (2 if kind == "lstm" else 1)
    layer = (*zeros, bias, torch.zeros_like(bias), *states)
    result = OWN.recurrent_layer(*layer, *[None] * (2 - len(states)), kind, False)
    exact = [one.double() for one in layer]
    options = (True, 1, 0.0, False, False, False)
    expected = call(getattr(ATEN, kind).input, kind, exact[0], exact[5:], exact[1:5], options)
    for mine, other in zip(result[: len(expected)], expected, strict=True):
        assert torch.allclose(mine.double(), other, rtol=8e-3, atol=1e-6, equal_nan=True)
    assert torch.equal(result[1][0].isnan(), result[0][0].isnan())


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_batch_is_nothing_special(kind):
    layer = module(kind, 32, 32)
    for dtype in (torch.float32, torch.bfloat16):
        weights = [one.detach().to(dtype).requires_grad_() for one in layer._flat_weights]
        x, states = torch.zeros(3, 0, 32, dtype=dtype), first_states(kind, 1, 0, 32, dtype=dtype)
        out, *last = call(getattr(OWN, kind), kind, x, states, weights, (True, 1, 0.0, True, False, False))
        assert out.shape == (3, 0, 32) and {one.shape for one in last} == {(1, 0, 32)}
        assert all(not grad.any() for grad in torch.autograd.grad(out.sum(), weights))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_lstm_with_a_projection_keeps_its_states_in_fp32(dtype):
    torch.manual_seed(0)
    layer = nn.LSTM(16, 32, proj_size=8)
    x, h, c = torch.randn(60, 4, 16), torch.zeros(1, 4, 8), torch.zeros(1, 4, 32)
    low = [one.detach().to(dtype) for one in (x, h, c, *layer._flat_weights)]
    wide = [one.double() for one in low]
    options = (True, 1, 0.0, True, False, False)
    expected = ATEN.lstm.input(wide[0], wide[1:3], wide[3:], *options)
    result = OWN.lstm(low[0], low[1:3], low[3:], *options)
    for mine, other in zip(result, expected, strict=True):
        assert mine.dtype == dtype
        assert relative(mine, other) < torch.finfo(dtype).eps / 4
