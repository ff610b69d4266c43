"""Training steps on a CPU that leave gradients of weight matrices as products, against the same steps run eagerly."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from toys import classes, eager_step

import amp_compiler as amp
from amp_compiler.ops.cpu import update as cpu_update
from amp_compiler.ops.update.product import Product

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(5, 8, 64, generator=GENERATOR)
Y = torch.randint(0, 64, (5, 8), generator=GENERATOR)
WEIGHTS = ["0.weight", "2.weight", "4.weight"]
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, 1e-3),
    "amsgrad": lambda p: torch.optim.Adam(p, 1e-3, weight_decay=1e-2, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
}

pytestmark = pytest.mark.skipif(
    cpu_update.most_inner() < 8, reason="no C++ compiler, or a processor that does not multiply BF16 itself"
)


def make(backend="inductor", optimizer="adamw", **options):
    torch.manual_seed(0)
    layers = nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 96), nn.ReLU(), nn.Linear(96, 64)
    model = nn.Sequential(*layers)
    result = OPTIMIZERS[optimizer](model.parameters())
    return model, result, eager_step(model, classes, result, backend=backend, **options)


def deferred(step):
    """Names of the parameters whose gradients the last step has left as products."""
    program, output, _ = step._last
    pairs = zip(program.report.updated, output.gradients, strict=True)
    return [name for name, gradient in pairs if isinstance(gradient, Product)]


def assert_close_gradients(mine, theirs):
    """Of the size of the largest element: single ones may be what is left of larger ones."""
    assert mine.keys() == theirs.keys()
    for name, gradient in mine.items():
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, theirs[name], rtol=0.02, atol=0.02 * float(theirs[name].abs().max()))


def assert_same_steps(step, eager, batches):
    """Run a compiled step and an eager one side by side; the names of the deferred gradients at the end."""
    for batch in batches:
        torch.testing.assert_close(step(*batch), eager(*batch), rtol=1e-2, atol=1e-3)
        torch.testing.assert_close(step.grad_norm, eager.grad_norm, rtol=1e-2, atol=0)
        assert list(step.gradients()) == [name for name, _ in step.model.named_parameters()]
        assert_close_gradients(step.gradients(), eager.gradients())
        exact = torch.cat([gradient.double().flatten() for gradient in step.gradients().values()]).norm()
        assert float(step.grad_norm) == pytest.approx(float(exact), rel=1e-3)
    assert deferred(eager) == []
    return deferred(step)


def assert_same_training(steps=5, **options):
    (model, _, step), (other, _, eager) = make(**options), make("eager", **options)
    result = assert_same_steps(step, eager, zip(X[:steps], Y[:steps], strict=True))
    torch.testing.assert_close(list(model.parameters()), list(other.parameters()), rtol=0, atol=2e-3)
    return result


@pytest.mark.sweep(2)
@pytest.mark.parametrize("options", [*({"optimizer": name} for name in OPTIMIZERS), {"loss_scale": 1024.0}], ids=str)
def test_a_training_with_products_is_that_of_the_eager_backend(options, compiler):
    assert assert_same_training(**options) == WEIGHTS


@pytest.mark.sweep(2)
@pytest.mark.parametrize("options", [{"clip_norm": 1.0}, {"accumulate": 2}, {"dtype": "fp16"}], ids=str)
def test_steps_that_need_whole_gradients_defer_none(options, compiler):
    assert assert_same_training(steps=4, **options) == []


@pytest.mark.parametrize(("rows", "most", "expected"), [(40, 1 << 40, WEIGHTS[:2]), (8, 8, WEIGHTS), (8, 7, [])])
def test_gradients_are_made_where_that_is_smaller_or_faster(monkeypatch, rows, most, expected, compiler):
    monkeypatch.setattr(cpu_update, "most_inner", lambda: most)
    _, _, step = make()
    step(X.view(40, 64)[:rows], Y.view(40)[:rows])  # 40 * (64 + 96) elements are more than 64 * 96
    assert deferred(step) == expected


class Queries(nn.Module):
    def __init__(self, read) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.queries, self.read = nn.Parameter(torch.randn(4, 64)), read
        self.a, self.b = nn.Linear(64, 128, bias=False), nn.Linear(128, 96, bias=False)

    def forward(self):
        return self.b(F.relu(self.a(self.read(self.queries))))


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (lambda queries: queries.view(2, 2, 64).flatten(0, 1)[:, :], ["b.weight"]),
        (lambda queries: queries.bfloat16() * 1, ["a.weight", "b.weight"]),
    ],
    ids=["views", "times one"],
)
def test_a_weight_whose_factor_is_another_parameter_is_updated_from_its_value_before_the_step(read, expected, compiler):
    models, steps = [Queries(read), Queries(read)], []
    initial = [parameter.detach().clone() for parameter in models[0].parameters()]
    for model, backend in zip(models, ("inductor", "eager"), strict=True):
        groups = [{"params": [model.queries], "lr": 1e3}, {"params": [model.a.weight, model.b.weight]}]
        optimizer = torch.optim.SGD(groups, 5.0)
        step = eager_step(model, lambda m: m().square().mean(), optimizer, backend=backend)
        step()
        steps.append(step)
    assert deferred(steps[0]) == expected
    assert float((models[0].queries.detach() - initial[0]).abs().max()) > 0.5
    assert_close_gradients(*(step.gradients() for step in steps))
    for mine, theirs, before in zip(*(model.parameters() for model in models), initial, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0.02 * float((theirs - before).detach().abs().max()))


def test_a_factor_in_the_batch_is_not_deferred_and_one_made_of_it_is(compiler):
    _, _, step = make()
    step(X[0].bfloat16(), Y[0])
    assert deferred(step) == WEIGHTS[1:]


@pytest.mark.parametrize(("optimizer", "bad"), [("adamw", float("inf")), ("sgd", float("nan"))])
def test_a_step_that_is_not_finite_changes_nothing_and_is_reported(optimizer, bad, compiler):
    model, result, step = make(optimizer=optimizer)
    step(X[0], Y[0])
    held = lambda: [model.state_dict(), result.state_dict()["state"]]  # noqa: E731
    before, x = copy.deepcopy(held()), X[1].clone()
    x[3, 5] = bad
    step(x, Y[1])
    assert deferred(step) == WEIGHTS and int(step.skipped_steps) == 1 and not step.grad_norm.isfinite()
    torch.testing.assert_close(held(), before, rtol=0, atol=0)
    report = step.nonfinite_report()
    assert set(WEIGHTS) <= set(report.parameters) and report.nodes[0].name == "batch_0"
    assert not step.gradients()["0.weight"].isfinite().all()
    step(X[2], Y[2])
    assert int(step.skipped_steps) == 1 and step.grad_norm.isfinite() and not step.nonfinite_report()


def loss_and_hidden(model, x):
    hidden = model[1](model[0](x))
    return model[2](hidden).square().mean(), hidden.bfloat16()


def assert_same_gradients_after(change, step):
    before = step.gradients()
    assert all(bool(gradient.any()) for gradient in before.values())
    change.zero_()
    for name, gradient in step.gradients().items():
        assert torch.equal(gradient, before[name])


@pytest.mark.parametrize(
    ("dtype", "with_aux"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)]
)
def test_gradients_are_those_of_the_step_whatever_became_of_its_batch_weights_and_results(dtype, with_aux, compiler):
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.ReLU(), nn.Linear(128, 96, bias=False))
    loss_of = loss_and_hidden if with_aux else lambda *inputs: loss_and_hidden(*inputs)[0]
    step = eager_step(model, loss_of, torch.optim.AdamW(model.parameters(), 0.1), backend="inductor")
    batch = X[0].to(dtype, copy=True)
    results = [step(batch)[1]] if with_aux else [step(batch)][1:]
    assert with_aux or deferred(step)[-1] == "2.weight"
    for changed in (batch, *results, *(parameter.detach() for parameter in model.parameters())):
        assert_same_gradients_after(changed, step)


def test_float64_gradients_are_left_to_the_compiler(compiler):
    torch.manual_seed(0)
    model = nn.Module()
    model.p, model.w = nn.Parameter(torch.randn(4, 64)), nn.Linear(64, 8, bias=False)

    def loss_of(m):
        return m.w(m.p.double().float()).square().mean()

    before, expected = model.p.detach().clone(), torch.autograd.grad(loss_of(model), model.p)[0]
    amp.training_step(model, loss_of, torch.optim.SGD(model.parameters(), 0.1), enabled=False)()
    assert torch.allclose(model.p, before - 0.1 * expected, rtol=0, atol=1e-7)
