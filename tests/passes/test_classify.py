"""`classify`: pins, guards, rules, and the contract of the pass."""

from dataclasses import replace

import pytest

from amp_compiler.errors import PassError, RuleError
from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.graph import Node, Operand, Pin, PrecisionGraph, Value, ValueKind
from amp_compiler.passes.plan.classify import Classify
from amp_compiler.planner.draft import Draft
from amp_compiler.policy.loader import load_rules
from amp_compiler.policy.rules import Context, Precision

FP16, BF16, F32 = DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32


def draft_of(*nodes, types=None, rules="default", low=FP16, device="cuda"):
    """A chain of nodes that all read `x`."""
    graph = PrecisionGraph(device)
    types = types or {}
    graph.add_value(Value("x", types.get("x", F32), (4, 8), 32, ValueKind.INPUT))
    for node in nodes:
        graph.add_node(node, [Value(name, types.get(name, F32), (4, 8), 32) for name in node.outputs])
    return Draft(graph, load_rules(rules), Context(low, device))


def node(op, name="y", **facts):
    return Node(name, op, (Operand("x", "self"),), (name,), **facts)


def classify(*nodes, **options):
    return Classify()(draft_of(*nodes, **options)).subject.decisions


def test_rules_of_a_file_are_named_by_its_path(tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text("version: 1\nextends: default\ndeny: [aten.linear]\n")
    result = classify(node("aten.linear"), rules=path)["y"]
    assert (result.precision, result.rule) == (Precision.FP32, f"{path}:3")
    assert result.reason == "'aten.linear' is on the deny list"


def test_bf16_holds_what_fp16_does_not():
    assert classify(node("aten.masked_fill", attrs={"value": -1e30}), low=BF16)["y"].precision is Precision.FOLLOW
    largest_float = classify(node("aten.masked_fill", attrs={"value": -3.4028234663852886e38}), low=BF16)["y"]
    assert largest_float.precision is Precision.FP32, "bf16 rounds the smallest float to minus infinity"


def test_it_says_that_it_changed_something_and_refuses_a_second_run():
    draft = draft_of(node("aten.linear"))
    result = Classify()(draft)
    assert result.modified and not draft.decisions
    with pytest.raises(PassError, match="classified already"):
        Classify()(result.subject)


def test_an_empty_graph_is_not_modified():
    result = Classify()(draft_of())
    assert not result.modified and result.subject.decisions == {}


def test_calibrated_ranges_reach_the_rules():
    rules = {"version": 1, "rules": [{"match": {"absmax": "> 100"}, "precision": "fp32"}]}
    draft = replace(draft_of(node("aten.linear", "a"), rules=rules), ranges={"a": 1000.0})
    assert Classify()(draft).subject.decisions["a"].precision is Precision.FP32


REFUSING = {
    "version": 1,
    "extends": "default",
    "rules": [{"match": {"op": "aten.exp"}, "refuse": "take softmax", "why": "it overflows"}],
}


def test_what_a_rule_refuses_is_an_error_with_node_rule_reason_and_fix():
    with pytest.raises(RuleError, match=r"'y' \(aten.exp\) at m.py:3 is refused: it overflows.*take softmax") as caught:
        classify(node("aten.exp", source="m.py:3"), rules=REFUSING)
    assert caught.value.key == "rules.0"


def test_a_refusal_gives_way_to_a_later_rule_and_to_what_the_model_says():
    lifted = {**REFUSING, "rules": [*REFUSING["rules"], {"match": {"op": "aten.exp"}, "precision": "low"}]}
    assert classify(node("aten.exp"), rules=lifted)["y"].precision is Precision.LOW
    pinned = node("aten.exp", pin=Pin("fp32", "a region without autocast"))
    assert classify(pinned, rules=REFUSING)["y"].precision is Precision.FP32
