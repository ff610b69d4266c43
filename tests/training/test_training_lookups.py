"""Training steps on a CPU whose tables' gradients stay the rows that were looked up, against the eager backend."""

import pytest
import torch
import torch.nn.functional as F
from test_training_products import assert_same_steps
from torch import nn
from toys import eager_step, relative

import amp_compiler as amp
from amp_compiler.backends.step_runner import kernels_for, most_inner
from amp_compiler.fx.graph import copy_graph
from amp_compiler.ops.cpu import update as cpu_update
from amp_compiler.ops.update.product import Product
from amp_compiler.passes.step.defer_gradients import DeferGradients

IDS = torch.randint(0, 50, (5, 2, 6), generator=torch.Generator().manual_seed(0))
IDS[:, 0, :3] = 7  # a row that is looked up often
LOW = {"version": 1, "extends": "default", "weights": {"master": "low"}}  # no loops update weights without masters

pytestmark = [
    pytest.mark.skipif(not cpu_update.available(), reason="no C++ compiler on this machine"),
    pytest.mark.usefixtures("bf16_kernels", "deferred"),
]
multiplies = pytest.mark.skipif(cpu_update.most_inner() < 24, reason="a processor that does not multiply BF16 itself")


@pytest.fixture
def deferred(monkeypatch):
    """Gradients are products within the update, also on a processor on which that is not faster."""
    if not cpu_update.most_inner():
        monkeypatch.setattr(cpu_update, "most_inner", lambda: 512)


class Words(nn.Module):
    """Words to words, with a table that may be tied to the head and be looked up twice."""

    def __init__(self, width=64, tied=True, twice=False, padding=None):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, width, padding_idx=padding)
        self.body, self.head = nn.Linear(width, width), nn.Linear(width, 50, bias=False)
        self.twice = twice
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids):
        hidden = self.table(ids) + (self.table(ids.flip(1)) if self.twice else 0)
        return self.head(torch.tanh(self.body(hidden)))


def loss_fn(model, ids):
    return F.cross_entropy(model(ids).flatten(0, 1), ids.roll(1, 1).flatten())


def left(step):
    """Names of the parameters whose gradients are left as added rows."""
    program, output, _ = step._last
    pairs = zip(program.report.updated, output.gradients, strict=True)
    return [name for name, grad in pairs if isinstance(grad, Product) and grad.dtype == torch.float32]


def amsgrad(parameters, rate):
    return torch.optim.Adam(parameters, rate, amsgrad=True)


def both(optimizer=torch.optim.AdamW, options=None, **settings):
    result = []
    for backend in ("inductor", "eager"):
        model = Words(**settings)
        result.append(
            (model, eager_step(model, loss_fn, optimizer(model.parameters(), 0.05), backend=backend, **(options or {})))
        )
    return result


def assert_same_training(steps=5, **settings):
    (model, step), (other, eager) = both(**settings)
    assert_same_steps(step, eager, [(ids,) for ids in IDS[:steps]])
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert relative(mine, theirs) < 0.03
    return left(step)


KINDS = [{"twice": True}, {"padding": 7, "tied": False}, {"optimizer": torch.optim.SGD}, {"optimizer": amsgrad}]
NAMES = ["twice", "padding", "SGD", "AMSGrad"]


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "settings", [pytest.param(one, marks=[] if "tied" in one else [multiplies]) for one in KINDS], ids=NAMES
)
def test_a_table_is_trained_as_by_the_eager_backend(settings, compiler):
    assert assert_same_training(**settings) == ["table.weight"]


def test_plain_fp32_leaves_rows_too(compiler):
    (model, step), (other, eager) = both(torch.optim.SGD, {"enabled": False}, tied=False)
    for ids in IDS.clone():
        step(ids), eager(ids)
        before = step.gradients()["table.weight"].clone()
        ids.fill_(1)
        assert torch.equal(step.gradients()["table.weight"], before)  # whatever became of the batch
    assert left(step) == ["table.weight"]
    torch.testing.assert_close(list(model.parameters()), list(other.parameters()), rtol=1e-5, atol=1e-6)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "settings",
    [{"options": {"clip_norm": 1.0}}, {"options": {"accumulate": 2}}, {"width": 32}, {"options": {"rules": LOW}}],
    ids=str,
)
def test_whole_gradients_are_made_where_they_are_needed_or_faster(settings, compiler):
    assert assert_same_training(steps=4, **settings) == []


def weighted(model, ids, weight):
    return (model.table(ids) * weight[..., None]).square().sum()


def test_a_table_whose_last_row_alone_is_not_finite_stops_the_step(compiler):
    torch.manual_seed(0)
    model = Words(tied=False, padding=7)
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    step = amp.training_step(model, weighted, optimizer, dtype="bf16")
    ids, weight = IDS[0].clone(), torch.ones(2, 6)
    ids[0, :5], ids[1, 5] = 7, 3
    step(ids, weight)
    before = model.table.weight.detach().clone()
    weight[1, 5] = float("inf")
    step(ids, weight)
    assert left(step) == ["table.weight"] and int(step.skipped_steps) == 1
    assert torch.equal(model.table.weight, before)
    assert step.nonfinite_report().parameters == ("table.weight",)
    step(ids, torch.ones(2, 6))
    assert int(step.skipped_steps) == 1 and not torch.equal(model.table.weight, before)


class Positions(Words):
    def forward(self, ids):
        return self.table(ids) + F.embedding(torch.arange(ids.shape[1]), self.head.weight)


def test_positions_that_every_sample_shares_and_a_batch_without_words(compiler):
    results = []
    for backend in ("inductor", "eager"):
        model = Positions(tied=False)
        step = eager_step(model, lambda m, ids: m(ids).square().sum(), backend=backend)
        for ids in (IDS[0], IDS[1], IDS[0][:0]):
            step(ids)
        results.append((left(step), model))
    assert results[1][0] == []
    for mine, theirs in zip(*(model.parameters() for _, model in results), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_on_another_device_nothing_is_left(compiler):
    (_, step), _ = both(tied=False)
    step(IDS[0])
    program = step._last[0]
    kernels = kernels_for(program.report.graph_module)
    assert DeferGradients(most_inner(kernels), tuple(kernels))(copy_graph(program.report.graph_module)).modified
    others = {target: target for target in kernels}  # as on CUDA
    assert not DeferGradients(most_inner(others), tuple(others))(copy_graph(program.report.graph_module)).modified
