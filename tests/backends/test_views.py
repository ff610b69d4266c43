"""What was traced as a view, and is none when the compiler traces it again."""

from __future__ import annotations

import pytest
import torch

import amp_compiler as amp
from amp_compiler.backends import inductor
from amp_compiler.fx.text import parse_fx


def test_the_compiler_is_given_reshapes(monkeypatch):
    given = []
    monkeypatch.setattr(inductor, "compile_graph", lambda graph_module, *_: given.append(graph_module))
    read = parse_fx("in x: bf16[2, 3]\nview: bf16[6] = aten.view.default(x, [6])\nreturn view")
    inductor.build(read, [torch.zeros(2, 3, dtype=torch.bfloat16)])
    (made,) = given
    targets = [node.target for one in (read, made) for node in one.graph.nodes if node.op == "call_function"]
    assert targets == [torch.ops.aten.view.default, torch.ops.aten.reshape.default]


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
    assert "pieces" not in step.execution and losses[-1] < losses[0]
