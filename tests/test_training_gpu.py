"""A training step on a CUDA device: replayed as one CUDA graph, never waiting, as exact as without one."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_compiler as amp
from amp_compiler.errors import LossScaleError
from amp_compiler.runtime.cuda_graph import WARM_UPS
from amp_compiler.runtime.loss_scale import DynamicLossScale

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
REPLAYED = "replayed as one CUDA graph"


@pytest.fixture(autouse=True)
def one_order_of_sums(monkeypatch):
    """cuDNN's weight gradients in one order of summation, so that runs can be compared."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


class Net(nn.Module):
    """Convolution, BatchNorm, dropout and a linear layer: every kind of state that a replay must carry on."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16)
        self.head, self.drop = nn.Linear(16 * 6 * 6, 10), drop

    def forward(self, x):
        hidden = F.dropout(F.relu(self.norm(self.conv(x))), self.drop, training=self.drop > 0)
        return self.head(hidden.flatten(1))


def loss_fn(model, x, y):
    return F.cross_entropy(model(x), y)


def batches(count, size=32, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    for _ in range(count):
        x = torch.randn(size, 3, 8, 8, device="cuda", generator=generator)
        yield x, torch.randint(0, 10, (size,), device="cuda", generator=generator)


def make(backend="inductor", kind=torch.optim.AdamW, drop=0.0, loss=loss_fn, **options):
    torch.manual_seed(0)
    model = Net(drop).cuda()
    optimizer = kind(model.parameters(), 1e-3)
    options = {"dtype": "fp16", "loss_scale": DynamicLossScale(1024.0, growth_interval=8), "clip_norm": 1.0} | options
    return model, optimizer, amp.training_step(model, loss, optimizer, backend=backend, **options)


def weights(model):
    return [value.detach().clone() for value in model.state_dict().values()]


class NoWaiting:
    """Any synchronisation that torch knows of is an error."""

    def __enter__(self):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")

    def __exit__(self, *caught):
        torch.cuda.set_sync_debug_mode("default")


def without_graphs(step):
    """The same compiled step, never captured."""
    step._state.graphs.most = 0
    return step


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_50_replays_are_as_good_as_50_eager_steps(kind, dtype, record_property):
    """Against the same graph run node by node: other kernels, hence close and not equal."""
    losses = {}
    for backend in ("eager", "inductor"):
        _, _, step = make(backend, kind, dtype=dtype)
        losses[backend] = torch.stack([step(x, y) for x, y in batches(50)])
    assert step.execution == REPLAYED
    error = (losses["eager"] - losses["inductor"]).abs() / losses["eager"]
    record_property("largest relative difference of a loss", f"{float(error.max()):.1e}")
    assert float(error.max()) < 0.02 and float(error[0]) < 2e-3


@pytest.mark.parametrize("accumulate", [1, 2])
def test_replays_equal_the_same_step_without_a_graph(accumulate):
    results = []
    for graphs in (False, True):
        model, _, step = make(accumulate=accumulate)
        step = step if graphs else without_graphs(step)
        losses = [step(x, y) for x, y in batches(24)]
        results.append((losses, weights(model)))
        assert (step.execution == REPLAYED) is graphs
    for first, second in zip(*results, strict=True):
        for a, b in zip(first, second, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_a_replayed_step_never_waits():
    _, optimizer, step = make()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    given = list(batches(WARM_UPS + 20))
    step(*given[0])  # compiles
    with NoWaiting():
        for x, y in given[1:WARM_UPS]:
            step(x, y)
    for x, y in given[WARM_UPS : WARM_UPS + 2]:  # the capture itself waits, once
        step(x, y)
    host = [(x.cpu().pin_memory(), y.cpu().pin_memory()) for x, y in given[-5:]]
    assert step.execution == REPLAYED
    with NoWaiting():
        for number, (x, y) in enumerate(given[WARM_UPS + 2 :]):
            step(x * float("inf") if number == 3 else x, y)
            schedule.step()
            step.gradients(), step.loss_scale, step.skipped_steps, step.grad_norm
        for x, y in host:
            step(x.cuda(non_blocking=True), y.cuda(non_blocking=True))
    assert int(step.skipped_steps) == 1


def test_1000_steps_grow_nothing_and_compile_nothing(record_property):
    _, _, step = make()
    given = list(batches(8))
    for number in range(20):
        step(*given[number % 8])
    compiled = dict(torch._dynamo.utils.counters["inductor"]), len(step._programs)
    torch.cuda.synchronize()
    memory = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for number in range(1000):
        step(*given[number % 8])
    end.record()
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == memory
    assert (dict(torch._dynamo.utils.counters["inductor"]), len(step._programs)) == compiled
    record_property("microseconds per step", f"{start.elapsed_time(end):.0f}")
    assert step.execution == REPLAYED


def test_a_scheduler_reaches_the_graph():
    moved = []
    for rate in (1e-2, 0.0):
        model, optimizer, step = make(kind=torch.optim.SGD)
        given = list(batches(WARM_UPS + 2))
        for x, y in given[:-1]:
            step(x, y)
        assert step.execution == REPLAYED
        before = model.head.weight.detach().clone()
        optimizer.param_groups[0]["lr"] = rate
        step(*given[-1])
        moved.append(float((model.head.weight - before).detach().abs().max()))
    assert moved[0] > 0 and moved[1] == 0


@pytest.mark.parametrize("poison", [float("inf"), float("nan")])
def test_a_poisoned_replay_changes_nothing_but_the_scale(poison):
    model, optimizer, step = make()
    given = list(batches(WARM_UPS + 3))
    for x, y in given[:-2]:
        step(x, y)
    assert step.execution == REPLAYED
    state = [t.clone() for s in optimizer.state.values() for t in s.values()]
    before, scale = weights(model), float(step.loss_scale)
    x, y = given[-2]
    x[3, 1, 2, 2] = poison
    step(x, y)
    after = [t for s in optimizer.state.values() for t in s.values()]
    assert all(torch.equal(a, b) for a, b in zip([*before, *state], [*weights(model), *after], strict=True))
    assert float(step.loss_scale) == scale / 2 and int(step.skipped_steps) == 1
    assert "head.weight" in step.nonfinite_report().parameters
    step(*given[-1])
    assert not torch.equal(before[0], model.conv.weight) and int(step.skipped_steps) == 1


def test_losses_and_aux_are_the_callers_own():
    def with_aux(model, x, y):
        logits = model(x)
        return F.cross_entropy(logits, y), {"logits": logits, "x": x}

    _, _, step = make(loss=with_aux)
    kept = [(step(x, y), x) for x, y in batches(WARM_UPS + 6)]
    copies = [(loss.clone(), aux["logits"].clone()) for (loss, aux), _ in kept]
    for x, y in batches(3, seed=1):
        step(x, y)
    for ((loss, aux), x), (loss_then, logits_then) in zip(kept, copies, strict=True):
        assert torch.equal(loss, loss_then) and torch.equal(aux["logits"], logits_then) and torch.equal(aux["x"], x)
    assert len({float(loss) for (loss, _), _ in kept}) == len(kept)


def test_dropout_draws_anew_in_every_replay():
    _, optimizer, step = make(drop=0.5, kind=torch.optim.SGD)
    optimizer.param_groups[0]["lr"] = 0.0
    ((x, y),) = batches(1)
    losses = [float(step(x, y)) for _ in range(WARM_UPS + 8)]
    assert step.execution == REPLAYED and len(set(losses)) == len(losses)


def test_state_that_moves_is_captured_anew():
    results = []
    for moves in (False, True):
        model, optimizer, step = make()
        for number, (x, y) in enumerate(batches(24)):
            step(x, y)
            if moves and number == 8:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            elif moves and number == 14:
                model.head.weight.data = model.head.weight.detach().clone()
            elif moves and number == 18:
                step.load_state_dict(step.state_dict())
        assert step.execution == REPLAYED
        results.append(weights(model))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_a_resumed_run_goes_on_where_it_was():
    model, optimizer, step = make(drop=0.1)
    given = list(batches(20))
    for x, y in given[:10]:
        step(x, y)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), step.state_dict()))
    random = torch.cuda.get_rng_state()
    straight = [step(x, y) for x, y in given[10:]]
    other, other_optimizer, resumed = make(drop=0.1)
    other.load_state_dict(saved[0]), other_optimizer.load_state_dict(saved[1]), resumed.load_state_dict(saved[2])
    torch.cuda.set_rng_state(random)
    again = [resumed(x, y) for x, y in given[10:]]
    for a, b in zip(straight, again, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    for a, b in zip(weights(model), weights(other), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_two_shapes_have_two_graphs_of_one_pool():
    _, _, step = make()
    _, _, plain = make()
    without_graphs(plain)
    for large, small in zip(batches(12, 32), batches(12, 20, seed=1), strict=True):
        for batch in (large, small):
            torch.testing.assert_close(step(*batch), plain(*batch), rtol=1e-5, atol=1e-6)
            for name, gradient in plain.gradients().items():
                torch.testing.assert_close(step.gradients()[name], gradient, rtol=1e-3, atol=1e-5)
    assert len(step._state.graphs.live) == 2 and step.execution == REPLAYED


def test_what_cannot_be_captured_still_trains():
    def reads_the_host(model, x, y):
        return loss_fn(model, x, y) + torch.rand(4).to(x.device).sum() * 0

    model, _, step = make(loss=reads_the_host)
    before = weights(model)
    for x, y in batches(WARM_UPS + 3):
        loss = step(x, y)
    assert "run without a CUDA graph" in step.execution and torch.isfinite(loss)
    assert not torch.equal(before[0], model.conv.weight)


def test_a_capture_that_fails_leaves_torch_and_the_training_as_they_were():
    model, _, step = make()
    reference, _, plain = make()
    without_graphs(plain)
    given = list(batches(WARM_UPS + 6))
    for number, (x, y) in enumerate(given):
        if number == WARM_UPS:
            run = step._last[0].run
            compiled = run._run

            def waits(*inputs, compiled=compiled):
                outputs = compiled(*inputs)
                if torch.cuda.is_current_stream_capturing():
                    outputs[0].item()
                return outputs

            run._run = waits
        stream = torch.cuda.current_stream()
        step(x, y), plain(x, y)
        assert torch.cuda.current_stream() == stream
    assert "the capture failed" in step.execution
    for a, b in zip(weights(model), weights(reference), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    _, _, later = make()
    for x, y in given:
        later(x, y)
    assert later.execution == REPLAYED


def test_a_stuck_run_ends_by_itself_without_waiting():
    _, _, step = make(loss_scale=DynamicLossScale(2.0, min=1.0))
    given = list(batches(WARM_UPS + 2))
    for x, y in given:
        step(x, y)
    bad = given[0][0] * float("inf")
    with NoWaiting():
        for _ in range(15):
            step(bad, given[0][1])
    with pytest.raises(LossScaleError, match=r"conv\.weight"):
        for _ in range(500):
            step(bad, given[0][1])
            torch.cuda.synchronize()
