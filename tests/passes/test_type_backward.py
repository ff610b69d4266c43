"""A rule's `backward: {precision: …}`: gradients in a type of their own, against the arithmetic written by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backward_types import (
    BF16,
    F32,
    MATMULS,
    NARROW,
    WIDE,
    Net,
    X,
    Y,
    by_hand,
    check,
    loss_fn,
    rules,
    stepped,
)
from torch import nn

import amp_compiler as amp
from amp_compiler.errors import RuleError
from amp_compiler.passes.precision.type_backward import is_typed

pytestmark = pytest.mark.usefixtures("bf16_kernels")


def joint(step: Any) -> Any:
    return step.graph_module.graph


def kinds(step: Any, phase: str) -> set[torch.dtype]:
    return {n.meta["val"].dtype for n in joint(step).nodes if n.target in MATMULS and n.meta["amp_phase"] == phase}


@pytest.mark.parametrize(
    ("rule", "forward", "backward"), [(WIDE, BF16, F32), (NARROW, F32, BF16), ("default", BF16, BF16)]
)
def test_types_in_the_joint_graph(rule: Any, forward: torch.dtype, backward: torch.dtype) -> None:
    step = stepped(Net(), rule)
    assert kinds(step, "forward") == {forward} and kinds(step, "backward") == {backward}
    products = [n for n in joint(step).nodes if n.target in MATMULS]
    assert len(products) == 5  # two forward, three backward: the second run of the forward is dead code
    (check_node,) = [n for n in joint(step).nodes if "grad_check" in str(n.target)]
    assert {n.meta["val"].dtype for n in check_node.args[0]} == {backward}  # handed to the update as they were made


def test_backward_nodes_know_their_module() -> None:
    step = stepped(Net(), WIDE)
    paths = {
        list(n.meta["nn_module_stack"].values())[-1][0]
        for n in joint(step).nodes
        if n.target in MATMULS and n.meta["amp_phase"] == "backward" and n.meta.get("nn_module_stack")
    }
    assert any(path.endswith("a") for path in paths) and any(path.endswith("b") for path in paths)


def test_nvcaffe() -> None:
    step = stepped(Net(), "nvcaffe")
    check({name: g.clone() for name, g in step.gradients().items()}, by_hand(Net(), BF16, BF16))
    mixed = {
        "version": 1,
        "extends": "nvcaffe",
        "rules": [{"match": {"module": "b"}, "backward": {"precision": "fp32", "math": "fp32"}}],
    }
    step = stepped(Net(), mixed)
    assert kinds(step, "backward") == {BF16, F32}


def test_fp32_gradients_of_an_nvcaffe_layer_survive_in_fp16() -> None:
    """A layer with `backward_type: FLOAT` in a FLOAT16 net, behind another: `math: fp32` stands in its rule as well."""

    def tiny(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).float().sum() * 2.0**-30

    model = Net()
    mixed = {"version": 1, "extends": "nvcaffe", "loss_scale": {"mode": "none"},
             "rules": [{"match": {"module": "b"}, "backward": {"precision": "fp32"}},
                       {"match": {"module": "<loss_fn>"}, "precision": "fp32"}]}  # fmt: skip
    sgd = torch.optim.SGD(model.parameters(), 0.0)
    step = amp.training_step(model, tiny, sgd, rules=mixed, dtype="fp16", backend="eager")
    step(X)
    tiny(amp.compile(model, rules=mixed, dtype="fp16", backend="eager"), X).backward()
    with torch.no_grad():
        r = F.relu(F.linear(X.half(), model.a.weight.half(), model.a.bias.half())).double().sum(0) * 2.0**-30
    for gradient in (step.gradients()["b.weight"], model.b.weight.grad):
        torch.testing.assert_close(gradient.double(), r.expand(5, -1), rtol=1e-3, atol=0)


def test_the_plan_shows_it() -> None:
    plan = amp.explain(Net(), (X,), rules=WIDE, dtype="bf16")
    assert "bf16 linear = aten.linear -> bf16  backward=fp32  module=a" in plan.to_text()
    assert "backward" not in amp.explain(Net(), (X,), dtype="bf16").to_text()
    assert "backward" not in amp.explain(Net(), (X,), rules="nvcaffe", dtype="bf16").to_text().replace("_backward_", "")


def test_a_number_too_large_for_fp16_keeps_the_gradient_fp32_too() -> None:
    class Mask(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.masked_fill(x > 0, -3.4e38)

    (_, node) = amp.explain(Mask(), (X,), rules="nvcaffe", dtype="fp16").nodes
    assert (node.precision, node.backward) == ("fp32", "")


@pytest.mark.parametrize("narrow", ["bf16", "fp16"])
def test_sums_in_16_bits_are_refused(narrow: str) -> None:
    with pytest.raises(RuleError, match=r"rules\.0\.backward\.math"):
        amp.load_rules(rules({"precision": "low", "math": narrow}))


@pytest.mark.parametrize("backward", ["fp32", "low"])
def test_double_backward_in_eager(backward: str) -> None:
    precision = "low" if backward == "fp32" else "fp32"
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    rule = rules({"precision": backward}, precision=precision, family=["matmul", "activation"])
    compiled = amp.compile(model, rules=rule, dtype="bf16", backend="eager")
    x = X.clone().requires_grad_()
    (first,) = torch.autograd.grad(compiled(x).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    plain = X.clone().requires_grad_()
    (expected,) = torch.autograd.grad(model(plain).square().sum(), plain, create_graph=True)
    (wanted,) = torch.autograd.grad(expected.square().sum(), plain)
    assert float((first - expected).norm() / expected.norm()) < 0.03
    assert float((second - wanted).norm() / wanted.norm()) < 0.05


def test_no_typed_node_where_no_gradient_can_be_asked_for() -> None:
    compiled = amp.compile(Net(), rules=WIDE, dtype="bf16", backend="eager").eval()
    with torch.no_grad():
        compiled(X)
    assert not any(is_typed(node) for node in compiled.graph_module.graph.nodes)
    compiled.train()(X)
    assert sum(is_typed(node) for node in compiled.graph_module.graph.nodes) == 2


def test_an_ambient_autocast_takes_no_part() -> None:
    model = Net()
    loss = loss_fn(amp.compile(model, rules=WIDE, dtype="bf16", backend="eager"), X, Y)
    with torch.autocast("cpu", dtype=BF16):
        loss.backward()
    check({name: p.grad for name, p in model.named_parameters()}, by_hand(Net(), BF16, F32))
