"""Nodes that are settled before the cut: the labels are those of a cut over all free nodes."""

from __future__ import annotations

import pytest
from planning import draft_of, finish
from planning_random import random_graph

from amp_compiler.planner import cut
from amp_compiler.planner.settled import settled_low


def labels_and_notes(graph, decisions):
    done = finish(draft_of(graph, decisions))
    return dict(done.labels), dict(done.notes), done.casts


@pytest.mark.parametrize("device", ["cpu", "onnx"])
def test_labels_and_reasons_are_those_of_a_cut_over_all(monkeypatch, device):
    settled = 0
    for seed in range(150):
        graph, decisions = random_graph(seed, 1 + seed % 12)
        graph.device = device
        found = labels_and_notes(graph, decisions)
        sizes: list[int] = []

        def none(problem, sizes=sizes):
            sizes.append(len(settled_low(problem)))
            return set()

        with monkeypatch.context() as patch:
            patch.setattr(cut, "settled_low", none)
            assert found == labels_and_notes(graph, decisions)
        settled += sum(sizes)
    assert settled > 50
