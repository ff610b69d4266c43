"""Writes that happen only where a step counts are done together or left out together."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from amp_compiler.ops.update.operators import COMMIT, commit, decomposition


@pytest.mark.parametrize("skip", [0.0, 1.0])
@pytest.mark.parametrize("run", [COMMIT, commit], ids=["operator", "traceable"])
def test_all_are_written_or_none(run, skip):
    targets = [torch.zeros(3), torch.zeros((), dtype=torch.int64)]
    run(torch.tensor(skip), targets, [torch.ones(3), torch.tensor(7)])
    assert targets[0].tolist() == [1.0 - skip] * 3
    assert targets[1].item() == (0 if skip else 7)


def test_nan_is_not_written_where_the_step_is_skipped():
    target = torch.ones(2)
    commit(torch.tensor(1.0), [target], [torch.full((2,), float("nan"))])
    assert target.tolist() == [1.0, 1.0]


def test_it_opens_into_a_choice_and_a_copy():
    traced = make_fx(decomposition(COMMIT), tracing_mode="fake")(torch.zeros(()), [torch.zeros(3)], [torch.ones(3)])
    targets = [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]
    assert targets == ["aten.ne.Scalar", "aten.where.self", "aten.copy_.default"]
