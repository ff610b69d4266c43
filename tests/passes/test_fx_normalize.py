"""The normal form computes bit for bit what the captured graph does, and has lost what stands in a rewrite's way."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from toys import Composed

from amp_compiler.fx.capture.export import captured_from_program, export_module
from amp_compiler.fx.captured import Captured, Source, tensor_getter
from amp_compiler.fx.lower import lower
from amp_compiler.ir.graph import PrecisionGraph
from amp_compiler.passes.pipeline import CAPTURE


def run(model: nn.Module, captured: Captured, *args: torch.Tensor):
    inputs = [
        args[entry.index] if entry.source is Source.USER else tensor_getter(model, captured, entry)()
        for entry in captured.inputs
    ]
    return captured.graph_module(*inputs)


def normal_form(model: nn.Module, *args: torch.Tensor) -> tuple[Captured, PrecisionGraph]:
    captured = captured_from_program(export_module(model, args))
    CAPTURE.run(captured.graph_module, {})
    return captured, lower(captured)


def ops(graph: PrecisionGraph) -> list[str]:
    return [node.op for node in graph.nodes.values()]


def check_equal(model: nn.Module, *args: torch.Tensor) -> PrecisionGraph:
    captured, graph = normal_form(model, *args)
    torch.manual_seed(0)
    expected = model(*[a.clone() for a in args])
    torch.manual_seed(0)
    actual = run(model, captured, *[a.clone() for a in args])
    expected = expected if isinstance(expected, tuple) else (expected,)
    for got, wanted in zip(actual, expected, strict=True):
        assert got.dtype == wanted.dtype
        assert torch.equal(got, wanted)
    return graph


X = torch.linspace(-2, 2, 24).reshape(3, 8)


def test_a_change_through_a_view_stays_in_place_and_is_isolated():
    def function(m, x):
        y = m.fc(x)
        y[:, 0] = 7.0
        return y + 1

    graph = check_equal(Composed(function, fc=nn.Linear(8, 8)), X)
    linear = next(node for node in graph.nodes.values() if node.op == "aten.linear")
    assert linear.pin is None and not graph.values[linear.outputs[0]].volatile
    clone = next(node for node in graph.nodes.values() if node.op == "aten.clone")
    assert clone.pin is not None and clone.pin.precision == "keep"


def test_a_cast_that_does_nothing_touches_only_its_own_uses():
    graph = check_equal(Composed(lambda m, x: (m.fc(x).float().sum(), m.fc(x)), fc=nn.Linear(8, 8)), X)

    def function(m, x):
        y = m.fc(x)
        return y.float().exp(), m.fc(y)

    graph = check_equal(Composed(function, fc=nn.Linear(8, 8)), X)
    first, second = (node for node in graph.nodes.values() if node.op == "aten.linear")
    assert second.inputs[0].value == first.outputs[0]
    cast = next(node for node in graph.nodes.values() if node.op == "aten.to")
    assert cast.pin is not None and cast.pin.precision == "cast"


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: F.softmax(x, -1, dtype=torch.float32),
        lambda m, x: torch.fft.rfft(x).abs(),
        lambda m, x: x.to(torch.int64).float() * x,
        lambda m, x: x.double().sum().float(),
        lambda m, x: torch.cat(x.chunk(2, -1), 0).sort(-1),
        lambda m, x: F.dropout(x, 0.5, True),
        lambda m, x: x.type_as(torch.ones(1, dtype=torch.float64)),
        lambda m, x: torch.where(x > 0, x, -1e30).clamp_(min=-3),
    ],
)
def test_results_are_bit_identical(function):
    check_equal(Composed(function), X)


def test_module_paths_and_source_lines_reach_the_graph():
    _, graph = normal_form(nn.Sequential(nn.Linear(8, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2))), X)
    assert [(node.module, node.module_type) for node in graph.nodes.values()] == [
        ("0", "Linear"),
        ("1.0", "ReLU"),
        ("1.1", "Linear"),
    ]

    class Next(nn.Module):
        def forward(self, x):
            return x + 1

    _, graph = normal_form(Next(), X)
    assert all("test_fx_normalize.py:" in node.source for node in graph.nodes.values())
