"""Gradients of several batches are added in FP32, also those that are made in 16 bits."""

import pytest
import torch
from torch import nn
from toys import eager_step, mean_square, sgd_step, train_beside_torch
from training_weights import LOW

import amp_compiler as amp

SUMS = [("bf16", (1.0, 256.0)), ("bf16", (256.0, 1.0, 1.0, 1.0)), ("fp16", (2048.0, 1.0))]
CASES = [(dtype, gradients, "eager") for dtype, gradients in SUMS] + [
    pytest.param("bf16", (256.0, 1.0), "inductor", marks=pytest.mark.slow)
]


@pytest.mark.parametrize(("dtype", "gradients", "backend"), CASES)
def test_a_small_gradient_is_not_rounded_away_beside_a_large_one(dtype, gradients, backend):
    rounded = torch.zeros((), dtype=LOW[dtype])
    for gradient in gradients:
        rounded += gradient
    assert float(rounded) == max(gradients)  # in 16 bits the small ones are lost
    model = nn.Linear(4, 3, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    options = {"dtype": dtype, "loss_scale": None, "accumulate": len(gradients), "backend": backend}
    step = eager_step(model, lambda m, x: m(x).sum(), optimizer, **options)
    for gradient in gradients:
        step(torch.full((1, 4), gradient))  # the derivative by a weight is the input
    nodes = (node for node in step.graph_module.graph.nodes if node.meta.get("amp_phase") == "backward")
    assert (LOW[dtype], (3, 4)) in {(node.meta["val"].dtype, tuple(node.meta["val"].shape)) for node in nodes}
    assert torch.equal(model.weight, torch.full((3, 4), -sum(gradients) / len(gradients)))
    assert torch.equal(step._state.low_weights.get(model.weight, LOW[dtype]), model.weight.to(LOW[dtype]))


class Tasks(nn.Module):
    """Two heads, of which a call trains one."""

    def __init__(self, branches):
        super().__init__()
        self.trunk, self.heads = nn.Linear(4, 8), nn.ModuleList([nn.Linear(8, 2), nn.Linear(8, 2)])
        self.task, self.branches = 0, branches

    def forward(self, x):
        y = self.heads[self.task](self.trunk(x).relu())
        return y + 1 if self.branches and float(y.detach().sum()) > 1e9 else y


def task(model, number, call):
    model.task = call % 2


def rare_task(model, number, call):
    model.task = int(call == 1)  # the second group of calls has none of it


@pytest.mark.parametrize(("branches", "before"), [(False, task), (False, rare_task), (True, rare_task)])
def test_not_all_batches_train_the_same_weights(branches, before):
    """A gradient that only the first of the gathered batches has counts, and what none of them has is not updated."""
    batches = [(x,) for x in torch.randn(6, 8, 4, generator=torch.Generator().manual_seed(0))]
    make = lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1)  # noqa: E731
    between = lambda call, model, optimizer: before(model, call % 3, call)  # noqa: E731
    options = {"tolerance": {"rtol": 1e-6, "atol": 1e-7}, "accumulate": 3, "clip_norm": 0.5}
    step, _ = train_beside_torch(Tasks(branches), mean_square, batches, make, between, **options)
    assert ("one graph, because" in step.execution) == branches


@pytest.mark.parametrize("branches", [False, True])
def test_a_head_is_not_frozen_while_gradients_are_gathered(branches):
    model = Tasks(branches)
    step = eager_step(model, mean_square, accumulate=2)
    x = torch.randn(8, 4)
    step(x)
    model.task = 1
    model.heads[0].requires_grad_(False)
    with pytest.raises(amp.AmpError, match=r"'heads\.0\.weight' was frozen while .* behind the last of the calls"):
        step(x)


class TiedTasks(nn.Module):
    """A table that one task looks up alone, and the other one multiplies with as well."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids, alone):
        result = self.table(ids)
        return result if alone else self.head(result)


@pytest.mark.parametrize("tasks", [(False, True), (True, False)])
def test_tied_weights_have_one_sum(tasks):
    batches = [(torch.randint(10, (6,)), alone) for alone in tasks]
    loss_fn = lambda model, ids, alone: model(ids, alone).square().mean()  # noqa: E731
    train_beside_torch(TiedTasks(), loss_fn, batches, tolerance={"rtol": 1e-6, "atol": 1e-7}, accumulate=2)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_uneven_batches_are_weighed_by_their_samples(backend):
    """As all samples in one batch; else each batch counts alike."""
    parts = [torch.randn(count, 4, generator=torch.Generator().manual_seed(count)) for count in (7, 1, 2)]

    def built(**options):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        options = {"enabled": False, "clip_norm": 0.2, "backend": backend, **options}
        return model, sgd_step(model, mean_square, 0.5, **options)

    (jointly, one), (means, other) = built(), built(accumulate=3)
    model, step = built(accumulate=3, uneven="weight")
    one(torch.cat(parts))
    for part in parts:
        step(part), other(part)
    for name, wanted in jointly.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], wanted, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(step.grad_norm, one.grad_norm)
    torch.testing.assert_close(step.gradients(), one.gradients())
    assert not torch.allclose(means[0].weight, jointly[0].weight, rtol=1e-3)


def test_a_batch_of_which_the_number_of_samples_is_not_known_is_refused():
    options = {"enabled": False, "accumulate": 2, "uneven": "weight"}
    step = sgd_step(nn.Linear(4, 2), lambda m, x, w: (m(x) * w).mean(), 0.5, **options)
    with pytest.raises(amp.AmpError, match="not known of a batch that has tensors of 2 and 3 rows"):
        step(torch.ones(3, 4), torch.ones(2))
    with pytest.raises(amp.AmpError, match="not known of a batch that has no tensor with a dimension"):
        step(torch.tensor(1.0), 2.0)
    step(torch.ones(3, 4), torch.tensor(0.5))


def in_two(model, x):
    loss = model(x).square().mean()
    return loss * 2 if float(loss.detach()) > 1e9 else loss


@pytest.mark.parametrize(
    ("loss_fn", "options"),
    [
        (mean_square, {"dtype": "fp16", "clip_norm": 0.1}),
        (mean_square, {"rules": {"extends": "default", "weights": {"master": "low"}, "version": 1}}),
        (in_two, {}),
        (mean_square, {"enabled": False}),
    ],
    ids=["clipped", "low weights", "subgraphs", "fp32"],
)
def test_a_flush_updates_by_what_was_gathered(loss_fn, options):
    batches = torch.randn(9, 6, 4, generator=torch.Generator().manual_seed(0))
    weights, steps = [], []
    for accumulate in (4, 2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        kept = torch.nn.Parameter(torch.ones(3))
        optimizer.add_param_group({"params": [kept]})
        step = eager_step(model, loss_fn, optimizer, accumulate=accumulate, **options)
        steps.append(step)
        step.flush()  # nothing was gathered
        for batch in batches[:2]:
            step(batch)
        if accumulate == 4:
            step.flush()
        weights.append([one.detach().clone() for one in model.parameters()])
        assert float(step.grad_norm) > 0 and int(step.skipped_steps) == 0
    for mine, theirs in zip(*weights, strict=True):
        assert torch.equal(mine, theirs)
    four, two = steps
    assert torch.equal(four.grad_norm, two.grad_norm) and four.execution.startswith(two.execution[:30])
    for name, mine in four.gradients().items():
        assert torch.equal(mine, two.gradients()[name])
    if "enabled" not in options:
        assert four.plan.casts
    for batch in batches[2:4]:  # the next round begins anew, and its flush finds the same program
        before = [one.clone() for one in four.model.parameters()]
        four(batch)
        two(batch)
        assert all(map(torch.equal, before, four.model.parameters()))
    four.flush()
    assert all(map(torch.equal, four.model.parameters(), two.model.parameters()))


def test_a_flush_skips_what_is_not_finite_and_refuses_what_it_cannot_do():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    step = eager_step(model, mean_square, dtype="fp16", accumulate=3)
    before = [one.detach().clone() for one in model.parameters()]
    step(torch.full((1, 4), 1e30))
    step.flush()
    assert int(step.skipped_steps) == 1 and all(map(torch.equal, before, model.parameters()))
    assert step.nonfinite_report().parameters
    step(torch.ones(1, 4))
    step.flush()
    assert int(step.skipped_steps) == 1 and not torch.equal(before[0], model[0].weight)
    step(torch.ones(1, 4))
    model[0].weight.requires_grad_(False)
    with pytest.raises(amp.AmpError, match=r"'0\.weight' was frozen while .* behind step\.flush"):
        step.flush()
