"""Graphs whose code is written late, where torch can, and what is put right in one version of torch or another."""

import functools
import logging
import subprocess
import sys

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import amp_compiler as amp
from amp_compiler.fx.torch_private.inductor import inductor_graph_pass
from amp_compiler.fx.torch_private.tracing import forward_of, is_pointwise, recorded_graph, traced_graph


def test_a_rewritten_graph_computes_and_shows_what_it_says() -> None:
    module = traced_graph(lambda x: torch.relu(x) + 1, torch.zeros(2))
    (relu,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
    relu.target = torch.ops.aten.neg.default
    module.recompile()
    assert torch.equal(module(torch.ones(2)), torch.zeros(2))
    assert "aten.neg" in module.code and "aten.relu" not in module.code
    relu.target = torch.ops.aten.relu.default
    module.recompile()
    assert torch.equal(forward_of(module)(torch.ones(2)), torch.full((2,), 2.0))
    plain = fx.GraphModule(module, module.graph)
    assert torch.equal(forward_of(plain)(torch.ones(2)), torch.full((2,), 2.0))


@pytest.mark.parametrize("is_static", [True, False])
def test_a_recorded_graph_is_the_traced_one(is_static) -> None:
    def function(a, b):
        first = a.float().reshape(-1).split(4)[0].neg()
        torch._foreach_add_([first], 1.0)
        return [b, torch.where(first > 0, 1 - b.sum(), 0.0), torch.zeros_like(a), torch.full((), 2.0, device=a.device)]

    one = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.ones(5, 2), static_shapes=is_static)
    traced = traced_graph(lambda *inputs: function(*inputs), one, one.clone(), _allow_non_fake_inputs=True).graph
    graphs = traced, recorded_graph(function, one, one.clone())
    shown = [[(str(node.target), node.name) for node in graph.nodes if node.op != "placeholder"] for graph in graphs]
    assert shown[0] == shown[1] and len(shown[0]) > 8
    assert len({*recorded_graph(lambda a, b: [a, b], one, one).output_node().args[0]}) == 2  # one tensor, two inputs


@pytest.mark.slow  # what imports it reads a user's class, of which there is none here
def test_a_model_of_ones_own_loads_nothing_of_transformers() -> None:
    code = (
        "import sys, torch, transformers, amp_compiler as amp; "
        "amp.compile(torch.nn.Linear(2, 2), dtype='bf16', backend='eager')(torch.ones(1, 2)); "
        "print([name for name in ('transformers.cache_utils', 'transformers.modeling_utils') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_log_of_a_capture_takes_functions_among_dynamos_settings(monkeypatch) -> None:
    for name in ("warning_once", "info_once"):  # as transformers adds them
        monkeypatch.setattr(logging.Logger, name, functools.lru_cache(lambda self, text: None), raising=False)
    errors, timed = list[str](), list[int]()
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: errors.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("torch._dynamo.metrics_context")
    log.addHandler(handler)
    monkeypatch.setattr(torch._dynamo.guards, "profile_guard_manager", lambda *_: timed.append(1) or 0.0)
    try:
        for is_read in (False, True):  # guards are timed where that is read
            amp.compile(torch.nn.Linear(2, 2), dtype="bf16", backend="eager")(torch.ones(1, 2))
            assert bool(timed) == is_read
            monkeypatch.setenv("TORCH_TRACE", "")
    finally:
        log.removeHandler(handler)
    assert errors == []


def test_a_pass_of_ones_own_runs_where_inductor_takes_one_alone(monkeypatch) -> None:
    from torch._inductor import custom_graph_pass

    monkeypatch.delattr(custom_graph_pass, "get_custom_graph_passes", raising=False)
    seen: list[str] = []

    class Cached(custom_graph_pass.CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            seen.append("theirs")

        def uuid(self) -> str:
            return "of theirs"

    for theirs, identity in (
        (None, "of ours"),
        (Cached(), ("of theirs", "of ours")),
        ([Cached(), Cached()], ("of theirs", "of theirs", "of ours")),
        (lambda graph: seen.append("theirs"), None),  # of which torch keeps nothing either
    ):
        seen.clear()
        result = inductor_graph_pass("of ours", [lambda graph: seen.append("ours")], theirs)
        result(fx.Graph())
        assert seen == ["theirs"] * (0 if theirs is None else len(theirs) if isinstance(theirs, list) else 1) + ["ours"]
        assert result.uuid() == identity


def test_the_last_states_of_an_lstm_have_the_form_that_they_have_in_eager() -> None:
    class Last(torch.nn.LSTM):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            _, (hidden, _) = super().forward(x)
            return hidden.transpose(0, 1).reshape(hidden.size(1), -1)

    torch.manual_seed(0)
    model, x = Last(4, 8, 2, batch_first=True), torch.randn(3, 5, 4)
    result, expected = amp.compile(model, dtype="bf16", backend="eager")(x), model(x)
    assert result.shape == expected.shape
    torch.testing.assert_close(result, expected, rtol=2**-6, atol=2**-7)


def test_every_activation_is_made_element_by_element() -> None:
    """Whatever of it this torch's tags leave out."""
    aten = torch.ops.aten
    rectifiers = (aten.relu, aten.leaky_relu, aten._prelu_kernel, aten.elu, aten.celu, aten.selu, aten.softplus)
    others = (aten.gelu, aten.silu, aten.mish, aten.sigmoid, aten.tanh, aten.hardtanh, aten.hardswish, aten.hardsigmoid)
    assert [one for one in (*rectifiers, *others) if not is_pointwise(one.default)] == []
    assert not is_pointwise(aten._softmax.default) and not is_pointwise(aten.mm.default)
