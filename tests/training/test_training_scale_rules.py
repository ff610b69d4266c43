"""What a training step takes from the `loss_scale` section of its rules, and steps that check nothing."""

import pytest
import torch
import torch.nn.functional as F
import training_optimizers as nets
from torch import nn
from toys import classes, eager_step, mean_square
from training_weights import Line, linear_loss

import amp_compiler as amp
from amp_compiler.fx.graph import canonical_op, node_tensor

UNCHECKED = {"mode": "none", "check_finite": False}
X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


def make(section, **options):
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    rules = {"version": 1, "extends": "default", "loss_scale": section}
    return model, eager_step(model, lambda m, x: F.mse_loss(m(x), torch.zeros(6, 4)), rules=rules, **options)


def test_a_mode_by_name_has_the_settings_of_the_rules():
    section = {"mode": "dynamic", "init": 512.0, "growth_interval": 2, "max": 1024.0}
    for options in ({"dtype": "fp16"}, {"dtype": "fp16", "loss_scale": "dynamic"}, {"loss_scale": "dynamic"}):
        _, step = make(section, **{"dtype": "bf16", **options})
        scales = []
        for _ in range(5):
            step(X)
            scales.append(float(step.loss_scale))
        assert scales == [512.0, 1024.0, 1024.0, 1024.0, 1024.0]


def test_a_mode_that_the_rules_do_not_have_has_its_own_settings():
    _, step = make({"mode": "static", "init": 512.0}, dtype="fp16", loss_scale="dynamic")
    assert step._scale_config == amp.DynamicLossScale()


@pytest.mark.parametrize(
    "options", [{"dtype": "bf16"}, {"dtype": "fp16"}, {"dtype": "bf16", "loss_scale": "none"}], ids=str
)
def test_rules_may_ask_for_no_check(options):
    model, step = make(UNCHECKED, **options)
    step(X)
    bad = X.clone()
    bad[1, 2] = float("inf")
    step(bad)
    assert int(step.skipped_steps) == 0 and not model.weight.isfinite().all()


def test_bf16_checks_and_does_not_scale_unless_told_otherwise():
    for section in ({"mode": "dynamic", "init": 512.0}, {"mode": "none"}, {"mode": "static", "init": 8.0}):
        model, step = make(section, dtype="bf16")
        step(X)
        bad, before = X.clone(), model.weight.detach().clone()
        bad[1, 2] = float("inf")
        step(bad)
        assert float(step.loss_scale) == 1.0
        assert int(step.skipped_steps) == 1 and torch.equal(model.weight, before)


def readers(step):
    """What reads a gradient in the last step's graph, its outputs apart."""
    graph = step.graph_module.graph
    updates = [node for node in graph.nodes if "_update" in str(node.target)]
    return {str(user.target) for node in updates for gradient in node.args[1] for user in gradient.users} - {"output"}


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_without_a_check_nothing_but_the_update_reads_the_gradients(backend):
    seen, update = [], "amp_compiler.sgd_update.default"
    for section, others in ((UNCHECKED, set()), ({"mode": "none"}, {"amp_compiler.grad_check.default"})):
        model, step = make(section, backend=backend)
        step(X), step(X)
        assert readers(step) == {update, *others} and step.nonfinite_events() == ()
        seen.append((float(step.grad_norm), model.weight.detach().clone()))
    (unchecked, mine), (checked, other) = seen
    assert unchecked == pytest.approx(checked, rel=1e-6) and torch.equal(mine, other)


def test_a_norm_that_is_needed_is_computed_without_a_check_too():
    _, step = make(UNCHECKED, dtype="bf16", clip_norm=1e-3)
    step(X)
    assert "amp_compiler.grad_check.default" in readers(step) and float(step.grad_norm) > 1e-3
    _, step = make(UNCHECKED, dtype="bf16", accumulate=2)
    norms = []
    for _ in range(2):
        step(X)
        norms.append(float(step.grad_norm))
    assert norms[1] == pytest.approx(2 * norms[0], rel=1e-6)  # of the sum so far, divided by accumulate


def test_a_callback_is_told_the_norm_that_the_step_does_not_compute():
    norms = []

    class Records(amp.callbacks.Callback):
        def on_step(self, record):
            norms.append(record.grad_norm)

    _, step = make(UNCHECKED, callbacks=[Records(1)])
    step(X)
    assert norms == [float(step.grad_norm)] and norms[0] > 0


def test_the_norm_that_is_read_is_exact_for_large_weights_too():
    rules = {"version": 1, "extends": "default", "loss_scale": UNCHECKED}
    step = eager_step(nn.Linear(1024, 512, bias=False), mean_square, rules=rules)
    step(torch.randn(4, 1024))
    exact = step.gradients()["weight"].double().norm()
    assert float(step.grad_norm) == pytest.approx(float(exact), rel=1e-7)


def test_a_norm_adaptive_scale_follows_the_norms_and_learns_from_an_overflow():
    # The gradient is the batch. The scale is 4096 / norm rounded down to a power of two, between 2 and 65536; an
    # overflow halves what it may be, and three finite steps double that again.
    section = {"mode": "norm_adaptive", "init": 1024.0, "target_norm": 4096.0, "min": 2.0, "max": 65536.0}
    rows = [
        ((3.0, 4.0), 512), ((0.0, 1.0), 4096), ((0.0, 1.5), 2048), ((0.0, 0.0), 2048), ((0.0, 2.0**-10), 65536),
        ((0.0, 4096.0), 2), ((0.0, 1.0), 4096), ((0.0, float("inf")), 2048), ((0.0, 1.0), 2048), ((0.0, 1.0), 2048),
        ((0.0, 1.0), 4096),
    ]  # fmt: skip
    model = Line(2, value=0.0)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    section |= {"growth_interval": 3}
    step = eager_step(model, linear_loss, optimizer, dtype="fp16", loss_scale=section)
    seen = []
    for batch, _ in rows:
        step(torch.tensor(batch))
        seen.append(float(step.loss_scale))
    assert seen == [scale for _, scale in rows]
    assert int(step.skipped_steps) == 1
    finite = [batch for batch, _ in rows if float("inf") not in batch]
    assert model.w.tolist() == [-sum(column) for column in zip(*finite, strict=True)]  # all exact in FP32


# ---- the loss scale enters a step once and leaves it without a trace

aten = torch.ops.aten


def is_tensor_of_many(node):
    value = node_tensor(node)
    return value is None or value.numel() != 1


def products_with_the_scale(graph):
    """Nodes that multiply or divide a tensor by the loss scale.

    Or by what is made of the scale and single numbers alone: an inverse, a view, the scale spread over a shape.
    """
    scales, result = {node for node in graph.nodes if node.name == "loss_scale"}, []
    for node in graph.nodes:
        read = node.all_input_nodes
        if scales.isdisjoint(read) or node.op != "call_function" or "amp_compiler" in str(node.target):
            continue
        if not any(is_tensor_of_many(other) for other in read if other not in scales):
            scales.add(node)
        elif canonical_op(node.target) in ("aten.mul", "aten.div"):
            result.append(node)
    return result


def test_nothing_multiplies_a_gradient_by_the_scale():
    model, _ = nets.models()
    step = eager_step(model, classes, dtype="fp16")
    step(nets.X, nets.Y)
    graph = step.graph_module.graph
    assert products_with_the_scale(graph) == []
    updates = [node for node in graph.nodes if "sgd_update" in str(node.target)]
    assert len(updates) == 2  # one for weights with a 16-bit copy, one for those that are read in FP32
    (scale,) = [node for node in graph.nodes if node.name == "loss_scale"]
    gradient = next(node for node in updates[0].args[1] if is_tensor_of_many(node))
    with graph.inserting_before(updates[0]):
        spread = graph.call_function(aten.expand.default, (scale, list(gradient.meta["val"].shape)))
        product = graph.call_function(aten.mul.Tensor, (gradient, spread))
    spread.meta["val"] = product.meta["val"] = gradient.meta["val"]
    assert products_with_the_scale(graph) == [product]
