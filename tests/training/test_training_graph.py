"""What may share memory in the graph of a training step, and how it names what is in it."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from toys import Composed, classes, eager_step, small, train_beside_torch

import amp_compiler as amp
from amp_compiler.errors import AmpError
from amp_compiler.fx.graph import canonical_op, module_of, node_tensor
from amp_compiler.ops.loss_scale import DynamicLossScale

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(32, 8, generator=GENERATOR)
Y = torch.randint(0, 4, (32,), generator=GENERATOR)
BACKENDS = pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])


class Summands(nn.Module):
    """The derivative by a summand of the loss is the loss scale itself, or an expanded view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.number, self.vector, self.line = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(3)), nn.Linear(8, 4)

    def forward(self, x):
        return self.line(x).square().mean() + self.number + self.vector.sum()


@BACKENDS
def test_a_gradient_that_is_the_scale_is_read_before_the_scale_grows(backend):
    torch.manual_seed(0)
    model = Summands()
    optimizer = torch.optim.SGD(model.parameters(), 0.125)
    scale = DynamicLossScale(init_scale=4.0, growth_interval=1)
    step = eager_step(model, lambda m, x: m(x), optimizer, dtype="fp16", loss_scale=scale, backend=backend)
    for number in range(1, 4):
        step(X)
        assert float(step.loss_scale) == 4.0 * 2**number
        gradients = step.gradients()
        assert float(gradients["number"]) == 1 and gradients["vector"].tolist() == [1, 1, 1]
        assert float(model.number.detach()) == 1 - number / 8
        assert model.vector.tolist() == [1 - number / 8] * 3


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.arange(1.0, 7.0)), nn.Parameter(torch.arange(6.0, 0.0, -1.0))


@BACKENDS
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.NAdam])
def test_parameters_that_are_each_others_gradients_are_updated_together(kind, backend):
    def loss(model):
        return (model.a * model.b).sum()

    make = lambda p: kind(p, 0.1)  # noqa: E731
    train_beside_torch(Product(), loss, [()] * 3, make, tolerance={"rtol": 1e-6, "atol": 1e-6}, backend=backend)


def test_gradients_of_a_nest_are_named_by_their_path():
    nest = {"a": {"b": small(0)}, "a_b": small(1), "list": [small(2)]}
    models = [nest["a"]["b"], nest["a_b"], nest["list"][0]]
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], 0.1)

    def loss(nest, x, y):
        return classes(nest["a"]["b"], x, y) + 2 * classes(nest["a_b"], x, y) + classes(nest["list"][0], x, y)

    expected = {}
    for path, factor, model in zip(("a.b", "a_b", "list.0"), (1, 2, 1), models, strict=True):
        (factor * classes(model, X, Y)).backward()
        expected |= {f"{path}.{name}": parameter.grad for name, parameter in model.named_parameters()}
    step = eager_step(nest, loss, optimizer, enabled=False)
    step(X, Y)
    assert set(step.gradients()) == set(expected)
    for name, gradient in step.gradients().items():
        torch.testing.assert_close(gradient, expected[name])


@pytest.mark.parametrize("nest", [{"a.b": small()}, {0: small(), "0": small(1)}])
def test_a_path_that_is_no_name_is_refused(nest):
    parameters = [p for model in nest.values() for p in model.parameters()]
    with pytest.raises(AmpError, match="whose path is no name"):
        amp.training_step(nest, classes, torch.optim.SGD(parameters, 0.1))


@pytest.mark.parametrize("nested", [False, True])
def test_a_rule_names_modules_as_in_the_model(nested):
    """The same rule file fits `amp.compile`, `amp.explain` and the step."""
    model, name = small(), "classifier.0" if nested else "0"
    rule = {"match": {"module": name, "op": "aten.linear"}, "precision": "fp32"}
    step = eager_step(
        {"classifier": model} if nested else model,
        lambda m, x, y: classes(m["classifier"] if nested else m, x, y),
        torch.optim.SGD(model.parameters(), 0.1),
        rules={"version": 1, "extends": "default", "rules": [rule]},
    )
    step(X, Y)
    linears = {node.module: node.precision for node in step.plan.nodes if node.op == "aten.linear"}
    assert linears == {name: "fp32", name.replace("0", "2"): "low"}
    backward = {str(node.meta.get("nn_module_stack", "")) for node in step.graph_module.graph.nodes}
    assert not any("'model" in stack for stack in backward)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.query, self.key = nn.LayerNorm(12), nn.Linear(12, 7), nn.Linear(11, 7, bias=False)

    def forward(self, x):
        x = self.norm(x)
        return (self.query(x) @ self.key(x[..., 1:]).transpose(1, 2)).softmax(-1) @ x


class Nested(nn.Module):
    """Every weight has a shape of its own, so that shapes tell which module a gradient belongs to."""

    def __init__(self) -> None:
        super().__init__()
        first = nn.Conv2d(1, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU()
        self.stem = nn.Sequential(*first, nn.Conv2d(6, 9, 3), nn.GroupNorm(3, 9), nn.Conv2d(9, 12, 3))
        self.body, self.head = nn.ModuleDict({"attention": Attention()}), nn.Linear(12, 4)

    def forward(self, images):
        return self.head(self.body["attention"](self.stem(images).flatten(2).transpose(1, 2)).mean(1))


PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm")
NORMS = (
    "aten.native_batch_norm_backward",
    "aten.native_layer_norm_backward",
    "aten.native_group_norm_backward",
)
# A linear layer or a convolution: the gradient of its input and that of its weight, which one node makes of the latter.
EXPECTED = {
    **dict.fromkeys(("stem.0", "stem.1", "stem.3", "stem.4", "stem.5", "body.attention.norm"), 1),
    **dict.fromkeys(("body.attention.query", "body.attention.key", "head"), 2),
    "body.attention": 4,
}


@pytest.mark.parametrize("options", [{"dtype": "bf16"}, {"enabled": False}], ids=str)
def test_products_convolutions_and_norms_of_the_backward_know_the_module_that_they_belong_to(options):
    torch.manual_seed(0)
    model = Nested()
    step = eager_step(model, classes, **options)
    step(torch.randn(11, 1, 8, 8), torch.randint(0, 4, (11,)))
    kinds = (*PRODUCTS, *NORMS, "aten.convolution_backward")
    nodes = [n for n in step.graph_module.graph.nodes if n.meta.get("amp_phase") == "backward"]
    nodes = [node for node in nodes if canonical_op(node.target) in kinds]
    assert Counter(module_of(node)[0] for node in nodes) == EXPECTED
    for node in nodes:
        weight = getattr(model.get_submodule(module_of(node)[0]), "weight", None)
        if weight is not None:
            shapes = [tuple(one.shape) for one in map(node_tensor, (node, *node.all_input_nodes)) if one is not None]
            assert {tuple(weight.shape), tuple(weight.shape)[::-1]}.intersection(shapes), node.format_node()


def test_a_graph_for_a_batch_in_a_dict_is_that_of_a_first_call():
    step = eager_step(nn.Linear(8, 4), lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]))
    batch = {"x": X, "y": Y}
    dry = [node.name for node in step.graph_for(batch).graph_module.graph.nodes]
    step(batch)
    assert dry == [node.name for node in step.graph_module.graph.nodes]


# ---- what stands outside of the model, in the loss function: `module: <loss_fn>`


class Exponential(nn.Module):
    """Computes in its own forward too, outside of any submodule."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp(self.fc(x))


def outer_loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    result = model["net"](x) if isinstance(model, dict) else model(x)
    return (torch.exp(-result) - y).square().mean()


def plan_of(rules: Any, model: Any = None) -> Any:
    model = model or Exponential()
    parameters = [p for one in (model.values() if isinstance(model, dict) else [model]) for p in one.parameters()]
    step = eager_step(model, outer_loss, torch.optim.SGD(parameters, 0.1), rules=rules)
    step(torch.randn(3, 8), torch.randn(3, 4))
    return step.plan


def in_onnx(model: nn.Module) -> Any:
    return torch.onnx.export(model, (torch.randn(3, 8),), dynamo=True, verbose=False).model_proto


RULE = {"match": {"module": "<loss_fn>"}, "precision": "fp32", "why": "outside"}


def test_a_rule_reaches_the_loss_function_alone_and_the_model_keeps_its_own_names() -> None:
    plan = plan_of({"version": 1, "rules": [{"match": {}, "precision": "low"}, RULE]})
    outside = [(f"aten.{op}", "<loss_fn>", "fp32") for op in ("neg", "exp", "sub", "square", "mean")]
    inside = [("aten.linear", "fc", "low"), ("aten.exp", "", "low")]
    assert [(node.op, node.module, node.precision) for node in plan.nodes] == inside + outside
    assert plan.unused_rules == ()


def test_with_other_conditions_and_in_a_nest() -> None:
    low = {"match": {"module": "<loss*", "op": "aten.exp"}, "precision": "low"}
    plan = plan_of({"version": 1, "rules": [{"match": {}, "precision": "fp32"}, low]}, {"net": Exponential()})
    assert [(n.module, n.precision) for n in plan.nodes if n.op == "aten.exp"] == [
        ("net", "fp32"),
        ("<loss_fn>", "low"),
    ]


@pytest.mark.parametrize("form", [lambda model: model, torch.fx.symbolic_trace, in_onnx])
def test_a_compiled_model_has_no_loss_function(form: Any) -> None:
    inputs = None if form is in_onnx else (torch.randn(3, 8),)
    plan = amp.explain(form(Exponential()), inputs, rules={"version": 1, "extends": "default", "rules": [RULE]})
    assert "<loss_fn>" not in {node.module for node in plan.nodes} and len(plan.nodes) >= 2
    assert plan.low_nodes
    assert [rule.condition for rule in plan.unused_rules] == ["module"]


def test_modules_of_an_exported_program_are_the_models_wherever_it_stands() -> None:
    """Dynamo hands on the modules that a graph's nodes name, without those around the graph."""
    layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    x = torch.randn(3, 8)
    first, second = (torch.export.export(layers, (x,)).module() for _ in range(2))
    both = Composed(lambda m, x: m.first(x) + m.second(x), first=first, second=second)
    rules = {"version": 1, "rules": [{"match": {}, "precision": "low"}, RULE]}
    plan = plan_of(rules, first)
    assert [node.module for node in plan.nodes if node.precision == "low"] == ["0", "1", "2"]
    inside = [f"{name}.{place}" for name in ("first", "second") for place in range(3)]
    plan = plan_of(rules, both)
    assert [node.module for node in plan.nodes if node.precision == "low"] == [*inside, ""]
    assert [node.module for node in amp.explain(both, (x,), dtype="bf16").nodes] == [*inside, ""]
