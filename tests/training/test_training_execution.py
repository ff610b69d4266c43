"""How a training step runs: replayed as a graph, without waiting for the device, ended where it is stuck."""

import pytest
import torch
import torch.nn.functional as F
from fake_graphs import FakeGraphs
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from toys import eager_step

import amp_compiler as amp
from amp_compiler.errors import LossScaleError
from amp_compiler.forward.settings import make_settings
from amp_compiler.ops.loss_scale import DynamicLossScale
from amp_compiler.training.build import _no_cuda_graph
from amp_compiler.training.reporting.scale_watch import StuckWatch

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(40, 16, 8, generator=GENERATOR)
Y = torch.randint(0, 5, (40, 16), generator=GENERATOR)
PATIENCE = 20


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Linear(16, 5)

    def forward(self, x):
        return self.b(F.dropout(F.relu(self.norm(self.a(x))), 0.2))


def loss_fn(model, x, y):
    logits = model(x)
    return F.cross_entropy(logits, y), {"logits": logits, "x": x}


def make(graphs=None, backend="inductor", kind=None, **options):
    torch.manual_seed(0)
    model = Net()
    optimizer = (kind or (lambda p: torch.optim.AdamW(p, 1e-2)))(model.parameters())
    options = {"dtype": "fp16", "loss_scale": DynamicLossScale(growth_interval=4), "clip_norm": 1.0} | options
    step = eager_step(model, loss_fn, optimizer, backend=backend, **options)
    if graphs is not None:
        step._state.graphs.api = graphs
    return model, optimizer, step


def snapshot(model, optimizer, step):
    state = [t.clone() for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    return [*[t.clone() for t in model.state_dict().values()], *state, *[t.clone() for t in step._scale]]


def equal(first, second):
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def train(graphs, steps=14, disturb=lambda number, model, optimizer, step: None, sizes=(16,), **options):
    """Losses, norms, gradients and the end state of a run with infs in some steps and a schedule."""
    model, optimizer, step = make(graphs, **options)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
    torch.manual_seed(1)
    results = []
    for number in range(steps):
        size = sizes[number % len(sizes)]
        x = X[number][:size] * (float("inf") if number in (2, 7, 8) else 1.0)
        loss, aux = step(x, Y[number][:size])
        schedule.step()
        results += [loss, aux["logits"], aux["x"], step.grad_norm, *step.gradients().values()]
        disturb(number, model, optimizer, step)
    return results, snapshot(model, optimizer, step), step


def same_run(first, second):
    assert equal(first[1], second[1])
    torch.testing.assert_close(list(first[0]), list(second[0]), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "options",
    [{"accumulate": 2}, {"sizes": (16, 12), "dynamic_shapes": None}],
    ids=["accumulate", "shapes"],
)
def test_replays_are_the_same_training(node_by_node, options):
    graphs = FakeGraphs()
    plain, replayed = train(None, **options), train(graphs, **options)
    same_run(plain, replayed)
    assert graphs.log.count("warm_up") == 6 and graphs.log.count("capture") == 2
    assert graphs.log.count("replay") == 8
    assert replayed[2].execution == "as one graph, replayed as a CUDA graph" and int(replayed[2].skipped_steps) > 1


def test_how_a_step_runs_can_be_read(node_by_node):
    _, _, step = make(FakeGraphs())
    with pytest.raises(amp.AmpError, match="no finished call"):
        _ = step.execution
    said = []
    for number in range(5):
        step(X[number], Y[number])
        said.append(step.execution)
    assert [text.split(": ")[-1] for text in said[:3]] == [f"{n} of 3 warm-up steps done" for n in (1, 2, 3)]
    assert said[3] == said[4] == "as one graph, replayed as a CUDA graph"
    for options, text in (
        ({"backend": "eager"}, "backend='eager' runs the step node by node"),
        ({}, "the tensors are on the cpu"),
    ):
        _, _, step = make(**options)
        step(X[0], Y[0])
        assert step.execution.startswith("as one graph, without a CUDA graph: ") and text in step.execution


def test_what_a_graph_cannot_replay_is_known_before_it_runs():
    def traced(function):
        return make_fx(function)(torch.empty(2, device="meta"))

    noisy = traced(lambda x: x * torch.rand(2, device="cpu").to(x.device))
    assert "'rand' is on cpu, other values are on meta" in _no_cuda_graph(noisy, make_settings())
    quiet = traced(lambda x: x * 2)
    assert _no_cuda_graph(quiet, make_settings()) == ""
    dynamic = make_settings(dynamic_shapes=({0: torch.export.Dim("n")},))
    assert "dynamic_shapes=" in _no_cuda_graph(quiet, dynamic)
    symbolic = make_fx(lambda x: x * 2, tracing_mode="symbolic")(torch.empty(2, 3))
    assert "the shape of 'x_1' is dynamic" in _no_cuda_graph(symbolic, make_settings())


class NoReads(TorchDispatchMode):
    """Fails where a tensor's value is brought to the host."""

    FORBIDDEN = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal", "aten::masked_select")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func._schema.name not in self.FORBIDDEN, func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("optimizer", "accumulate"), [("adamw", 2), ("sgd", 1)])
def test_a_step_reads_nothing_from_the_device(optimizer, accumulate):
    make_sgd = lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.1)  # noqa: E731
    _, result, step = make(backend="eager", accumulate=accumulate, kind=make_sgd if optimizer == "sgd" else None)
    schedule = torch.optim.lr_scheduler.StepLR(result, 2)
    step._watch = StuckWatch(torch.device("cpu"), SlowCopy(delay=2))  # as on a GPU; a CPU's flags are read directly
    step._state.events.looks = False
    for number in range(2):
        step(X[number], Y[number])
    with NoReads():
        for number in range(2, 8):
            step(X[number] * (float("inf") if number == 5 else 1.0), Y[number])
            schedule.step()
            step.loss_scale, step.skipped_steps, step.grad_norm, step.gradients()
        with pytest.raises(AssertionError, match="_local_scalar_dense"):
            float(step.loss_scale)
    assert len(step._choice.programs) <= 2 * accumulate  # SGD's first step has another program; a mode asks for none
    assert int(step.skipped_steps) == len(step.nonfinite_events()) == 1


class SlowCopy:
    """A copy to the host that arrives after some looks at it."""

    def __init__(self, delay: int) -> None:
        self.delay, self.left, self.started = delay, 0, 0

    def start(self, flag):
        self.flag, self.left, self.started = flag.clone(), self.delay, self.started + 1

    def done(self):
        self.left -= 1
        return self.left < 0

    def value(self):
        with _disable_current_modes():  # by then the flag is on the host
            return bool(self.flag)


def stuck_step(**options):
    return make(backend="eager", loss_scale=DynamicLossScale(4.0, min=1.0), **options)


def test_a_run_that_is_stuck_ends_by_itself():
    model, _, step = stuck_step()
    step(X[0], Y[0])
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(2 + PATIENCE - 1):  # two halvings lead to the floor
        step(X[0] * float("inf"), Y[0])
    with pytest.raises(LossScaleError, match=r"20 steps in a row at the loss scale 1, .*parameters: .*a\.weight"):
        step(X[0] * float("inf"), Y[0])
    assert int(step.skipped_steps) == 2 + PATIENCE
    assert equal(before, [parameter.detach() for parameter in model.parameters()])
    step(X[1], Y[1])  # finite data fixes it
    assert not equal(before, [parameter.detach() for parameter in model.parameters()])
    step(X[0] * float("nan"), Y[0])


@pytest.mark.parametrize("delay", [0, 3])
def test_a_flag_on_its_way_is_raised_for_when_it_arrives(delay):
    _, _, step = stuck_step()
    copies = SlowCopy(delay)
    step._watch = StuckWatch(torch.device("cpu"), copies)
    bad = X[0] * float("inf")
    calls = 0
    with pytest.raises(LossScaleError, match=r"first non-finite parameters: .*a\.weight"):
        for _ in range(60):
            step(bad, Y[0])
            calls += 1
    # Copies start one behind the other; the first one that starts after the 22nd step brings the news.
    assert 2 + PATIENCE <= calls <= 2 + PATIENCE + 2 * (delay + 1) and copies.started <= calls // (delay + 1) + 1
    step(X[1], Y[1])
    for _ in range(delay + 2):
        step(X[1], Y[1])


@pytest.mark.parametrize("loads", [False, True])
def test_news_that_no_longer_hold_are_passed_over(loads):
    """A step was finite, or another scale was loaded, before the copy arrives."""
    _, _, step = stuck_step()
    fresh, bad = step.state_dict(), X[0] * float("inf")
    step._watch = StuckWatch(torch.device("cpu"), copies := SlowCopy(1000))
    for _ in range(2 + PATIENCE):
        step(bad, Y[0])
    copies.start(step._scale_config.stuck(step._scale))
    assert copies.value()
    if loads:
        step.load_state_dict(fresh)
    else:
        step(X[1], Y[1])
    copies.left = 0
    step(bad if loads else X[2], Y[2])
    assert not loads or int(step.skipped_steps) == 1


def test_a_scale_that_skips_nothing_is_not_watched():
    _, _, step = make(backend="eager", enabled=False)
    step._watch = StuckWatch(torch.device("cpu"), copies := SlowCopy(0))
    step(X[0], Y[0])
    assert copies.started == 0
