"""Recurrent networks as one operator, which runs on a CPU here: types and graphs; numbers are in `test_recurrent`."""

import warnings

import pytest
import torch
from fx_reader import parse_fx
from torch import nn

from amp_compiler.backends import inductor
from amp_compiler.errors import AmpError
from amp_compiler.fx.graph import refresh
from amp_compiler.fx.torch_private.tracing import traced_graph
from amp_compiler.ops import recurrent_network
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
def on_cpu(monkeypatch):
    monkeypatch.setattr(recurrent_network, "DEVICE", "cpu")


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


def by_network(kind, layer, x, states, train=True):
    return recurrent_network.network(kind, x, states, list(layer._flat_weights), *options_of(layer, train))


def test_two_backwards_read_the_same():
    layer, x, states = make("gru", 2)
    loss = by_network("gru", layer, x, states)[0].square().sum()
    first, second = (torch.autograd.grad(loss, list(layer.parameters()), retain_graph=True) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_it_says_that_cudnn_cannot_be_differentiated_twice():
    data = torch.empty(3, 4, 6, device="meta")
    with pytest.raises(AmpError, match=r"torch\.backends\.cudnn\.flags"):
        recurrent_network.differentiable(data, [], [], [], ())


def arguments(kind, dtype=torch.float32):
    layer, x, states = make(kind, 2, bidirectional=True, **({"proj_size": 2} if kind == "lstm" else {}))
    weights = [one.detach().to(dtype).requires_grad_() for one in layer._flat_weights]
    return x.to(dtype).requires_grad_(), [one.to(dtype) for one in states], weights, kind, True, 2, True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["lstm", "rnn_relu"])
def test_the_fake_is_as_the_operator(kind, dtype):
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(OWN.recurrent_network.default, arguments(kind, dtype), test_utils=checks)
    data, states, weights, *form = arguments(kind, dtype)
    with torch.no_grad():
        inputs = [torch.randn_like(one) for one in OWN.recurrent_network(data, states, weights, *form)]
    plain = data.detach(), states, [one.detach() for one in weights], inputs, *form
    torch.library.opcheck(OWN.recurrent_network_backward.default, plain, test_utils=("test_schema", "test_faketensor"))
    expected = OWN.recurrent_network_backward(*plain)
    with torch.inference_mode():
        result = OWN.recurrent_network_backward(data.detach().clone(), *plain[1:])
    assert all(torch.equal(mine, other) for mine, other in zip(result, expected, strict=True))


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
def test_64_steps_are_a_handful_of_nodes(dtype, dropout, calls, monkeypatch):
    monkeypatch.setattr(recurrent_network, "DEVICE", "cuda")
    assert NativeOps("forward")(parse_fx(NETWORK.format(t=dtype, p=dropout))).modified
    monkeypatch.setattr(
        recurrent_network, "DEVICE", "cpu"
    )  # this torch differentiates nothing on a GPU that is not there
    text = (
        NETWORK.format(t=dtype, p=dropout).replace("@cuda", "").replace("aten.lstm.input", "amp_compiler.lstm.default")
    )
    joint = Differentiate(WEIGHTS)(parse_fx(text)).subject
    targets = [node.target for node in joint.graph.nodes if node.op == "call_function"]
    assert targets.count(OWN.recurrent_network.default) == calls
    assert targets.count(OWN.recurrent_network_backward.default) == calls
    assert len(targets) < 80, "opened step by step they are thousands"


def test_fake_results_ask_cudnn_nothing():
    """A rewritten graph has its types computed anew; ATen's own would ask cuDNN about weights that lie nowhere."""
    graph_module = parse_fx(NETWORK.format(t="fp32", p=0.0))
    out = next(node for node in graph_module.graph.nodes if node.name == "out")
    out.meta["val"] = None
    refresh(graph_module)
    assert out.meta["val"].stride() == (5, 10, 1) and out.meta["val"].device.type == "cuda"


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_autocast_around_a_call_does_not_reach_it(kind):
    """Torch's own would cast everything to BF16 there."""
    layer, x, states = make(kind)
    leaves = list(layer.parameters())
    expected = by_network(kind, layer, x, states)
    theirs = torch.autograd.grad(expected[0].sum(), leaves)
    with torch.autocast("cpu", torch.bfloat16):
        result = by_network(kind, layer, x, states)
        ours = torch.autograd.grad(result[0].sum(), leaves)
    assert all(torch.equal(mine, other) for mine, other in zip((*result, *ours), (*expected, *theirs), strict=True))


def test_it_says_nothing_of_how_weights_lie(monkeypatch):
    """Copies in 16 bits lie in no buffer of cuDNN's, and `flatten_parameters`, which torch advises, does not help."""
    run = torch.ops.aten.gru.input

    def complaining(*arguments):
        warnings.warn("RNN module weights are not part of single contiguous chunk of memory.", stacklevel=1)
        return run(*arguments)

    monkeypatch.setattr(torch.ops.aten.gru, "input", complaining)
    layer, x, states = make("gru")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        OWN.recurrent_network(x, states, list(layer._flat_weights), "gru", True, 1, False)


@pytest.mark.compiles
def test_a_compiled_graph_of_forward_and_backward_holds_both():
    layer, x, states = make("lstm")
    weights = [one.detach() for one in layer._flat_weights]

    def gradients(x, h, c, *weights):
        leaves = [one.detach().requires_grad_() for one in weights]
        with torch.enable_grad():
            out = recurrent_network.network("lstm", x, [h, c], leaves, *options_of(layer))[0]
        return torch.autograd.grad(out.square().sum(), leaves)

    inputs = [x, *states, *weights]
    expected = gradients(*inputs)
    run = inductor.compile_graph(traced_graph(gradients, *inputs), inputs)
    with torch.no_grad():
        result = run(*inputs)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)
