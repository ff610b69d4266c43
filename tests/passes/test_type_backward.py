"""A rule's `backward: {precision: …}`: gradients in a type of their own, against the arithmetic written by hand.

What linear layers, convolutions and products with a weight compute is held in `test_rule_words.py`.
"""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from toys import sgd_step

import amp_compiler as amp
from amp_compiler.errors import PassError, RuleError
from amp_compiler.passes.precision.type_backward import is_typed

pytestmark = pytest.mark.usefixtures("bf16_kernels")
F32, BF16 = torch.float32, torch.bfloat16
MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(32, 8, generator=GENERATOR)
Y = torch.randint(0, 5, (32,), generator=GENERATOR)


def rules(backward: Any, *, precision: str | None = None, extends: str = "default", **match: Any) -> dict[str, Any]:
    requested = {"match": match or {"family": "matmul"}, "backward": backward}
    return {"version": 1, "extends": extends, "rules": [requested | ({"precision": precision} if precision else {})]}


WIDE = rules({"precision": "fp32"})
NARROW = rules({"precision": "low"}, precision="fp32")


class Net(nn.Module):
    def __init__(self, between: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.between, self.b = nn.Linear(8, 16), between or nn.ReLU(), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.between(self.a(x)))


def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).float(), y)


def stepped(model: nn.Module, rule: Any, dtype: str = "bf16", backend: str = "eager", **options: Any) -> Any:
    options = {"rules": rule, "dtype": dtype, "loss_scale": None, "backend": backend, **options}
    step = sgd_step(model, loss_fn, 0.0, **options)
    step(X, Y)
    return step


def gradients(model: nn.Module, rule: Any, dtype: str = "bf16", backend: str = "eager") -> dict[str, torch.Tensor]:
    return {name: g.clone() for name, g in stepped(model, rule, dtype, backend).gradients().items()}


def by_autograd(model: nn.Module, rule: Any, dtype: str = "bf16", backend: str = "eager") -> dict[str, torch.Tensor]:
    compiled = amp.compile(model, rules=rule, dtype=dtype, backend=backend)
    loss_fn(compiled, X, Y).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def check(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float = 1e-6) -> None:
    assert set(got) == set(wanted)
    for name, gradient in wanted.items():
        assert torch.allclose(got[name].float(), gradient, rtol=tolerance, atol=tolerance * float(gradient.abs().max()))


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
    result = []
    for ambient in (False, True):
        model = Net()
        loss = loss_fn(amp.compile(model, rules=WIDE, dtype="bf16", backend="eager"), X, Y)
        with torch.autocast("cpu", dtype=BF16, enabled=ambient):
            loss.backward()
        result.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *result))


# ---- operators of every kind: kernels with state, lists, random numbers

MODULES: dict[str, nn.Module] = {
    "batch_norm": nn.BatchNorm1d(16),
    "layer_norm": nn.LayerNorm(16),
    "softmax": nn.Softmax(-1),
    "gelu": nn.GELU(),
    "tanh": nn.Tanh(),
}
EVERYTHING = {
    "version": 1,
    "rules": [
        {"match": {}, "precision": "low", "backward": {"precision": "fp32"}},
        {"match": {"family": "cast"}, "precision": "keep"},
        {"match": {"family": "loss"}, "precision": "fp32"},
    ],
}


@pytest.mark.parametrize("name", list(MODULES))
def test_every_kind_of_gradient_in_fp32(name: str) -> None:
    """With everything but the forward in FP32, gradients are those of FP32 autograd at the rounded values."""
    net = Net(MODULES[name])
    result = gradients(copy.deepcopy(net), EVERYTHING)
    x = X.to(BF16)
    with torch.no_grad():
        low = copy.deepcopy(net).to(BF16)
        if name == "batch_norm":
            low.between.float()
        h = low.a(x)
        r = low.between(h)
        logits = low.b(r).float()
    logits.requires_grad_()
    (g,) = torch.autograd.grad(F.cross_entropy(logits, Y), logits)
    gr = g @ low.b.weight.float()
    hidden = h.float().requires_grad_()
    with torch.enable_grad():
        between = low.between.float().train()
        (gh,) = torch.autograd.grad(between(hidden), hidden, gr)
    wanted = {"b.weight": g.t() @ r.float(), "b.bias": g.sum(0), "a.weight": gh.t() @ x.float(), "a.bias": gh.sum(0)}
    check({key: result[key] for key in wanted}, wanted, 2e-6)


def test_batch_norm_changes_its_statistics_once() -> None:
    models = [Net(nn.BatchNorm1d(16)) for _ in range(2)]
    for model, rule in zip(
        models, ("default", rules({"precision": "fp32"}, family=["matmul", "normalization"])), strict=True
    ):
        stepped(model, rule)
    for plain, typed in zip(*[model.between.buffers() for model in models], strict=True):
        assert torch.equal(plain, typed)
    assert int(models[1].between.num_batches_tracked) == 1


@pytest.mark.parametrize("make", [gradients, by_autograd])
def test_dropout_draws_once(make: Any) -> None:
    model = Net(nn.Dropout(0.5))
    torch.manual_seed(7)
    result = make(model, EVERYTHING)
    torch.manual_seed(7)
    mask = torch.ops.aten.native_dropout.default(torch.ones(32, 16, dtype=BF16), 0.5, True)[1]
    low = copy.deepcopy(model).to(BF16)
    with torch.no_grad():
        r = low.a(X.to(BF16)) * mask * 2
        logits = low.b(r).float()
    (g,) = torch.autograd.grad(F.cross_entropy(logits.requires_grad_(), Y), logits)
    gh = (g @ low.b.weight.float()) * mask * 2
    check({"w": result["b.weight"], "a": result["a.bias"]}, {"w": g.t() @ r.float(), "a": gh.sum(0)}, 2e-6)


def test_random_operators_are_refused_by_name() -> None:
    with pytest.raises(PassError, match=r"aten\.rrelu.*draws random numbers") as caught:
        stepped(Net(nn.RReLU()), EVERYTHING)
    assert "<dict>" in str(caught.value) and "later rule" in str(caught.value)


class Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = x.view(4, 8, 16).split([4, 4, 8], dim=-1)
        return torch.cat([F.scaled_dot_product_attention(q, k, v), v], -1).view(32, 16)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 16, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x.view(4, 8, 16))[0].reshape(32, 16)


class Tied(nn.Module):
    """One weight in a node with FP32 gradients and in one without."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(x, self.weight), self.weight.t().contiguous()).tanh()


@pytest.mark.sweep(5)
@pytest.mark.parametrize("make", [gradients, by_autograd])
@pytest.mark.parametrize("between", [Attention, Recurrent, Tied])
@pytest.mark.parametrize("rule", [EVERYTHING, WIDE], ids=["everything", "products"])
def test_lists_kernels_with_state_and_shared_weights(make: Any, between: Any, rule: Any) -> None:
    torch.manual_seed(5)
    net = Net(between())
    result = make(copy.deepcopy(net), rule)
    loss_fn(net, X, Y).backward()
    for name, parameter in net.named_parameters():
        error = float((result[name].float() - parameter.grad).norm() / parameter.grad.norm())
        assert error < 0.02, name
    assert rule is WIDE or all(result[name].dtype is F32 for name in result)
