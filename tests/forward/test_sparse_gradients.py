"""Lookups with `sparse=True` under `amp.compile`: their tables have the sparse gradients that torch's have."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import amp_compiler as amp

IDS = torch.tensor([[1, 2, 2], [0, 5, 1]])


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("rules", ["default", "apex-o3"])
@pytest.mark.parametrize("lookup", [nn.Embedding, nn.EmbeddingBag])
def test_a_compiled_model_makes_sparse_gradients(lookup, rules):
    torch.manual_seed(0)
    model = nn.Sequential(lookup(8, 4, sparse=True), nn.Linear(4, 4))
    plain = copy.deepcopy(model)
    compiled = amp.compile(model, rules=rules, dtype="bf16", backend="inductor")
    for one in (compiled, plain):
        one(IDS).square().sum().backward()
    ours, theirs = model[0].weight.grad, plain[0].weight.grad
    assert ours.is_sparse and theirs.is_sparse
    difference = (ours.to_dense() - theirs.to_dense()).norm()
    assert 0 < difference < 2e-2 * theirs.to_dense().norm()  # a few roundings of 2**-9 each
    assert [node.precision for node in compiled.plan.nodes if node.op == "aten.linear"] == ["low"]
    torch.optim.SparseAdam([model[0].weight]).step()
