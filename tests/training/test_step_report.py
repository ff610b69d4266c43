"""`step.nonfinite_report()` and `step.nonfinite_events()`: parameters, nodes, and the steps that were skipped."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from toys import eager_step

import amp_compiler as amp
from amp_compiler.fx.finiteness import range_of
from amp_compiler.ops.loss_scale import DynamicLossScale
from amp_compiler.training.reporting.events import MOST, Events, NonfiniteEvent


class Attention(nn.Module):
    """Two heads behind a causal mask of minus infinities, then an exponential that can overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.act, self.head = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x, gain):
        q, k, v = self.mix(x).chunk(3, -1)
        mask = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)
        scores = (q @ k.transpose(-1, -2) + mask).softmax(-1)
        return self.head(torch.exp(self.act(scores @ v) * gain))


def loss_fn(model, x, gain, target):
    return F.mse_loss(model(x, gain), target)


def make(backend="eager", **options):
    torch.manual_seed(0)
    model = Attention()
    options = {"dtype": "fp16", "loss_scale": 1024.0, **options}
    return model, eager_step(model, loss_fn, torch.optim.SGD(model.parameters(), 1e-3), backend=backend, **options)


X, TARGET = torch.linspace(-1, 1, 2 * 5 * 8).view(2, 5, 8), torch.zeros(2, 5, 4)
ONE = torch.ones(())


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_an_overflow_in_the_forward_is_found_at_its_node_and_not_at_the_mask(backend):
    model, step = make(backend)
    step(X, ONE, TARGET)
    report = step.nonfinite_report()
    assert not report and report.parameters == () and report.nodes == ()
    assert str(report).startswith("all was finite; what becomes zero")
    before = [p.detach().clone() for p in model.parameters()]
    random_state = torch.get_rng_state()
    step(X, 1e3 * ONE, TARGET)
    report = step.nonfinite_report()
    assert {"head.weight", "act.weight"} <= set(report.parameters)
    assert {(node.op, node.phase) for node in report.nodes} == {("aten.exp", "forward")}
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(map(torch.equal, before, model.parameters()))
    (node, *_) = report.nodes
    planned = next(one for one in step.plan.nodes if one.name == node.planned)
    assert planned.op == "aten.exp" and node.decision.startswith(f"{planned.precision} by {planned.rule}")
    ((_, inputs),) = node.inputs
    assert node.output.infinite > 0 and node.output.nan == 0 and node.output.dtype == planned.precision == "fp32"
    assert inputs.infinite == inputs.nan == 0 and inputs.greatest > 88.8  # beyond which FP32 has no exponential
    text = str(report)
    assert f"in the plan: {node.planned}, {node.decision}" in text and f"made {node.output}" in text
    assert text.startswith("not finite: the loss, the gradients of ") and "first made by exp" in text


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, -4.0, 0.0], (1.0, 4.0, 0, 0)),
        ([0.0, 0.0], (0.0, 0.0, 0, 0)),
        ([float("inf"), -float("inf"), float("nan"), 2.0], (2.0, 2.0, 2, 1)),
        ([], (0.0, 0.0, 0, 0)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.float8_e5m2], ids=str)
def test_ranges(values, expected, dtype):
    result = range_of(torch.tensor(values).to(dtype))
    assert (result.least, result.greatest, result.infinite, result.nan) == expected


def test_a_weight_that_is_not_finite_is_named():
    model, step = make()
    step(X, ONE, TARGET)
    with torch.no_grad():
        model.act.weight[0, 0] = float("inf")
    step(X, ONE, TARGET)
    assert any("act" in node.name and node.op == "input" for node in step.nonfinite_report().nodes)


def test_parameters_alone_are_named_of_a_step_that_was_not_skipped():
    _, step = make(loss_scale=None)
    step._state.scale.config = type(step._scale_config)(check_finite=False)
    step(X, 1e3 * ONE, TARGET)
    report = step.nonfinite_report()
    assert report.parameters and not report.nodes


def test_a_batch_that_was_gathered_before_is_blamed():
    """And not the nodes that add gradients up, as the batch that can be run again is the last one alone."""
    model = nn.Linear(4, 2)
    step = eager_step(model, lambda m, x: m(x).square().mean(), dtype="fp16", loss_scale=64.0, accumulate=2)
    good, bad = torch.ones(3, 4), torch.full((3, 4), float("nan"))
    step(bad)
    assert [(node.op, node.name) for node in step.nonfinite_report().nodes] == [("input", "batch_0")]
    step(good)
    report = step.nonfinite_report()
    assert report.parameters == ("weight", "bias") and report.nodes == () and not report.results
    assert "gathered before the last one" in str(report) and int(step.skipped_steps) == 1
    assert amp.find_nonfinite(step, (bad,)) and not amp.find_nonfinite(step, (good,))


@pytest.mark.parametrize("branches", [False, True])
def test_a_loss_that_is_not_finite_is_told_beside_finite_gradients(branches):
    """They were applied; a report that all was finite would be wrong."""

    def loss_fn(model, x):
        y = model(x).mean()
        if branches and float(y.detach()) > 1e9:
            y = 2 * y
        return y + (0 * x.sum()).log()

    model = nn.Linear(4, 2)
    step = eager_step(model, loss_fn)
    before = model.weight.detach().clone()
    batch = (torch.ones(3, 4),)
    assert torch.isinf(step(*batch)) and not torch.equal(model.weight, before)
    report = step.nonfinite_report()
    assert report.results == ("the loss",) and not report.parameters and "no update is skipped" in str(report)
    assert [node.op for node in amp.find_nonfinite(step, batch).nodes] == ["aten.log"]


# ---- the last steps that were skipped


def two_layers(**options) -> amp.TrainingStep:
    model = nn.ModuleDict({"one": nn.Linear(4, 2), "two": nn.Linear(4, 2)})
    loss_fn = lambda model, x, y: (model["one"](x) + model["two"](y)).square().mean()  # noqa: E731
    return eager_step(model, loss_fn, torch.optim.SGD(model.parameters(), 1e-3), dtype="fp16", **options)


GOOD = torch.linspace(-1, 1, 12).view(3, 4)
BAD = GOOD.clone()
BAD[0, 0] = float("nan")


def test_skipped_steps_are_kept_with_their_number_their_scale_and_their_parameters():
    step = two_layers(loss_scale=DynamicLossScale(init_scale=8.0))
    for x in (GOOD, BAD, GOOD, GOOD, BAD):
        step(x, GOOD)
    everything = ("one.weight", "one.bias", "two.weight", "two.bias")
    assert step.nonfinite_events() == (NonfiniteEvent(2, 8.0, everything), NonfiniteEvent(5, 4.0, everything))


@pytest.mark.parametrize("looks", [True, False])
def test_only_the_last_ones_are_kept(looks):
    step = two_layers(loss_scale=2.0)
    step._state.events.looks = looks  # as on a GPU, where it would wait
    numbers = [number for number in range(1, 61) if number % 3]
    for number in range(1, 61):
        step(BAD if number in numbers else GOOD, GOOD)
    assert [event.step for event in step.nonfinite_events()] == numbers[-MOST:]


def test_only_parameters_with_bad_gradients_are_named():
    def step(flags, skipped):
        skipped.add_(flags.max())
        return [flags]

    events = Events(torch.device("cpu"))
    run = events.watched(step, ("a", "b", "c"), flags=0, skipped=1, scale=2.0)
    run(torch.tensor([0, 1, 1], dtype=torch.uint8), torch.tensor(0))
    assert events.read() == (NonfiniteEvent(1, 2.0, ("b", "c")),)


def test_of_gathered_batches_the_update_is_named():
    step = two_layers(loss_scale=8.0, accumulate=2)
    for x in (GOOD, GOOD, BAD, GOOD, GOOD, GOOD):
        step(x, GOOD)
    assert [event.step for event in step.nonfinite_events()] == [2]


def test_a_run_that_is_resumed_goes_on_counting():
    class Nothing(amp.callbacks.Callback):
        def on_step(self, record):
            pass

    before, after = (
        two_layers(loss_scale=2.0, callbacks=[Nothing(100)]),
        two_layers(loss_scale=2.0, callbacks=[Nothing(100)]),
    )
    before(GOOD, GOOD), before(GOOD, GOOD)
    after.load_state_dict(before.state_dict())
    after(BAD, GOOD)
    assert [event.step for event in after.nonfinite_events()] == [3]
