"""Losses of all kinds: one plain FP32 step against torch's, and a scaled one against an unscaled one."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_compiler as amp
from amp_compiler.passes.step.fold_loss_scale import SCALE, FoldLossScale

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(5, 6, generator=GENERATOR)
TARGET = torch.rand(5, 3, generator=GENERATOR)
LABELS = torch.tensor([0, 2, 1, 1, 0])
WEIGHT = torch.tensor([0.5, 2.0, 1.0])
LOSSES = {
    "binary cross entropy of logits": lambda y: F.binary_cross_entropy_with_logits(y, TARGET),
    "its sum": lambda y: F.binary_cross_entropy_with_logits(y, TARGET, reduction="sum"),
    "weighted": lambda y: F.binary_cross_entropy_with_logits(y, TARGET, pos_weight=WEIGHT),
    "two of them": lambda y: (
        F.binary_cross_entropy_with_logits(y, TARGET) + F.binary_cross_entropy_with_logits(-y, TARGET, reduction="sum")
    ),
    "binary cross entropy": lambda y: F.binary_cross_entropy(y.sigmoid(), TARGET),
    "cross entropy": lambda y: F.cross_entropy(y, LABELS, weight=WEIGHT, label_smoothing=0.1),
    "negative log likelihood": lambda y: F.nll_loss(y.log_softmax(1), LABELS, reduction="sum"),
    "mean square": lambda y: F.mse_loss(y, TARGET),
    "absolute": lambda y: F.l1_loss(y, TARGET, reduction="sum"),
    "huber": lambda y: F.huber_loss(y, TARGET, delta=0.3),
    "smooth": lambda y: F.smooth_l1_loss(y, TARGET),
    "divergence": lambda y: F.kl_div(y.log_softmax(1), TARGET.softmax(1), reduction="batchmean"),
    "poisson": lambda y: F.poisson_nll_loss(y, TARGET),
    "soft margin": lambda y: F.soft_margin_loss(y, TARGET.round() * 2 - 1),
    "hinge": lambda y: F.hinge_embedding_loss(y, TARGET.round() * 2 - 1),
    "margin": lambda y: F.multi_margin_loss(y, LABELS),
    "cosine": lambda y: F.cosine_embedding_loss(y, TARGET, torch.ones(5)),
    "triplet": lambda y: F.triplet_margin_loss(y, TARGET, TARGET.flip(0)),
    "product with a number": lambda y: 2 * F.binary_cross_entropy_with_logits(y, TARGET) / 3,
    "scalar product": lambda y: torch.dot(y.flatten(), TARGET.flatten()),
    "product": lambda y: (y[:, 0] + 2).prod(),
    "distance": lambda y: torch.dist(y, TARGET),
    "norm": lambda y: y.norm(),
    "largest": lambda y: y.max(),
    "one element": lambda y: y[2, 1],
    "sum of exponentials": lambda y: y.logsumexp((0, 1)),
}


def trained(loss, **options):
    """The weight and bias after a step, and what torch makes of them."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    gradients = torch.autograd.grad(loss(model(X)), list(model.parameters()))
    expected = [p - 0.1 * gradient for p, gradient in zip(model.parameters(), gradients, strict=True)]
    step = amp.training_step(
        model, lambda m, x: loss(m(x)), torch.optim.SGD(model.parameters(), 0.1), backend="eager", **options
    )
    step(X)
    return [p.detach() for p in model.parameters()], [p.detach() for p in expected]


@pytest.mark.sweep(13)
@pytest.mark.parametrize("name", list(LOSSES))
def test_a_step_in_fp32_is_torchs(name):
    for mine, theirs in zip(*trained(LOSSES[name], enabled=False), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.sweep(9)
@pytest.mark.parametrize("name", list(LOSSES))
def test_a_power_of_two_scale_changes_no_bit(name):
    plain, _ = trained(LOSSES[name], dtype="bf16", loss_scale=None)
    scaled, _ = trained(LOSSES[name], dtype="bf16", loss_scale=1024.0)
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


@pytest.mark.sweep(5)
@pytest.mark.parametrize(
    ("name", "dtype", "backend"),
    [
        *((name, dtype, "eager") for name in PROBABILITIES for dtype in ("fp16", "bf16")),
        pytest.param("sigmoid", "fp16", "inductor", marks=pytest.mark.slow),
    ],
)
def test_probabilities_reach_a_binary_cross_entropy_unrounded(name, dtype, backend):
    model = Logits(PROBABILITIES[name])
    exact = torch.autograd.grad(F.binary_cross_entropy(model(SURE), TARGET), [model.identity])[0]
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    step = amp.training_step(
        model,
        lambda m, x: F.binary_cross_entropy(m(x), TARGET),
        optimizer,
        dtype=dtype,
        backend=backend,
        loss_scale=8.0,
    )
    step(SURE)
    made = torch.eye(3) - model.identity.detach()
    assert int(step.skipped_steps) == 0
    torch.testing.assert_close(made, exact, rtol=2e-2, atol=2e-2 * float(exact.abs().max()))


def test_a_rule_that_asks_for_low_probabilities_is_obeyed():
    model = Logits(PROBABILITIES["sigmoid"])
    low = {"version": 1, "extends": "default", "rules": [{"match": {"op": "aten.sigmoid"}, "precision": "low"}]}
    asked = {}
    for rules in ("default", low):
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        loss = lambda m, x: F.binary_cross_entropy(m(x), TARGET)  # noqa: E731
        step = amp.training_step(model, loss, optimizer, rules=rules, dtype="bf16", backend="eager")
        step(SURE)
        (node,) = (node for node in step.plan.nodes if node.op == "aten.sigmoid")
        asked[str(rules)] = node.precision
    assert list(asked.values()) == ["fp32", "low"]


def item(loss):
    return loss.item()


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (item, "a Python number.*a tensor, without item"),
        (lambda loss: 0, "a Python number.*a tensor, without item"),
        (lambda loss: {"loss": loss, "logits": X}, r"a dict.*return \(result\['loss'\], result\)"),
        (lambda loss: {"total": loss}, r"a dict.*one floating-point number as a tensor, or \(loss, aux\)"),
        (lambda loss: [loss, X], r"a list.*\(loss, aux\)"),
        (lambda loss: (loss, X, X), r"a tuple.*\(loss, aux\)"),
        (lambda loss: None, "returned None as the loss"),
        (lambda loss: loss.expand(3), r"shape \(3,\).*mean\(\) or sum\(\)"),
    ],
)
def test_what_is_no_loss_is_refused_with_its_fix(returned, said):
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = amp.training_step(model, lambda m, x: returned(m(x).square().mean()), optimizer, backend="eager")
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

    step = amp.training_step(model, loss_fn, optimizer, dtype="bf16", backend="eager")
    step(torch.ones(3))
    torch.testing.assert_close(weight.detach(), before * (1 - 0.1 * 0.5))
