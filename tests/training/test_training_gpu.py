"""A training step on a CUDA device: replayed as one CUDA graph, never waiting, as exact as without one."""

import pytest
import torch
import torch.nn.functional as F
from training_gpu import REPLAYED, NoWaiting, batches, make, one_order_of_sums, weights, without_graphs

import amp_compiler as amp
from amp_compiler.backends.cuda_graph import WARM_UPS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(autouse=True)
def in_one_order():
    with one_order_of_sums():
        yield


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
        torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-7)


def test_a_replayed_step_never_waits():
    _, optimizer, step = make()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    inputs = list(batches(WARM_UPS + 20))
    step(*inputs[0])  # compiles
    with NoWaiting():
        for x, y in inputs[1:WARM_UPS]:
            step(x, y)
    for x, y in inputs[WARM_UPS : WARM_UPS + 2]:  # the capture itself waits, once
        step(x, y)
    host = [(x.cpu().pin_memory(), y.cpu().pin_memory()) for x, y in inputs[-5:]]
    assert step.execution == REPLAYED
    with NoWaiting():
        for number, (x, y) in enumerate(inputs[WARM_UPS + 2 :]):
            step(x * float("inf") if number == 3 else x, y)
            schedule.step()
            step.gradients(), step.loss_scale, step.skipped_steps, step.grad_norm
        for x, y in host:
            step(x.cuda(non_blocking=True), y.cuda(non_blocking=True))
    assert int(step.skipped_steps) == 1


def test_callbacks_wait_at_their_steps_alone_and_copy_once(monkeypatch):
    records, copies, plain = [], [], torch.Tensor.cpu

    class Kept(amp.callbacks.Callback):
        def on_step(self, record):
            records.append(record)

    def cpu(tensor):
        copies.append(tensor.shape)
        torch.cuda.set_sync_debug_mode("default")
        try:
            return plain(tensor)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    every = 5
    _, _, step = make(callbacks=[Kept(every), Kept(every)])
    inputs = list(batches(WARM_UPS + 20))
    first = -(-(WARM_UPS + 2) // every) * every  # behind the capture, which waits
    for x, y in inputs[:first]:
        step(x, y)
    assert step.execution == REPLAYED
    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    with NoWaiting():
        for number, (x, y) in enumerate(inputs[first:], first + 1):
            step(x, y)
            assert len(copies) == (number - first) // every  # one for both
    assert len(copies) >= 2 and [one.step for one in records[::2]] == list(range(every, len(inputs) + 1, every))
    assert records[-1].memory > 0 and records[-1].grad_norm > 0


def test_1000_steps_grow_nothing_and_compile_nothing(record_property):
    _, _, step = make()
    inputs = list(batches(8))
    for number in range(20):
        step(*inputs[number % 8])
    compiled = dict(torch._dynamo.utils.counters["inductor"]), len(step._choice.programs)
    torch.cuda.synchronize()
    memory = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for number in range(1000):
        step(*inputs[number % 8])
    end.record()
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == memory
    assert (dict(torch._dynamo.utils.counters["inductor"]), len(step._choice.programs)) == compiled
    record_property("microseconds per step", f"{start.elapsed_time(end):.0f}")
    assert step.execution == REPLAYED


def test_a_scheduler_reaches_the_graph():
    moved = []
    for rate in (1e-2, 0.0):
        model, optimizer, step = make(kind=torch.optim.SGD)
        inputs = list(batches(WARM_UPS + 2))
        for x, y in inputs[:-1]:
            step(x, y)
        assert step.execution == REPLAYED
        before = model.head.weight.detach().clone()
        optimizer.param_groups[0]["lr"] = rate
        step(*inputs[-1])
        moved.append(float((model.head.weight - before).detach().abs().max()))
    assert moved[0] > 0 and moved[1] == 0


@pytest.mark.parametrize("poison", [float("inf"), float("nan")])
def test_a_poisoned_replay_changes_nothing_but_the_scale(poison):
    model, optimizer, step = make()
    inputs = list(batches(WARM_UPS + 3))
    for x, y in inputs[:-2]:
        step(x, y)
    assert step.execution == REPLAYED
    state = [t.clone() for s in optimizer.state.values() for t in s.values()]
    before, scale = weights(model), float(step.loss_scale)
    x, y = inputs[-2]
    x[3, 1, 2, 2] = poison
    step(x, y)
    after = [t for s in optimizer.state.values() for t in s.values()]
    assert all(torch.equal(a, b) for a, b in zip([*before, *state], [*weights(model), *after], strict=True))
    assert float(step.loss_scale) == scale / 2 and int(step.skipped_steps) == 1
    assert "head.weight" in step.nonfinite_report().parameters
    step(*inputs[-1])
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
