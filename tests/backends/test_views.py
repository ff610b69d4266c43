"""What was traced as a view, and is none when the compiler traces it again."""

from __future__ import annotations

from dataclasses import replace

import pytest
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


@pytest.mark.slow
@pytest.mark.compiles
def test_attention_with_dropout_is_one_graph():
    """The strides of the attention weights come out otherwise behind the dropout that the compiler opens."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 32, "n_positions": 8}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, eos_token_id=None, bos_token_id=None)).train()
    ids = torch.randint(0, 32, (2, 8))
    step = amp.training_step(
        model, lambda m, ids: m(input_ids=ids, labels=ids).loss, torch.optim.SGD(model.parameters(), 0.1), dtype="bf16"
    )
    losses = [float(step(ids)) for _ in range(8)]
    assert "subgraphs" not in step.execution and losses[-1] < losses[0]
