"""What was traced as a view, and is none when the compiler traces it again."""

from __future__ import annotations

from dataclasses import replace

import torch

import amp_compiler as amp
from amp_compiler.backends import BACKENDS


def test_the_compiler_is_given_reshapes(monkeypatch):
    given = []

    def build(graph_module, *_):
        given.append(graph_module)
        return graph_module.forward

    class Rows(torch.nn.Module):
        def forward(self, x):
            return x.relu().view(6)

    monkeypatch.setitem(BACKENDS, "inductor", replace(BACKENDS["inductor"], build=build))
    model = amp.compile(Rows(), dtype="bf16")
    with torch.no_grad():
        assert torch.equal(model(torch.ones(2, 3)), torch.ones(6))
    (made,) = given
    assert torch.ops.aten.reshape.default in [node.target for node in made.graph.nodes]
    assert torch.ops.aten.view.default not in [node.target for node in made.graph.nodes]
    assert "aten.view.default" in model.graph_module.code
