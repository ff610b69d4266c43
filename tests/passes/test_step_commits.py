"""Writes that happen only where a step counts: which nodes they are, and that they are done or left out together."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from amp_compiler.passes.step.group_commits import commits, run_commits


def traced(function, *sizes):
    return make_fx(function, tracing_mode="fake")(torch.zeros(()), *[torch.zeros(size) for size in sizes]).graph


def keep(skip, old, new):
    return torch.where(skip != 0, old, new)


def test_conditional_writes_are_found():
    def function(skip, a, b, x):
        value = x + a
        a.copy_(keep(skip, a, value))
        b.copy_(keep(skip, b, x * 2))
        return x.sum()

    graph = traced(function, 3, 3, 3)
    skip, a, b, _ = graph.find_nodes(op="placeholder")
    found = commits(graph)
    assert [(one.skip, one.target) for one in found] == [(skip, a), (skip, b)]
    assert [str(one.value.target) for one in found] == ["aten.add.Tensor", "aten.mul.Tensor"]
    assert all([str(node.target) for node in one.nodes] == ["aten.ne.Scalar", "aten.where.self", "aten.copy_.default"]
               for one in found)  # fmt: skip


def read_later(skip, a, x):
    a.copy_(keep(skip, a, x * 2))
    return a + 1


def view_read_later(skip, a, x):
    view = a.view(3, 1)
    a.copy_(keep(skip, a, x * 2))
    return view + 1


def unconditional(skip, a, x):
    a.copy_(x)
    return x + 1


def other_way_round(skip, a, x):
    a.copy_(keep(skip, x * 2, a))
    return x + 1


def choice_is_returned(skip, a, x):
    chosen = keep(skip, a, x * 2)
    a.copy_(chosen)
    return chosen + 1


def another_condition(skip, a, x):
    a.copy_(torch.where(skip != 1, a, x * 2))
    return x + 1


def broadcast(skip, a, x):
    a.copy_(keep(skip, a, x[:1] * 2))
    return x + 1


def value_is_an_input(skip, a, x):
    a.copy_(keep(skip, a, x.view(3)))
    return x + 1


@pytest.mark.parametrize(
    "function",
    [
        read_later,
        view_read_later,
        unconditional,
        other_way_round,
        choice_is_returned,
        another_condition,
        broadcast,
        value_is_an_input,
    ],
)
def test_what_is_not_such_a_write_is_left_alone(function):
    assert commits(traced(function, 3, 3)) == []


@pytest.mark.parametrize("skip", [0.0, 1.0])
def test_all_are_written_or_none(skip):
    targets = [torch.zeros(3), torch.zeros((), dtype=torch.int64)]
    run_commits(torch.tensor(skip), targets, [torch.ones(3), torch.tensor(7)])
    assert targets[0].tolist() == [1.0 - skip] * 3
    assert targets[1].item() == (0 if skip else 7)
