"""Losses of all kinds: one plain FP32 step against torch's, and a scaled one against an unscaled one."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from toys import eager_step, train_beside_torch

import amp_compiler as amp
from amp_compiler.passes.step.fold_loss_scale import SCALE, FoldLossScale

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(5, 6, generator=GENERATOR)
TARGET = torch.rand(5, 3, generator=GENERATOR)
LABELS = torch.tensor([0, 2, 1, 1, 0])
WEIGHT = torch.tensor([0.5, 2.0, 1.0])
LOSSES = {
    "binary cross entropy of logits": lambda y: F.binary_cross_entropy_with_logits(y, TARGET),
    "weighted": lambda y: F.binary_cross_entropy_with_logits(y, TARGET, pos_weight=WEIGHT),
    "binary cross entropy": lambda y: F.binary_cross_entropy(y.sigmoid(), TARGET),
    "cross entropy": lambda y: F.cross_entropy(y, LABELS, weight=WEIGHT, label_smoothing=0.1),
    "negative log likelihood": lambda y: F.nll_loss(y.log_softmax(1), LABELS, reduction="sum"),
    "mean square": lambda y: F.mse_loss(y, TARGET),
    "huber": lambda y: F.huber_loss(y, TARGET, delta=0.3),
    "poisson": lambda y: F.poisson_nll_loss(y, TARGET),
    "margin": lambda y: F.multi_margin_loss(y, LABELS),
    "cosine": lambda y: F.cosine_embedding_loss(y, TARGET, torch.ones(5)),
    "product with a number": lambda y: 2 * F.binary_cross_entropy_with_logits(y, TARGET) / 3,
    "product": lambda y: (y[:, 0] + 2).prod(),
    "distance": lambda y: torch.dist(y, TARGET),
    "norm": lambda y: y.norm(),
    "one element": lambda y: y[2, 1],
    "sum of exponentials": lambda y: y.logsumexp((0, 1)),
}


def trained(loss, **options):
    """The weight and bias after two steps of Adam, whose gradients are clipped."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    step = eager_step(model, lambda m, x: loss(m(x)), torch.optim.AdamW(model.parameters(), 0.1), **options)
    step(X), step(X)
    return [*model.parameters(), step.grad_norm]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", list(LOSSES))
def test_a_step_in_fp32_is_torchs_and_a_power_of_two_scale_changes_no_bit(name):
    train_beside_torch(nn.Linear(6, 3), lambda m, x: LOSSES[name](m(x)), [(X,)], tolerance={"rtol": 1e-6, "atol": 1e-6})
    plain, scaled = (trained(LOSSES[name], loss_scale=scale, clip_norm=0.01) for scale in (None, 1024.0))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(plain, scaled, strict=True))


def test_a_graph_in_which_the_scale_enters_twice_is_refused():
    graph = torch.fx.Graph()
    x, scale = graph.placeholder("x"), graph.placeholder(SCALE)
    gradient = graph.call_function(torch.ops.aten.mul.Tensor, (x, scale))
    expanded = graph.call_function(torch.ops.aten.expand.default, (scale, [4]))
    again = graph.call_function(torch.ops.aten.mul.Tensor, (gradient, expanded))
    graph.output((again,))
    module = torch.fx.GraphModule({}, graph)
    assert "'mul_tensor_1' multiplies or divides two values" in str(FoldLossScale().ensures(module, None))


# ---- probabilities that a loss takes the logarithm of

SURE = torch.tensor([[20.0, -20.0, 6.5], [-20.0, 12.0, -7.0], [9.0, -15.0, 3.0], [0.5, -1.0, 8.0], [-9.0, 30.0, -4.0]])
PROBABILITIES = {
    "sigmoid": lambda y: y.sigmoid(),
    "a view behind it": lambda y: y.sigmoid().flatten().view(5, 3),
    "clamped": lambda y: y.sigmoid().clamp(1e-7, 1 - 1e-7),
    "arithmetic": lambda y: 0.5 * (1 + torch.tanh(y / 2)) * (1 - 1e-6),
    "softmax": lambda y: y.softmax(-1),
}


class Logits(nn.Module):
    """Logits that are numbers which 16 bits hold, so that nothing but the loss rounds."""

    def __init__(self, squash) -> None:
        super().__init__()
        self.identity = nn.Parameter(torch.eye(3))
        self.squash = squash

    def forward(self, x):
        return self.squash(x @ self.identity)


def probabilities_loss(model, x):
    return F.binary_cross_entropy(model(x), TARGET)


@pytest.mark.parametrize(
    ("name", "dtype", "backend"),
    [
        *((name, ("fp16", "bf16")[number % 2], "eager") for number, name in enumerate(PROBABILITIES)),
        pytest.param("sigmoid", "fp16", "inductor", marks=pytest.mark.slow),
    ],
)
def test_probabilities_reach_a_binary_cross_entropy_unrounded(name, dtype, backend):
    model = Logits(PROBABILITIES[name])
    exact = torch.autograd.grad(F.binary_cross_entropy(model(SURE), TARGET), [model.identity])[0]
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    step = eager_step(model, probabilities_loss, optimizer, dtype=dtype, backend=backend, loss_scale=8.0)
    step(SURE)
    result = torch.eye(3) - model.identity.detach()
    assert int(step.skipped_steps) == 0
    torch.testing.assert_close(result, exact, rtol=2e-2, atol=2e-2 * float(exact.abs().max()))


def test_a_rule_that_asks_for_low_probabilities_is_obeyed():
    low = {"version": 1, "extends": "default", "rules": [{"match": {"op": "aten.sigmoid"}, "precision": "low"}]}
    for rules, precision in (("default", "fp32"), (low, "low")):
        step = eager_step(Logits(PROBABILITIES["sigmoid"]), probabilities_loss, rules=rules)
        step(SURE)
        assert [node.precision for node in step.plan.nodes if node.op == "aten.sigmoid"] == [precision]


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda loss: loss.item(), "a Python number.*a tensor, without item"),
        (lambda loss: {"loss": loss, "logits": X}, r"a dict.*return \(result\['loss'\], result\)"),
        (lambda loss: {"total": loss}, r"a dict.*one floating-point number as a tensor, or \(loss, aux\)"),
        (lambda loss: [loss, X], r"a list.*\(loss, aux\)"),
        (lambda loss: (loss, X, X), r"a tuple.*\(loss, aux\)"),
        (lambda loss: None, "returned None as the loss"),
        (lambda loss: loss.expand(3), r"shape \(3,\).*mean\(\) or sum\(\)"),
    ],
)
def test_what_is_no_loss_is_refused_with_its_fix(returned, said):
    step = eager_step(nn.Linear(6, 3), lambda m, x: returned(m(x).square().mean()))
    with pytest.raises(amp.AmpError, match=said):
        step(X)


def test_a_gradient_of_zeros_that_autograd_makes_without_memory(monkeypatch, tmp_path):
    """That of a sign is one; no graph of an earlier run may be at hand."""
    monkeypatch.setenv("AMP_COMPILER_CACHE", str(tmp_path))
    torch.manual_seed(0)
    weight, bias = nn.Parameter(torch.randn(5, 5)), nn.Parameter(torch.ones(3))
    model = nn.ParameterDict({"weight": weight, "bias": bias})
    optimizer = torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.5)
    before = weight.detach().clone()

    def loss_fn(m, x):
        return torch.sgn(m["weight"]).sum() + (m["bias"] * x).sum()

    step = eager_step(model, loss_fn, optimizer)
    step(torch.ones(3))
    torch.testing.assert_close(weight.detach(), before * (1 - 0.1 * 0.5))
