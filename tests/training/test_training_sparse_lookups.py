"""Lookups with `sparse=True`: the step makes dense gradients, and trains as torch does with sparse ones."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import amp_compiler as amp

IDS = torch.tensor([[1, 2, 2], [0, 5, 1]])
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, 0.1),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("lookup", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_lookups_train_as_in_torch(lookup, optimizer):
    torch.manual_seed(0)
    model = nn.Sequential(lookup(8, 4, sparse=True), nn.Linear(4, 4))
    plain = copy.deepcopy(model)
    step = amp.training_step(
        model, lambda m, ids: m(ids).square().mean(), OPTIMIZERS[optimizer](model.parameters()), backend="eager",
        enabled=False,
    )  # fmt: skip
    reference = OPTIMIZERS[optimizer](plain.parameters())
    for _ in range(3):
        loss = step(IDS)
        reference.zero_grad()
        expected = plain(IDS).square().mean()
        expected.backward()
        assert plain[0].weight.grad.is_sparse
        reference.step()
        torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(list(model.parameters()), list(plain.parameters()))
    assert torch.equal(model[0].weight[7], plain[0].weight[7])  # a row that was never looked up


def test_in_16_bits_with_a_dense_optimizer():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4))
    step = amp.training_step(
        model, lambda m, ids: m(ids).square().mean(), torch.optim.AdamW(model.parameters(), 0.1), dtype="bf16",
        backend="eager",
    )  # fmt: skip
    losses = [float(step(IDS)) for _ in range(4)]
    assert losses[-1] < 0.5 * losses[0]
