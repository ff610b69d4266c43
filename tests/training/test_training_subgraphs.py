"""Programs that plain torch trains and one graph cannot hold: the step runs them in subgraphs, and says so."""

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from toys import classes, eager_step, saved_bytes, small

import amp_compiler as amp

pytestmark = pytest.mark.long

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(16, 8, generator=GENERATOR)
Y = torch.randint(0, 4, (16,), generator=GENERATOR)
KEPT = torch.rand(16, generator=GENERATOR) > 0.5
EYE = torch.eye(4)


def normed():
    return nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Linear(16, 4))


def penalized(model, x, y, kept):
    x, y = x.repeat(1, 3).view(32, 3, 2, 2).requires_grad_(), y.repeat(2)
    logits = model(x)
    (slope,) = torch.autograd.grad(logits.sum(), x, create_graph=True)
    return F.cross_entropy(logits, y) + (slope.norm(dim=1) - 1).square().mean()


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x):
        lengths = torch.tensor([4, 3, 2, 1])
        packed = nn.utils.rnn.pack_padded_sequence(x.view(4, 4, 8), lengths, batch_first=True)
        result, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.head(result.reshape(-1, 8))


def entropy(model, x, y, kept):
    return F.cross_entropy(model(x), y)


def ctc(model, x, y, kept):
    logits = model(x).float().view(8, 2, 4).log_softmax(-1)
    return F.ctc_loss(logits, torch.tensor([[1, 2], [1, 3]]), torch.tensor([8, 8]), torch.tensor([2, 2]))


# name: model, loss; many more are rows of tests/behaviour
PROGRAMS = {
    "rows of a mask, with BatchNorm": (normed, lambda m, x, y, k: F.cross_entropy(m(x)[k], y[k])),
    "index_reduce": (small, lambda m, x, y, k: EYE.index_reduce(0, y, m(x).float(), "mean").square().sum()),
    "gaussian_nll": (small, lambda m, x, y, k: F.gaussian_nll_loss(m(x)[:, 0], x[:, 0], m(x)[:, 1].exp())),
    "ctc": (small, ctc),
    "packed sequences": (Packed, entropy),
    "gradient penalty, with a convolution": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 2), nn.Tanh(), nn.Flatten()),
        penalized,
    ),
}


def trained(name, backend, steps=3):
    make, loss_fn = PROGRAMS[name]
    torch.manual_seed(0)
    model, reference = make(), make()
    reference.load_state_dict(model.state_dict())
    ours, theirs = (torch.optim.SGD(one.parameters(), 0.1) for one in (model, reference))
    step = eager_step(model, loss_fn, ours, backend=backend)
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16):
            expected = loss_fn(reference, X, Y, KEPT)
        theirs.zero_grad()
        expected.float().backward()
        theirs.step()
        torch.testing.assert_close(step(X, Y, KEPT), expected.detach().float(), rtol=2e-2, atol=2e-3)
    for mine, other in zip(model.state_dict().values(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, other, rtol=5e-2, atol=2e-2)
    return step


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_torch_trains_is_trained(name):
    """As torch.autocast trains it: losses, weights and buffers of three steps."""
    step = trained(name, "eager")
    assert step.plan.nodes and step.gradients()


@pytest.mark.slow
@pytest.mark.compiles
def test_with_compiled_subgraphs():
    """A backward that is differentiated again is run node by node: torch's compiled ones cannot be."""
    assert "in 3 subgraphs" in trained("gradient penalty, with a convolution", "inductor").execution


def branchy(model, x, y):
    loss = F.cross_entropy(model(x), y)
    if not torch.isfinite(loss):
        return loss * 1.0
    return loss


@pytest.mark.parametrize(
    "optimizer", [torch.optim.AdamW, pytest.param(torch.optim.RAdam, marks=pytest.mark.slow)], ids=["fused", "traced"]
)
def test_subgraphs_train_as_one_graph_does(optimizer):
    """With BatchNorm, accumulation, clipping and FP16's dynamic scale, over a batch that is skipped."""
    results = {}
    for kind, loss_fn in {"whole": classes, "subgraphs": branchy}.items():
        torch.manual_seed(0)
        model = normed()
        result = optimizer(model.parameters(), 1e-2)
        step = eager_step(model, loss_fn, result, dtype="fp16", accumulate=2, clip_norm=0.5)
        losses = [float(step(x, Y)) for x in (X, X + 1, X * torch.inf, X, X - 1, X)]
        assert ("subgraph" in step.execution) is (kind == "subgraphs")
        state = {name: value.clone() for name, value in model.state_dict().items()}
        results[kind] = losses, state, float(step.loss_scale), int(step.skipped_steps), step.gradients()
    (losses, weights, *rest, gradients), (theirs, their_weights, *their_rest, their_gradients) = results.values()
    torch.testing.assert_close(losses, theirs, rtol=1e-3, atol=1e-3, equal_nan=True)
    torch.testing.assert_close(weights, their_weights, rtol=1e-2, atol=2e-3)
    torch.testing.assert_close(gradients, their_gradients, rtol=2e-2, atol=2e-3)
    assert rest == their_rest == [32768.0, 1]


def test_a_skipped_step_changes_nothing_but_the_scale():
    torch.manual_seed(0)
    model = normed()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    step = eager_step(model, branchy, optimizer, dtype="fp16")
    step(X, Y)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    step(X * torch.nan, Y)
    torch.testing.assert_close((model.state_dict(), optimizer.state_dict()), before, rtol=0, atol=0)
    assert float(step.loss_scale) == 32768.0
    report = step.nonfinite_report()
    assert "0.weight" in report.parameters and "amp.find_nonfinite(step, batch)" in report.cure and not report.nodes
    (node,) = amp.find_nonfinite(step, (X * torch.nan, Y)).nodes
    assert node.op == "input" and node.name.startswith("graph0/")


def test_modules_have_the_names_that_the_model_gives_them_and_what_needs_no_gradient_is_a_graph_too():
    class Broken(nn.Sequential):
        def forward(self, x):
            hidden = self[0](x)
            torch._dynamo.graph_break()
            return torch.tanh(hidden)

    model, x = Broken(nn.Linear(8, 8)), torch.ones(2, 8)
    teacher = Broken(nn.Linear(8, 8)).requires_grad_(False)

    def distilled(m, x):
        with torch.no_grad():
            target = teacher(x)
        return (m(x) - target).square().mean()

    rules = {"version": 1, "extends": "default", "rules": [{"match": {"module": "0"}, "precision": "fp32"}]}
    step = eager_step(model, distilled, rules=rules)
    expected = float(distilled(model, x))
    assert float(step(x)) == pytest.approx(expected, rel=1e-2)  # the teacher runs in BF16
    assert "subgraphs" in step.execution
    linears = [one for one in step.plan.nodes if one.op == "aten.linear" and one.module == "0"]
    assert linears and all(one.precision == "fp32" for one in linears)


def test_it_is_told_once_and_can_be_read_and_the_users_gradients_stay(caplog):
    model = small()
    step = eager_step(model, branchy)
    mine = model[0].weight.grad = torch.ones(16, 8)
    with caplog.at_level(logging.WARNING, "amp_compiler"):
        step(X, Y)
        step(X, Y)
    (message,) = [record.message for record in caplog.records if "in 1 subgraph," in record.message]
    assert "the update as one graph, because: the loss function branches on the values of a tensor" in message
    names = [stage.name for stage in step.stages]
    assert names[0] == "capture" and names[-1] == "gather_weights" and "take_gradients" in names
    assert any("sgd_update" in str(node.target) for node in step.graph_module.graph.nodes)
    assert {node.op for node in step.plan.nodes} >= {"aten.linear", "aten.cross_entropy_loss"}
    assert model[0].weight.grad is mine and bool((mine == 1).all()) and model[2].weight.grad is None


CALLS = []


@torch.library.custom_op("amp_tests::watched", mutates_args=())
def watched(x: torch.Tensor) -> torch.Tensor:
    CALLS.append(x.shape)
    return x.clone()


watched.register_fake(torch.empty_like)
watched.register_autograd(lambda ctx, grad: grad)


class Blocks(nn.Module):
    """Wide blocks on a narrow trunk."""

    def __init__(self, reentrant):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 256), nn.Tanh(), nn.Linear(256, 8)) for _ in range(4))
        self.reentrant = reentrant

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def kept_by(reentrant):
    torch.manual_seed(0)
    model = Blocks(reentrant)
    compiled = amp.compile(model, dtype="bf16", backend="eager")
    compiled(X.clone().requires_grad_()).sum().backward()
    kept, result = saved_bytes(model, compiled, X.clone().requires_grad_())
    result.sum().backward()
    return kept, [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_checkpointed_is_not_kept(reentrant):
    (whole, expected), (checkpointed, result) = kept_by(None), kept_by(reentrant)
    assert checkpointed < whole / 4
    torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)


def test_what_is_computed_anew_is_planned_past_dynamos_own_limit():
    """A backward compiles what is checkpointed once more; past the limit Dynamo would run it in FP32, and only warn."""
    expected = kept_by(None)[1]
    with torch._dynamo.config.patch(recompile_limit=1):
        result = kept_by(True)[1]
    for mine, theirs in zip(result, expected, strict=True):
        assert torch.equal(mine, theirs)


class Dropped(nn.Module):
    """Two checkpointed blocks in a row, which draw random numbers."""

    def __init__(self, checkpointed):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head, self.checkpointed = nn.Linear(8, 4), checkpointed

    def inner(self, block, x):
        return F.gelu(watched(F.dropout(block(x), 0.3)))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(self.inner, block, x, use_reentrant=False) if self.checkpointed else self.inner(block, x)
        return self.head(x)


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        ("step", "eager"),
        pytest.param("model", "eager", marks=pytest.mark.slow),  # recomputed as a step's
        pytest.param("model", "inductor", marks=[pytest.mark.compiles, pytest.mark.slow]),
    ],
)
def test_blocks_are_computed_again_one_by_one_and_draw_the_same_numbers(kind, backend):
    """Each once, as what goes into one is kept; the weights become those of a model that keeps all."""
    result = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = Dropped(checkpointed)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if kind == "step":
            run = eager_step(model, entropy, optimizer, backend=backend)
        else:
            compiled = amp.compile(model, dtype="bf16", backend=backend)

            def run(x, y, kept, compiled=compiled, optimizer=optimizer):
                entropy(compiled, x, y, kept).backward()
                optimizer.step()

        run(X, Y, KEPT)
        CALLS.clear()
        run(X, Y, KEPT)
        assert len(CALLS) == 2 + 2 * checkpointed
        result.append(model.state_dict())
    kept, again = result
    for name, value in kept.items():
        torch.testing.assert_close(again[name], value, rtol=0, atol=1e-6 if backend == "eager" else 1e-3)


def test_weights_that_are_to_have_no_master_stay_fp32_and_that_is_said():
    weights = []
    for rules in ("default", {"version": 1, "extends": "default", "weights": {"master": "low"}}):
        torch.manual_seed(0)
        model = small()
        step = eager_step(model, branchy, torch.optim.AdamW(model.parameters(), 1e-2), rules=rules)
        for _ in range(3):
            step(X, Y)
        assert ("FP32 weights" in step.execution) is (rules != "default")
        weights.append(list(model.parameters()))
    assert all(map(torch.equal, *weights))


def test_shapes_that_were_asked_for_do_not_keep_a_step_from_its_subgraphs():
    rows = torch.export.Dim("rows", min=2)
    step = eager_step(small(), branchy, dynamic_shapes=({0: rows}, {0: rows}))
    first = float(step(X, Y))
    assert "branches on the values" in step.execution and float(step(X[:5], Y[:5])) > 0 and float(step(X, Y)) < first
    assert len(step._choice.subgraph_step.subgraphs.graphs) == 1  # before the branch, for both sizes


def test_under_anomaly_mode_a_step_is_skipped_and_the_report_named(caplog):
    step = eager_step(small(), branchy, dtype="fp16", loss_scale=1024.0)
    with torch.autograd.set_detect_anomaly(True):
        for _ in range(2):
            step(X * 1e6, Y)
        assert torch.is_anomaly_enabled()
    assert int(step.skipped_steps) == 2 and step.nonfinite_report().parameters
    (said,) = [one.message for one in caplog.records if "anomaly mode" in one.message]
    assert "step.nonfinite_report()" in said


def test_statistics_that_a_batch_leaves_as_they_are_are_known_to_be_written():
    """The average of a batch and itself; then a batch that is skipped."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16, momentum=None))
    amp.compile(model, dtype="fp16", backend="eager")(X)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    step = eager_step(model, lambda m, x: m(x).square().mean(), optimizer, dtype="fp16", loss_scale=1024.0)
    step(X)
    before = [one.clone() for one in model.buffers()]
    step(X * 1e6)
    assert int(step.skipped_steps) == 1 and all(map(torch.equal, before, model.buffers()))
