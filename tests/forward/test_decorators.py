"""`amp.compile` on functions, methods and classes of modules, and `fullgraph=True`."""

import functools
import inspect
import logging

import pytest
import torch
from torch import Tensor, nn
from toys import eager_step

import amp_compiler as amp

X = torch.linspace(-1, 1, 12).reshape(3, 4)
in_bf16 = functools.partial(amp.compile, dtype="bf16", backend="eager")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu())

    def encode(self, x: Tensor, *, scale: float = 2.0) -> Tensor:
        """Half of the way."""
        return self.first(x) * scale


def decorated() -> type[Net]:
    @in_bf16()
    class Decorated(Net):
        forward = Net.forward
        encode = in_bf16(Net.encode)

    return Decorated


def modules_of(plan: amp.PrecisionPlan) -> list[str]:
    return [node.module for node in plan.nodes if node.op == "aten.linear"]


def test_a_class_of_modules():
    torch.manual_seed(0)
    net, kind = Net(), decorated()
    mine = kind()
    mine.load_state_dict(net.state_dict())
    expected = amp.compile(net, dtype="bf16", backend="eager")(X)
    result = mine(X)
    assert isinstance(mine, Net)
    assert torch.equal(result, expected)
    assert not torch.equal(result, Net.forward(net, X))  # rounded
    assert modules_of(kind.forward.compiled.plan) == ["first", "last"]  # as rules name them
    assert mine.norm.num_batches_tracked == 1
    result.sum().backward()
    assert mine.first.weight.grad.dtype == torch.float32


def test_a_method_serves_every_object_and_sees_hooks():
    kind = decorated()
    one, other = kind(), kind()
    assert inspect.signature(kind.encode) == inspect.signature(Net.encode)
    assert kind.encode.__doc__ == Net.encode.__doc__
    for net in (one, other):
        expected = in_bf16(net.first, rules="default")(X) * 2
        assert torch.allclose(net.encode(X), expected, rtol=2**-7)
    assert kind.encode.compiled.compilations == 1
    one.first.register_forward_hook(lambda *_: torch.zeros(3, 8))
    assert not one.encode(X).any()
    assert other.encode(X).any()
    bound = in_bf16(Net().encode)
    assert bound(X, scale=0.0).shape == (3, 8)
    assert modules_of(bound.compiled.plan) == ["first"]


def test_a_function_and_what_it_closes_over():
    layer = nn.Linear(4, 4)

    @in_bf16
    def double(x: Tensor) -> Tensor:
        return layer(x) * 2

    result = double(X)
    assert double.__name__ == "double"
    assert double.compiled.plan.nodes[0].precision == "low"
    assert torch.equal(result, in_bf16(layer)(X) * 2)
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.fill_(1)
        assert torch.equal(double(X), torch.full((3, 4), 2.0))


def test_a_torch_compile_around_leaves_functions_and_methods_alone():
    net, weight = decorated()(), torch.randn(4, 8)
    multiplied = in_bf16(lambda x: x @ weight)
    for call in (multiplied, net.encode):
        expected = call(X)
        assert not torch.equal(expected, (X @ weight if call is multiplied else Net.encode(net, X)))
        assert torch.equal(torch.compile(lambda x, call=call: call(x) * 2, backend="eager")(X), expected * 2)


def test_in_a_training_step_and_a_compiled_module():
    mine, losses = decorated()(), []
    step = eager_step(mine, lambda m, x: m.encode(x).square().mean() + m(x).square().mean())
    losses += [float(step(X)) for _ in range(5)]
    assert losses == sorted(losses, reverse=True)
    assert step.execution.startswith("as one graph")
    whole = in_bf16(mine.eval())
    assert torch.equal(whole(X), in_bf16(mine)(X))
    assert whole.execution == "as one graph"


def generate(x: Tensor):
    yield x


TAKES = r"takes an nn\.Module or a function, not a \w+"


@pytest.mark.parametrize(
    ("wrong", "said"), [(3, TAKES), (int, TAKES), (X, TAKES), (generate, "generate is a generator or a coroutine")]
)
def test_what_is_neither_is_refused(wrong, said):
    with pytest.raises(amp.AmpError, match=said):
        in_bf16(wrong)


def broken(x: Tensor) -> Tensor:
    x = x @ x.T
    torch._dynamo.graph_break()
    return x @ x


def test_with_fullgraph_what_is_no_one_graph_is_an_error(caplog):
    assert in_bf16(broken)(X).shape == (3, 3)
    whole = in_bf16(broken, fullgraph=True)
    with pytest.raises(amp.CaptureError, match=r"broken is not one graph"):
        whole(X)
    layer = in_bf16(nn.Linear(4, 2), fullgraph=True)
    assert layer(X).shape == (3, 2)
    with caplog.at_level(logging.WARNING), pytest.raises(amp.CaptureError, match=r"Linear is not one graph: .*func"):
        torch.func.vmap(layer)(X)
    assert not caplog.records
