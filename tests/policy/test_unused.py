"""Rules that match no node of a model: which are told, with what name, how often."""

import json
import logging
from typing import Any

import pytest
import torch
from graph_reading import parse_graph
from torch import nn
from toys import sgd_step

import amp_compiler as amp
from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.plan import PrecisionPlan, UnusedRule
from amp_compiler.policy.loader import load_rules
from amp_compiler.policy.matching import RuleMatcher
from amp_compiler.policy.rules import Context
from amp_compiler.policy.unused import unused_rules, warn_of_unused

GRAPH = """\
graph cpu
input x: fp32[2, 8]
q = aten.linear(self=x) -> fp32[2, 8] module=decoder.layers.0.attn.q_proj type=Linear
scores = aten.softmax(self=x) -> fp32[2, 8] module=decoder.layers.0.attn type=Attention
out = aten.add(self=x) -> fp32[2, 8] module=decoder type=Decoder
"""


def unused(rules: Any, low: DType = DType.BFLOAT16) -> tuple[UnusedRule, ...]:
    return unused_rules(RuleMatcher(load_rules(rules), parse_graph(GRAPH), Context(low)))


def only(**match: Any) -> UnusedRule | None:
    result = unused({"version": 1, "extends": "default", "rules": [{"match": match, "precision": "low"}]})
    return result[0] if result else None


@pytest.mark.parametrize(
    ("match", "condition", "nearest"),
    [
        ({"module": "decodr"}, "module", "decoder"),
        ({"module": "decodr.*"}, "module", "decoder.layers.0.attn.q_proj"),
        ({"module": "*.atn"}, "module", "decoder.layers.0.attn"),
        ({"module": ["zzz", "decoder.layers.0.atn"]}, "module", "decoder.layers.0.attn"),
        ({"module_type": "Atention"}, "module_type", "Attention"),
        ({"op": "aten.softplus"}, "op", "aten.softmax"),
        ({"node": "^scoers$"}, "node", "scores"),
        ({"family": "convolution"}, "family", ""),
        ({"attr": {"dim": 1}}, "attr", ""),
        ({"absmax": "> 1"}, "absmax", ""),
        ({"module": "decoder", "op": "aten.softplus"}, "op", "aten.softmax"),
        ({"module": "decoder", "op": "aten.softmax"}, "", "scores"),
    ],
)
def test_what_is_told(match: dict[str, Any], condition: str, nearest: str) -> None:
    result = only(**match)
    assert result is not None
    assert (result.rule, result.condition, result.nearest) == ("<dict>:rules.0", condition, nearest)


@pytest.mark.parametrize(
    "match", [{}, {"module": "decoder"}, {"op": "aten.*"}, {"family": "softmax", "node": "s"}, {"phase": "forward"}]
)
def test_a_rule_that_matches_is_used_whoever_decides(match: dict[str, Any]) -> None:
    assert only(**match) is None


def test_a_rule_for_another_device_or_type_is_not_told() -> None:
    assert only(device="cuda", module="decodr") is None
    assert only(dtype="fp16", module="decodr") is None
    assert only(device="cpu", module="decodr") is not None


def test_an_overruled_rule_is_used() -> None:
    later = [{"match": {"module": "decoder"}, "precision": "low"}, {"match": {}, "precision": "fp32"}]
    assert unused({"version": 1, "rules": later}) == ()


def test_presets_are_general_and_own_files_are_not(tmp_path: Any) -> None:
    assert all(unused(preset) == () for preset in ("default", "fast", "nvcaffe", "mxnet"))
    base, own = tmp_path / "base.yaml", tmp_path / "own.yaml"
    base.write_text("version: 1\nextends: default\ndeny: [convolution]\n")
    own.write_text(
        "version: 1\nextends: base.yaml\nallow: [matmul, aten.bmm]\nrules:\n"
        "  - match: {module: decodr, attr: {flag: true, dims: [0, 1]}}\n    precision: fp32\n    why: a reason\n"
    )
    result = unused(own)
    assert [rule.rule for rule in result] == [f"{base}:3", f"{own}:3", f"{own}:5"]
    assert [rule.text for rule in result] == [
        "deny: convolution",
        "allow: aten.bmm",
        "{match: {module: decodr, attr: {flag: true, dims: [0, 1]}}, precision: fp32}",
    ]


def test_the_text_of_a_rule() -> None:
    assert str(only(module="decodr")) == (
        "<dict>:rules.0, {match: {module: decodr}, precision: low} (the nearest module is 'decoder')"
    )
    assert str(only(absmax="> 1")).endswith("(no node has that absmax)")
    assert str(only(module="decoder", op="aten.softmax")).endswith("(node 'scores' meets most of its conditions)")


# ---- plans


RULES = {"version": 1, "extends": "default", "rules": [{"match": {"module": "fc2"}, "precision": "fp32"}]}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc1(x)


def test_a_plan_holds_them_and_is_saved_and_compared_with_them() -> None:
    plan = amp.explain(Net(), (torch.ones(2, 4),), rules=RULES, dtype="bf16")
    assert [(rule.condition, rule.nearest) for rule in plan.unused_rules] == [("module", "fc1")]
    assert PrecisionPlan.from_dict(json.loads(plan.to_json())) == plan
    assert "unused rule <dict>:rules.0" in str(plan)
    other = amp.explain(Net(), (torch.ones(2, 4),), rules={**RULES, "rules": []}, dtype="bf16")
    assert other.unused_rules == () and other != plan and "unused rule" in plan.diff(other)


# ---- one warning


def warnings_of(caplog: Any) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno == logging.WARNING and record.name == "amp_compiler"
    ]


@pytest.mark.parametrize("what", ["Net", "the training step"])
def test_one_warning_for_all_calls(what: str, caplog: Any) -> None:
    options: Any = {"rules": RULES, "dtype": "bf16", "backend": "eager"}
    model: Any = Net()
    if what == "Net":
        call: Any = amp.compile(model, **options)
    else:
        call = sgd_step(model, lambda m, x: m(x).sum(), **options)
    for rows in (2, 3):
        call(torch.ones(rows, 4))
    (said,) = warnings_of(caplog)
    assert said.startswith(f"a rule matches no node of {what}: <dict>:rules.0") and "'fc1'" in said


def test_a_model_in_subgraphs_uses_a_rule_that_one_subgraph_uses(caplog: Any) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            torch._dynamo.graph_break()
            return torch.softmax(self.second(x) * (1.0 if x.sum().item() > 0 else 2.0), -1)

    requested = {"version": 1, "extends": "default", "deny": ["softmax", "convolution"]}
    model = amp.compile(Broken(), rules=requested, dtype="bf16", backend="eager")
    model(torch.ones(2, 4))
    assert model.execution != "as one graph"
    assert [rule.text for rule in model.plan.unused_rules] == ["deny: convolution"]
    assert len(warnings_of(caplog)) == 1


def test_explaining_and_rules_in_use_warn_of_nothing(caplog: Any) -> None:
    amp.explain(Net(), (torch.ones(2, 4),), rules=RULES, dtype="bf16")
    used = {**RULES, "rules": [{"match": {"module": "fc1"}, "precision": "fp32"}]}
    amp.compile(Net(), rules=used, dtype="bf16", backend="eager")(torch.ones(2, 4))
    warn_of_unused((), "nothing")
    assert warnings_of(caplog) == []
