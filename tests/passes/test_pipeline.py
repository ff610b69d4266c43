"""The whole plan: idempotent, deterministic, honest about its reasons."""

from dataclasses import replace

import pytest
import torch
from graph_reading import parse_graph
from hypothesis import given, settings
from hypothesis import strategies as st
from planning import FP16, apply_plan, draft_of, finish
from planning_random import random_graph

import amp_compiler as amp
from amp_compiler.errors import GraphError, PassError
from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.passes.pipeline import Stages
from amp_compiler.passes.plan.make_plan import make_plan, plan_of
from amp_compiler.planner.draft import Draft
from amp_compiler.planner.free_nodes import own_elements
from amp_compiler.policy.loader import load_rules
from amp_compiler.policy.rules import Precision

RULES = load_rules("default")
GRAPH = """graph cpu
input x: fp32[4, 8]
param w: fp32[8, 8]
param b: fp32[8]
h = aten.linear(input=x, weight=w, bias=b) -> fp32[4, 8]  module=fc1 source="model.py:3"
g = aten.gelu(self=h) -> fp32[4, 8]
v = aten.view(self=g) {size=(8, 4)} -> fp32[8, 4]
s = aten.softmax(self=v) {dim=-1} -> fp32[8, 4]
y = aten.matmul(self=s, other=h) -> fp32[8, 8]
a = aten.add(self=y, other=w) -> fp32[8, 8]
return a
"""


def placed(plan: PrecisionPlan) -> list[str]:
    """Values that the plan casts, the model's own casts left out."""
    return [cast.value for cast in plan.casts if not cast.explicit and cast.src != cast.dst]


def test_a_plan_of_real_rules() -> None:
    plan = make_plan(parse_graph(GRAPH), RULES, FP16)
    by_name = {node.name: node for node in plan.nodes}
    assert {name: node.precision for name, node in by_name.items()} == {
        "h": "low", "g": "low", "v": "low", "s": "fp32", "y": "low", "a": "fp32",
    }  # fmt: skip
    assert by_name["h"].outputs == (("h", "fp16"),)
    assert by_name["h"].rule.startswith("default.yaml:")
    assert (by_name["h"].family, by_name["h"].module, by_name["h"].source) == ("matmul", "fc1", "model.py:3")
    assert (by_name["v"].requested, by_name["a"].requested) == ("follow", "widest")
    assert by_name["a"].reason.endswith("; 'w' is fp32")
    assert "; follows: so that casts and nodes move the fewest bytes" in by_name["v"].reason
    assert plan.device == "cpu" and plan.dtype == "fp16" and plan.rules == RULES.name


@pytest.mark.parametrize("low", [DType.FLOAT16, DType.BFLOAT16])
def test_the_plan_of_a_planned_graph_has_no_more_casts(low: DType) -> None:
    graph = parse_graph(GRAPH)
    plan = make_plan(graph, RULES, low)
    assert placed(plan)
    again = make_plan(apply_plan(graph, plan), RULES, low)
    assert placed(again) == []
    assert again.cast_bytes == plan.cast_bytes


def moved(draft: Draft) -> int:
    """Bytes that all casts and the free nodes move."""
    total = sum(cast.bytes for cast in draft.casts or ())
    for name, label in draft.labels.items():
        if draft.decisions[name].precision is Precision.FOLLOW:
            total += own_elements(draft.typing, name) * (4 if label == "fp32" else 2)
    return total


@pytest.mark.parametrize("start", range(0, 200, 50))
def test_planning_again_places_no_casts_but_where_that_saves_bytes(start: int) -> None:
    """In a planned graph casts stand as the model's own, so more is known to be rounded: then less may be better."""
    for seed in range(start, start + 50):
        graph, decisions = random_graph(seed, 8)
        draft = finish(draft_of(graph, decisions))
        again = finish(draft_of(apply_plan(graph, plan_of(draft)), decisions))
        assert moved(again) <= moved(draft)
        assert moved(again) < moved(draft) or placed(plan_of(again)) == []


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6))
def test_denying_everything_casts_nothing(seed: int) -> None:
    graph, _ = random_graph(seed, 8)
    for value in list(graph.values.values()):
        if value.dtype is FP16:
            graph.values[value.name] = replace(value, dtype=DType.FLOAT32)
    plan = plan_of(finish(draft_of(graph, dict.fromkeys(graph.nodes, "fp32"))))
    assert plan.casts == ()


def test_what_cannot_be_planned_is_refused() -> None:
    graph = parse_graph(GRAPH)
    with pytest.raises(PassError, match="float32 is no low-precision type"):
        make_plan(graph, RULES, DType.FLOAT32)
    graph.outputs = ["nothing"]
    with pytest.raises(GraphError, match="nothing"):
        make_plan(graph, RULES, FP16)
    with pytest.raises(PassError, match="casts were not placed yet"):
        plan_of(draft_of(GRAPH))


def test_the_contract_is_checked_where_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without stages and AMP_VERIFY no state of a draft is taken, and no text of it written."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the state of a draft was taken")

    monkeypatch.setattr(Draft, "state", refuse)
    monkeypatch.setattr(Draft, "to_text", refuse)
    monkeypatch.setenv("AMP_VERIFY", "0")
    assert make_plan(parse_graph(GRAPH), RULES, FP16).nodes
    with pytest.raises(AssertionError, match="was taken"):
        make_plan(parse_graph(GRAPH), RULES, FP16, stages=Stages())
    monkeypatch.setenv("AMP_VERIFY", "1")
    with pytest.raises(AssertionError, match="was taken"):
        make_plan(parse_graph(GRAPH), RULES, FP16)


def test_stages_are_the_same_where_passes_are_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a pass says truly that it changed something, over all the passes of a step."""

    def texts(verifies: str) -> list[tuple[str, str]]:
        monkeypatch.setenv("AMP_VERIFY", verifies)
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(2, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.Flatten(), torch.nn.Linear(8, 2)
        )
        optimizer = torch.optim.AdamW(model.parameters())
        step = amp.training_step(
            model, lambda m, x: m(x).softmax(1)[:, 0].mean(), optimizer, dtype="fp16", backend="eager"
        )
        step(torch.ones(4, 2, 4, 4))
        return [(stage.name, stage.text) for stage in step.stages]

    believed, checked = texts("0"), texts("1")
    assert len({text for _, text in checked}) > 8
    assert believed == checked
