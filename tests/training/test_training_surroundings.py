"""What a step takes from its surroundings: torch's random numbers, and nothing from an ambient autocast."""

import contextlib
import copy
import io
import random
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from toys import classes, eager_step, small, train_beside_torch

import amp_compiler as amp

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(32, 8, generator=GENERATOR)
Y = torch.randint(0, 5, (32,), generator=GENERATOR)
KINDS = {"bf16": {"dtype": "bf16"}, "fp32": {"enabled": False}}
MODES = pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)


class Net(nn.Module):
    """Drops inputs and hidden values; what is left of the inputs, none of which is 0, comes out too."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.a, self.b, self.rate = nn.Linear(8, 16), nn.Linear(16, 5), rate
        self.norm = nn.LayerNorm(16)

    def forward(self, x):
        left = F.dropout(x, self.rate, self.training)
        hidden = torch.tanh(self.norm(self.a(left)))
        return self.b(F.dropout(hidden, self.rate, self.training)), left


def loss_fn(model, x, y):
    logits, left = model(x)
    return F.cross_entropy(logits, y), left


def net(rate=0.5):
    torch.manual_seed(0)
    return Net(rate)


def test_dropout_in_plain_fp32_is_that_of_a_torch_loop_bit_for_bit():
    model = net(0.3)
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-2)
    plain = torch.optim.SGD(reference.parameters(), 0.1, momentum=0.9, weight_decay=1e-2)
    step = eager_step(model, loss_fn, optimizer, enabled=False)
    torch.manual_seed(7)
    mine, drawn = [step(X, Y) for _ in range(4)], torch.get_rng_state()
    torch.manual_seed(7)
    for loss, left in mine:
        plain.zero_grad()
        expected, expected_left = loss_fn(reference, X, Y)
        expected.backward()
        plain.step()
        assert torch.equal(loss, expected.detach()) and torch.equal(left, expected_left)
    assert torch.equal(drawn, torch.get_rng_state())
    assert all(map(torch.equal, model.parameters(), reference.parameters()))


@MODES
def test_an_ambient_autocast_around_building_and_some_calls_changes_no_bit(options):
    results = []
    for ambient in (False, True):
        around = [torch.autocast("cpu", torch.bfloat16, enabled=ambient and at % 2 == 0) for at in range(4)]
        model = net()
        with around[0]:
            step = eager_step(model, loss_fn, **options)
        torch.manual_seed(7)
        losses = []
        for context in around:
            with context:
                losses.append(step(X, Y)[0])
                assert ((X @ X.t()).dtype == torch.bfloat16) is context._enabled  # as before the call
        results.append([*losses, *model.parameters()])
    assert all(map(torch.equal, *results))


def test_a_call_where_dynamo_captures_nothing_runs_under_autocast_and_the_next_as_one_graph(caplog):
    losses = {}
    for around in (False, True):
        model = small()
        step = eager_step(model, classes, torch.optim.AdamW(model.parameters(), 0.05), dtype="fp16")
        losses[around] = []
        for call in range(8):
            with torch.compiler.set_stance("force_eager" if around and call % 4 > 1 else "default"):
                losses[around].append(float(step(X, Y % 4)))
            assert ("torch.autocast" in step.execution) == (around and call % 4 > 1)
        assert step.skipped_steps == 0
    torch.testing.assert_close(losses[True], losses[False], rtol=2e-2, atol=2e-2)
    assert losses[True][-1] < 0.8 * losses[True][0]
    assert sum("the training step runs forward and backward under" in one.message for one in caplog.records) == 1
    with pytest.raises(amp.AmpError, match=r"no plan: it ran forward and backward under torch\.autocast"):
        step.plan  # noqa: B018


def test_anomaly_mode_looks_into_no_trace_and_is_told_to_see_nothing(caplog):
    model = small()
    with torch.autograd.set_detect_anomaly(True):
        step = eager_step(model, classes, dtype="fp16")
        for x in (X, X * 1e6, X):
            step(x, Y % 4)
        compiled = amp.compile(model, dtype="fp16", backend="eager")
        compiled(X).sum().backward()
        assert torch.is_anomaly_enabled()
    assert step.execution.startswith("as one graph") and step.skipped_steps == 1
    assert compiled.execution == "as one graph"
    message = [one.message for one in caplog.records if "anomaly mode" in one.message]
    assert len(message) == 1 and "nonfinite_report()" in message[0]


def test_a_dispatch_mode_sees_what_runs_and_nothing_is_compiled_for_it():
    step = eager_step(small(), classes)
    for _ in range(3):
        with FlopCounterMode(display=False) as counter:
            step(X, Y % 4)
        first, second = 2 * 32 * 8 * 16, 2 * 32 * 16 * 4  # the products of each layer; two and three of them in all
        assert counter.get_total_flops() == 2 * first + 3 * second
        step(X, Y % 4)
    assert len(step._choice.programs) == 1


# ---- capturing and compiling use up no random numbers: a run draws what it draws, whenever it is captured

ONES = torch.ones(4, 16)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.dropout = nn.Linear(16, 16), nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(self.inner(x)) + torch.rand(16)


def noise(model, x):
    y = model(x)
    return y.square().mean(), y


def states() -> list[object]:
    return [
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
        np.random.get_state()[2],
    ]


def seed() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)


def make():
    seed()
    model = Noisy()
    return eager_step(model, noise, torch.optim.SGD(model.parameters(), 0.0))


class Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.generator, self.python = nn.Linear(16, 4), torch.Generator(), random.Random(1)

    def forward(self, x):
        noise = torch.empty(4).uniform_() + random.random() + np.random.rand()
        return self.inner(x) + noise + torch.rand(4, generator=self.generator) + self.python.random()


def test_a_capture_draws_nothing_from_generators_though_it_fails():
    model = Draws()
    drawn = lambda: [*states(), model.generator.get_state().tolist(), model.python.getstate()]  # noqa: E731
    before = drawn()
    for capture in (eager_step(model, lambda m, x: m(x).sum()).graph_for, lambda x: amp.explain(model, (x,))):
        with contextlib.suppress(amp.CaptureError):  # Dynamo breaks its graph there
            capture(ONES)
        assert drawn() == before


def test_a_second_shape_and_a_report_draw_nothing_either():
    step = make()
    seed()
    first = step(ONES)[1]
    seed()
    step(torch.ones(6, 16))  # recompiled
    seed()
    assert torch.equal(step(ONES)[1], first)
    before = states()
    step.nonfinite_report()
    F.relu(step.gradients()["inner.weight"])
    assert states() == before


@pytest.mark.compiles
def test_what_compiles_draws_nothing_is_told_and_the_first_call_draws_what_later_ones_draw(monkeypatch, caplog):
    """Whatever the compiler draws, of a backward too, which torch compiles at its first call.

    Where nothing is compiled the rows of tests/behaviour compare what is drawn with eager.
    """
    import torch._inductor.compile_fx as compile_fx

    real, compiled = compile_fx.fx_codegen_and_compile, []

    def drawing(*args, **kwargs):
        compiled.append((torch.rand(3), random.random(), np.random.rand()))
        return real(*args, **kwargs)

    monkeypatch.setattr(compile_fx, "fx_codegen_and_compile", drawing)
    monkeypatch.setattr("amp_compiler.fx.sign_of_life.PATIENCE", 1e-9)
    monkeypatch.setattr("sys.stderr", io.StringIO())
    model, drawn = amp.compile(Noisy(), dtype="bf16"), []
    with torch._inductor.config.patch(force_disable_caches=True):  # a backward that is in a cache is not compiled
        for call in range(2):
            seed()
            y = model(ONES)
            drawn.append([y.detach().clone(), model(ONES).detach().clone(), torch.rand(2)])
            before, built = states(), len(compiled)
            caplog.clear()
            y.square().sum().backward()
            assert states() == before and built and (len(compiled) > built) == (call == 0)
            said = [record.getMessage() for record in caplog.records]
            if call == 0:
                assert said[0] == "compiling the backward of Noisy, for 1e-09 s now: compiling it"
                assert re.fullmatch(r"compiled the backward of Noisy in \d+\.\d s", said[1])
            assert len(said) == (2 if call == 0 else 0)
    assert all(map(torch.equal, *drawn))


# ---- what a step with Python state, numbers and parameters beside the model says of itself; see tests/behaviour too

FEW = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


class Stateful(nn.Module):
    """Keeps a part of its result for the next call."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.state = nn.Linear(4, 4), torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x) + 0.1 * self.state
        self.state = h.detach().mean(0)
        return h


def test_batch_and_state_are_known_to_move_from_step_to_step() -> None:
    """A CUDA graph has to know."""
    model = Stateful()
    step = eager_step(model, lambda m, x: m(x).square().mean())
    for _ in range(3):
        step(FEW)
    assert len([*step._choice.programs.values()][-1].compiled.run._batch) == 2 and type(model.state) is Tensor


class Trainer:
    def __init__(self) -> None:
        self.head, self.scales = nn.Linear(4, 3), [nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))]

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        return (self.scales[0] * self.head(model(x))).square().mean() + (self.scales[1] - 2).square()


def test_parameters_beside_the_model_are_named_and_may_join_the_optimizer_later() -> None:
    model, trainer = nn.Linear(4, 4), Trainer()
    late = trainer.scales[1]
    optimizer = torch.optim.SGD([*model.parameters(), *trainer.head.parameters(), trainer.scales[0]], 0.1)
    step = eager_step(model, trainer.loss, optimizer)
    step(FEW)
    assert {"head.weight", "head.bias", "scales_0"} < step.gradients().keys()
    assert late.item() == 1.0 and trainer.scales[0].grad is None
    optimizer.add_param_group({"params": [late]})
    step(FEW)
    assert len(step.gradients()) == 6 and late.item() > 1.0


def test_a_tensor_of_numbers_of_which_one_changes_is_made_in_subgraphs_too() -> None:
    message = [1]

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        y = model(x)
        if float(y.detach().sum()) > 1e9:
            return y.sum()
        return (y[:, :2] * torch.tensor([[2, message[0]], [message[0], 3.5]])[0]).square().mean()

    def tell(number: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        message[0] = (1, 2, 4, 3)[number]

    step, _ = train_beside_torch(nn.Linear(4, 4), loss_fn, [(FEW,)] * 4, between=tell, enabled=True, rules="apex-o0")
    assert "subgraph" in step.execution
