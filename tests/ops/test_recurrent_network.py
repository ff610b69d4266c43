"""Recurrent networks of cuDNN, on a CPU by a stand-in for it: numbers, types, the graph, what is kept and used up."""

from __future__ import annotations

import logging
from contextlib import nullcontext

import pytest
import torch
from cudnn_stand_in import StandIn
from torch import nn

from amp_compiler.backends import inductor
from amp_compiler.errors import AmpError
from amp_compiler.fx.graph import refresh
from amp_compiler.fx.text import parse_fx
from amp_compiler.fx.torch_private import traced_graph
from amp_compiler.ops import recurrent_network
from amp_compiler.ops.cuda import cudnn_rnn
from amp_compiler.passes.device.native_ops import NativeOps
from amp_compiler.passes.step.differentiate import Differentiate

OWN = torch.ops.amp_compiler
KINDS = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn_tanh": nn.RNN,
    "rnn_relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
}


@pytest.fixture(autouse=True)
def cudnn(monkeypatch):
    stand_in = StandIn()
    monkeypatch.setattr(cudnn_rnn, "CUDNN", stand_in)
    recurrent_network._tell.cache_clear()
    return stand_in


def make(kind, layers=1, batch_first=False, **options):
    """A network, its input and its first states."""
    torch.manual_seed(0)
    layer = KINDS[kind](6, 5, layers, batch_first=batch_first, **options)
    x = torch.randn(3, 4, 6)
    count, batch = layers * (1 + layer.bidirectional), 3 if batch_first else 4
    states = [torch.randn(count, batch, layer.proj_size or 5)]
    return layer, x, states + ([torch.randn(count, batch, 5)] if kind == "lstm" else [])


def options_of(layer, train=True):
    return layer.bias, layer.num_layers, layer.dropout, train, layer.bidirectional, layer.batch_first


def by_torch(layer, x, states):
    out, last = layer(x, tuple(states) if len(states) > 1 else states[0])
    return [out, *(last if isinstance(last, tuple) else [last])]


def by_network(kind, layer, x, states, train=True):
    return recurrent_network.network(kind, x, states, list(layer._flat_weights), *options_of(layer, train))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize(("kind", "projected"), [*((kind, 0) for kind in KINDS), ("lstm", 2)])
def test_it_is_torchs_network(kind, projected, layers, bias, bidirectional, batch_first, cudnn):
    options = {"proj_size": projected} if projected else {}
    layer, x, states = make(kind, layers, batch_first, bias=bias, bidirectional=bidirectional, **options)
    leaves = [x.requires_grad_(), *(one.requires_grad_() for one in states), *layer.parameters()]
    expected, found = by_torch(layer, x, states), by_network(kind, layer, x, states)
    seeds = [torch.randn_like(one) for one in expected]
    theirs, ours = (torch.autograd.grad(results, leaves, seeds) for results in (expected, found))
    for mine, other in zip((*found, *ours), (*expected, *theirs), strict=True):
        assert mine.shape == other.shape and mine.stride() == other.stride()
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    assert [name for name, _, _ in cudnn.calls] == ["forward", "backward"]


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_dropout_between_layers_is_torchs_own(kind, cudnn):
    """A seed, and the state of the generator, count as for any other dropout; behind the last layer there is none."""
    layer, x, states = make(kind, 3, dropout=0.5, bidirectional=True)
    torch.manual_seed(7)
    found = by_network(kind, layer, x, states)
    torch.manual_seed(7)
    out, weights = x, list(layer._flat_weights)
    for number in range(3):
        one = [state[2 * number : 2 * number + 2] for state in states]
        given = weights[8 * number : 8 * number + 8]
        out = torch.dropout(out, 0.5, True) if number else out
        out = recurrent_network.network(kind, out, one, given, True, 1, 0.0, True, True, False)[0]
    assert torch.equal(found[0], out)
    assert not torch.equal(by_network(kind, layer, x, states)[0], out)
    assert [form.layers for _, form, _ in cudnn.calls] == [1] * 9
    cudnn.calls.clear()
    torch.testing.assert_close(
        by_network(kind, layer, x, states, train=False), tuple(by_torch(layer.eval(), x, states))
    )
    assert [form.layers for _, form, _ in cudnn.calls] == [3]


def test_without_gradients_nothing_is_kept(cudnn):
    layer, x, states = make("lstm", 2)
    with torch.no_grad():
        by_network("lstm", layer, x, states)
    assert [keeps for _, _, keeps in cudnn.calls] == [False]


def test_two_backwards_read_the_same(cudnn):
    """What a forward keeps is used up by cuDNN's backward."""
    layer, x, states = make("gru", 2)
    loss = by_network("gru", layer, x, states)[0].square().sum()
    first, second = (torch.autograd.grad(loss, list(layer.parameters()), retain_graph=True) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_it_says_that_it_cannot_be_differentiated_twice():
    layer, x, states = make("gru")
    out = by_network("gru", layer, x.requires_grad_(), states)[0]
    with pytest.raises(AmpError, match=r"torch\.backends\.cudnn\.flags"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_rounded_at_the_ends_where_cudnn_does_not_know_them(dtype, cudnn, caplog):
    cudnn.types = (torch.float32,)
    layer, x, states = make("lstm", 2)
    low = [one.to(dtype) for one in (x, *states, *layer._flat_weights)]
    with caplog.at_level(logging.WARNING, "amp_compiler"):
        for _ in range(2):
            found = recurrent_network.network("lstm", low[0], low[1:3], low[3:], *options_of(layer))
    wide = [one.float() for one in low]
    expected = recurrent_network.network("lstm", wide[0], wide[1:3], wide[3:], *options_of(layer))
    assert all(torch.equal(mine, other.to(dtype)) for mine, other in zip(found, expected, strict=True))
    assert [one.message for one in caplog.records] == [
        f"cuDNN does not take a recurrent network (lstm, {str(dtype)[6:]}): CUDNN_STATUS_NOT_SUPPORTED; it runs in FP32"
    ]


def arguments(kind, dtype=torch.float32):
    layer, x, states = make(kind, 2, bidirectional=True, **({"proj_size": 2} if kind == "lstm" else {}))
    h, c = states[0].to(dtype), states[1].to(dtype) if kind == "lstm" else None
    weights = [one.detach().to(dtype).requires_grad_() for one in layer._flat_weights]
    return x.to(dtype).requires_grad_(), h, c, weights, kind, 5, 2, True, True


def detached(one):
    if isinstance(one, list):
        return list(map(detached, one))
    return one.detach() if isinstance(one, torch.Tensor) else one


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["lstm", "rnn_relu"])
def test_the_fake_is_as_the_operator(kind, dtype):
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(OWN.recurrent_network.default, arguments(kind, dtype), test_utils=checks)
    data, h, c, weights, *form, _ = map(detached, arguments(kind, dtype))
    out, last, cell, reserve = OWN.recurrent_network(data, h, c, weights, *form, True)
    given = [torch.randn_like(one) for one in (out, last, cell)]
    # The stand-in looks at the bytes that were kept, which the check of the schema runs twice.
    torch.library.opcheck(
        OWN.recurrent_network_backward.default, (data, h, c, weights, out, given, reserve, *form),
        test_utils=("test_faketensor",),
    )  # fmt: skip


NETWORK = """in x: {t}[2, 64, 6]@cuda
in h: {t}[2, 2, 5]@cuda
in c: {t}[2, 2, 5]@cuda
in w: {t}[20, 6]@cuda
in u: {t}[20, 5]@cuda
in p: {t}[20]@cuda
in q: {t}[20]@cuda
in w2: {t}[20, 5]@cuda
in u2: {t}[20, 5]@cuda
in p2: {t}[20]@cuda
in q2: {t}[20]@cuda
lstm: ({t}[2, 64, 5]{{5, 10, 1}}@cuda, {t}[2, 2, 5]@cuda, {t}[2, 2, 5]@cuda) = aten.lstm.input(x, [h, c], [w, u, p, q, w2, u2, p2, q2], True, 2, {p}, True, False, True)
out: {t}[2, 64, 5]{{5, 10, 1}}@cuda = getitem(lstm, 0)
sum_1: {t}[]@cuda = aten.sum.default(out)
return sum_1
"""  # noqa: E501
WEIGHTS = ("w", "u", "p", "q", "w2", "u2", "p2", "q2")


@pytest.mark.parametrize(("dropout", "calls"), [(0.0, 1), (0.5, 2)])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_64_steps_are_a_handful_of_nodes(dtype, dropout, calls, cudnn, monkeypatch):
    assert NativeOps("forward")(parse_fx(NETWORK.format(t=dtype, p=dropout))).modified
    monkeypatch.setattr(cudnn, "device", "cpu")  # this torch differentiates nothing on a GPU that is not there
    text = (
        NETWORK.format(t=dtype, p=dropout).replace("@cuda", "").replace("aten.lstm.input", "amp_compiler.lstm.default")
    )
    joint = Differentiate(WEIGHTS)(parse_fx(text)).subject
    targets = [node.target for node in joint.graph.nodes if node.op == "call_function"]
    assert targets.count(OWN.recurrent_network.default) == calls
    assert targets.count(OWN.recurrent_network_backward.default) == calls
    assert len(targets) < 80, "opened step by step they are thousands"


def test_without_cudnn_it_stays_torchs_own(monkeypatch, cudnn, caplog):
    monkeypatch.setattr(cudnn, "available", lambda: False)
    assert not NativeOps("forward")(parse_fx(NETWORK.format(t="bf16", p=0.0))).modified
    assert not caplog.records
    monkeypatch.setattr(cudnn, "available", lambda: True)
    cudnn.types = ()
    with caplog.at_level(logging.WARNING, "amp_compiler"):
        assert not NativeOps("forward")(parse_fx(NETWORK.format(t="bf16", p=0.0))).modified
    assert "CUDNN_STATUS_NOT_SUPPORTED; it is unrolled" in caplog.text


def test_the_user_may_switch_cudnn_off(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    assert cudnn_rnn.Cudnn().available()
    with torch.backends.cudnn.flags(enabled=False):
        assert not cudnn_rnn.Cudnn().available()


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", list(KINDS))
def test_fake_results_ask_cudnn_nothing(kind, batch_first, cudnn):
    """A rewritten graph has its types computed anew; ATen's own would ask cuDNN about weights that lie nowhere."""
    layer, x, states = make(kind, 2, batch_first, bidirectional=True)
    found = by_network(kind, layer, x, states)
    given = states if kind == "lstm" else states[0]
    empty = recurrent_network.empty_results(x, given, list(layer._flat_weights), *options_of(layer))
    assert [(one.shape, one.stride(), one.dtype) for one in found] == [
        (one.shape, one.stride(), one.dtype) for one in empty
    ]
    graph_module = parse_fx(NETWORK.format(t="fp32", p=0.0))
    out = next(node for node in graph_module.graph.nodes if node.name == "out")
    out.meta["val"] = None
    cudnn.calls.clear()
    refresh(graph_module)
    assert out.meta["val"].stride() == (5, 10, 1) and out.meta["val"].device.type == "cuda" and not cudnn.calls


def test_autocast_around_a_call_does_not_reach_cudnn(monkeypatch):
    """Torch's own would cast everything to FP16 there."""
    found = []
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind=None: True)
    monkeypatch.setattr(torch, "autocast", lambda kind, enabled: found.append((kind, enabled)) or nullcontext())

    def stop(*arguments):
        raise StopIteration

    names = ("_cudnn_rnn_flatten_weight", "_cudnn_rnn", "_cudnn_rnn_backward")
    monkeypatch.setattr(
        cudnn_rnn, "_aten", type("Ops", (), {name: type("Op", (), {"default": stop}) for name in names})
    )
    form = cudnn_rnn.Form("gru", 5, 0, 1, False)
    given = cudnn_rnn.Inputs(torch.zeros(3, 4, 6), torch.zeros(1, 4, 5), None, [torch.zeros(15, 6)])
    with pytest.raises(StopIteration):
        cudnn_rnn.Cudnn().forward(form, given, True)
    with pytest.raises(StopIteration):
        cudnn_rnn.Cudnn().backward(form, given, given.h, (given.h,) * 3, given.h)
    assert found == [("cuda", False)] * 2


def shapes_of(given):
    return tuple(None if one is None else tuple(one.shape) for one in (*given[:3], *given.weights))


def test_cudnn_is_asked_and_called_as_eager_torch_does(monkeypatch):
    """Its weights lie in one buffer, which holds copies; those that are given stay where they are."""
    calls = []

    def flatten(weights, *options):
        calls.append(("flatten", options))
        flat = torch.cat([one.reshape(-1) for one in weights])
        for one, part in zip(weights, flat.split([one.numel() for one in weights]), strict=True):
            one.set_(part.view(one.shape))
        return flat

    def run(data, weights, each, flat, h, c, *options):
        assert all(one.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr() for one in weights)
        calls.append(("run", (each, *options)))
        return data, h, c, torch.empty(77), flat

    def back(data, weights, each, flat, h, c, out, d_out, d_h, d_c, *options):
        calls.append(("back", (d_c, *options[:-2], options[-1])))
        return data, h, c, [torch.ones_like(one) for one in weights]

    ops = {"_cudnn_rnn_flatten_weight": flatten, "_cudnn_rnn": run, "_cudnn_rnn_backward": back}
    named = {name: type("Op", (), {"default": staticmethod(op)}) for name, op in ops.items()}
    monkeypatch.setattr(cudnn_rnn, "_aten", type("Ops", (), named))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    layer, x, (h,) = make("gru", 2)
    weights = list(layer._flat_weights)
    places = [one.data_ptr() for one in weights]
    form, given = cudnn_rnn.Form("gru", 5, 0, 2, False), cudnn_rnn.Inputs(x, h, None, weights)
    library = cudnn_rnn.Cudnn()
    asked_with = form, shapes_of(given), torch.float32, x.device
    assert library.reserve_size(*asked_with) == library.reserve_size(*asked_with) == 77
    form_of_cudnn = (3, 5, 0, 2, False)
    asked = [("flatten", (4, 6, *form_of_cudnn, False)), ("run", (4, *form_of_cudnn, 0.0, True, False, [], None))]
    assert calls == asked, "once"
    assert library.forward(form, given, True)[0] is x and calls[2:] == asked
    assert len(library.backward(form, given, x, (x, h, h), h)[3]) == 8
    assert calls[5] == ("back", (None, *form_of_cudnn, 0.0, True, False, [], None, [True, True, False, True]))
    assert [one.data_ptr() for one in weights] == places


def test_what_cudnn_does_not_take_is_told_and_want_of_memory_raised(monkeypatch):
    def refuse(*arguments):
        raise reason

    monkeypatch.setattr(cudnn_rnn.Cudnn, "forward", refuse)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    given = cudnn_rnn.Form("gru", 9, 0, 1, False), ((3, 4, 6), (1, 4, 9), None), torch.float32, torch.device("cpu")
    reason = torch.OutOfMemoryError("no memory")
    with pytest.raises(torch.OutOfMemoryError):
        cudnn_rnn.Cudnn().reserve_size(*given)
    reason = RuntimeError("CUDNN_STATUS_NOT_SUPPORTED\nand more")
    assert cudnn_rnn.Cudnn().reserve_size(*given) == "CUDNN_STATUS_NOT_SUPPORTED"


@pytest.mark.compiles
def test_in_one_graph_what_is_kept_is_used_up_where_it_lies(cudnn):
    """Forward and backward of a training step are one graph: there nothing is copied so that it can be read again."""
    layer, x, states = make("lstm")
    weights = [one.detach() for one in layer._flat_weights]

    def gradients(x, h, c, *weights):
        leaves = [one.detach().requires_grad_() for one in weights]
        with torch.enable_grad():
            out = recurrent_network.network("lstm", x, [h, c], leaves, *options_of(layer))[0]
        return torch.autograd.grad(out.square().sum(), leaves)

    given = [x, *states, *weights]
    expected = gradients(*given)
    graph_module = traced_graph(gradients, *given)
    run = inductor.compile_graph(graph_module, given)
    cudnn.reserves.clear()
    with torch.no_grad():
        found = run(*given)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    kept, used = cudnn.reserves
    assert kept == used
