"""GELU that is written out, in the forms of several libraries, is the operator: the same numbers, and found."""

from __future__ import annotations

import math

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from amp_compiler.passes.step.join_gelu import JoinGelu

ROOT = math.sqrt(2 / math.pi)
FORMS = {
    "gpt2": lambda x: 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3.0)))),
    "fast": lambda x: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x))),
    "half outside": lambda x: 0.5 * (x * (torch.tanh(0.7978845608028654 * x + 0.035677408136 * x * x * x) + 1)),
    "square": lambda x: x * (1 + torch.tanh(ROOT * x * (0.044715 * x**2 + 1))) * 0.5,
}
OTHERS = {
    "quick": lambda x: x * torch.sigmoid(1.702 * x),
    "another cube": lambda x: 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.05 * torch.pow(x, 3.0)))),
    "not halved": lambda x: x * (1.0 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3.0)))),
    "of two values": lambda x: 0.5 * x * (1.0 + torch.tanh(ROOT * (x.sin() + 0.044715 * torch.pow(x.sin(), 3.0)))),
    "a gate": lambda x: 0.5 * x.sin() * (1.0 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3.0)))),
    "a term with a factor": lambda x: (
        0.5 * x * torch.ops.aten.add.Scalar(torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3.0))), 0.5, 1)
    ),
    "plain": lambda x: torch.tanh(x) + 1,
}


def traced(form):
    """The form as a graph, behind and in front of something else."""
    return make_fx(lambda x: form(x * 2).sin(), tracing_mode="fake")(torch.ones(4, 8))


def gelus(graph_module: fx.GraphModule):
    return [node.kwargs for node in graph_module.graph.nodes if node.target is torch.ops.aten.gelu.default]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_way_to_write_it_is_found(form):
    graph_module = traced(form)
    x = torch.randn(4, 8, dtype=torch.float64)
    expected = graph_module(x)
    assert JoinGelu(tuned=True)(graph_module).modified
    assert gelus(graph_module) == [{"approximate": "tanh"}] and len(graph_module.graph.nodes) == 5
    torch.testing.assert_close(graph_module(x), expected, rtol=1e-7, atol=1e-7)  # constants of eight digits


@pytest.mark.parametrize("form", OTHERS.values(), ids=OTHERS)
def test_what_is_no_gelu_is_left_alone(form):
    graph_module = traced(form)
    assert not JoinGelu(tuned=True)(graph_module).modified and not gelus(graph_module)
