"""Rules that name what stands outside of the model, in the loss function of a step: `module: <loss_fn>`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from toys import eager_step

import amp_compiler as amp


class Net(nn.Module):
    """Computes in its own forward too, outside of any submodule."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp(self.fc(x))


def loss_fn(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    made = model["net"](x) if isinstance(model, dict) else model(x)
    return (torch.exp(-made) - y).square().mean()


def plan_of(rules: Any, model: Any = None) -> Any:
    model = model or Net()
    parameters = [p for one in (model.values() if isinstance(model, dict) else [model]) for p in one.parameters()]
    step = eager_step(model, loss_fn, torch.optim.SGD(parameters, 0.1), rules=rules)
    step(torch.randn(3, 8), torch.randn(3, 4))
    return step.plan


RULE = {"match": {"module": "<loss_fn>"}, "precision": "fp32", "why": "outside"}


def test_a_rule_reaches_the_loss_function_alone_and_the_model_keeps_its_own_names() -> None:
    plan = plan_of({"version": 1, "rules": [{"match": {}, "precision": "low"}, RULE]})
    outside = [(f"aten.{op}", "<loss_fn>", "fp32") for op in ("neg", "exp", "sub", "square", "mean")]
    inside = [("aten.linear", "fc", "low"), ("aten.exp", "", "low")]
    assert [(node.op, node.module, node.precision) for node in plan.nodes] == inside + outside
    assert plan.unused_rules == ()


def test_with_other_conditions_and_in_a_nest() -> None:
    low = {"match": {"module": "<loss*", "op": "aten.exp"}, "precision": "low"}
    plan = plan_of({"version": 1, "rules": [{"match": {}, "precision": "fp32"}, low]}, {"net": Net()})
    assert [(n.module, n.precision) for n in plan.nodes if n.op == "aten.exp"] == [
        ("net", "fp32"),
        ("<loss_fn>", "low"),
    ]


def test_a_compiled_model_has_no_loss_function() -> None:
    plan = amp.explain(Net(), (torch.randn(3, 8),), rules={"version": 1, "extends": "default", "rules": [RULE]})
    assert [node.module for node in plan.nodes] == ["fc", ""]
    assert [rule.condition for rule in plan.unused_rules] == ["module"]


def test_modules_of_an_exported_program_are_the_models_wherever_it_stands() -> None:
    """Dynamo hands on the modules that a graph's nodes name, without those around the graph."""
    layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    x = torch.randn(3, 8)
    first, second = (torch.export.export(layers, (x,)).module() for _ in range(2))

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = first, second

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(x) + self.second(x)

    rules = {"version": 1, "rules": [{"match": {}, "precision": "low"}, RULE]}
    plan = plan_of(rules, first)
    assert [node.module for node in plan.nodes if node.precision == "low"] == ["0", "1", "2"]
    inside = [f"{name}.{place}" for name in ("first", "second") for place in range(3)]
    plan = plan_of(rules, Both())
    assert [node.module for node in plan.nodes if node.precision == "low"] == [*inside, ""]
    assert [node.module for node in amp.explain(Both(), (x,), dtype="bf16").nodes] == [*inside, ""]
