"""Graphs whose code is written late, where torch can."""

from __future__ import annotations

import subprocess
import sys

import torch
from torch import fx

from amp_compiler.fx.torch_private import forward_of, new_graph_module, traced_graph


def traced() -> fx.GraphModule:
    return traced_graph(lambda x: torch.relu(x) + 1, torch.zeros(2))


def test_a_rewritten_graph_computes_and_shows_what_it_says() -> None:
    module = traced()
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


def test_many_rewrites_write_the_code_once(monkeypatch) -> None:
    written = []
    monkeypatch.setattr(
        fx.Graph,
        "python_code",
        lambda self, *a, real=fx.Graph.python_code, **k: (written.append(1), real(self, *a, **k))[1],
    )
    module = traced()
    module = new_graph_module(module, module.graph)
    for _ in range(5):
        module.recompile()
    assert not written
    assert module(torch.ones(2)).sum() == 4 and module(torch.ones(2)).sum() == 4
    assert len(written) == 1


def test_a_model_of_ones_own_loads_nothing_of_transformers() -> None:
    code = (
        "import sys, torch, transformers, amp_compiler as amp; "
        "amp.compile(torch.nn.Linear(2, 2), dtype='bf16', backend='eager')(torch.ones(1, 2)); "
        "print([name for name in ('transformers.cache_utils', 'transformers.modeling_utils') if name in sys.modules])"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert made.stdout.strip() == "[]"
