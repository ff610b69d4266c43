"""The gradient of a tied embedding: its lookup's rows go into the product's dense gradient."""

import copy

import pytest
import torch
from torch import nn
from toys import next_words, sgd_step

LOOKUP = torch.ops.aten.embedding_dense_backward.default


class Tied(nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6, **options)

    def forward(self, tokens):
        return torch.tanh(self.table(tokens)) @ self.table.weight.t()


def graph_and_gradient(model, **options):
    tokens = torch.tensor([[1, 2, 2, 0], [3, 10, 1, 1]])  # repeated rows, and the padding row
    step = sgd_step(model, next_words, 0.0, **options)
    reference = copy.deepcopy(model)
    step(tokens, tokens.flip(1))
    next_words(reference, tokens, tokens.flip(1)).backward()
    return step.graph_module.graph, step.gradients()["table.weight"], reference.table.weight.grad


@pytest.mark.parametrize("options", [{}, {"padding_idx": 0}, {"padding_idx": 1}])
def test_rows_are_added_to_the_dense_gradient(options):
    torch.manual_seed(0)
    graph, mine, expected = graph_and_gradient(Tied(**options), enabled=False)
    torch.testing.assert_close(mine, expected)
    # In FP32 autograd itself adds the two; the table has two gradients where its 16-bit form is a leaf too.
    torch.manual_seed(0)
    graph, mine, expected = graph_and_gradient(Tied(**options), dtype="bf16")
    torch.testing.assert_close(mine, expected, rtol=3e-2, atol=3e-3)
    assert not graph.find_nodes(op="call_function", target=LOOKUP)
    assert mine.dtype == torch.float32


def test_counts_of_rows_keep_their_own_gradient():
    torch.manual_seed(0)
    graph, mine, expected = graph_and_gradient(Tied(scale_grad_by_freq=True), dtype="bf16")
    torch.testing.assert_close(mine, expected, rtol=3e-2, atol=3e-3)
    assert graph.find_nodes(op="call_function", target=LOOKUP)
