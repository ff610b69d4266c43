"""`training_step(callbacks=…)`: what callbacks are told, and that steps between are not read from."""

import copy
from contextlib import nullcontext
from typing import Any

import numpy as np
import own_memory
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from toys import eager_step, small

import amp_compiler as amp
from amp_compiler.ops import exponents
from amp_compiler.training.reporting import log


class Kept(amp.callbacks.Callback):
    """Keeps what it is told."""

    def __init__(self, every: int = 1) -> None:
        super().__init__(every)
        self.records: list[amp.callbacks.StepRecord] = []

    def on_step(self, record: amp.callbacks.StepRecord) -> None:
        self.records.append(record)


class Dispatched(TorchDispatchMode):
    """Names of all operators that are called, and how many are copies from one device to another."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    result = model(x)  # no float holds `huge`
    return F.cross_entropy(result, y), {
        "right": (result.argmax(-1) == y).float().mean(),
        "made": result,
        "huge": 10**400,
        "n": 3,
    }


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(16, 8, generator=generator), torch.randint(0, 4, (16,), generator=generator)) for _ in range(count)
    ]


def step_of(model: nn.Module, *callbacks: amp.callbacks.Callback, **options: Any) -> amp.TrainingStep:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    return eager_step(model, loss_fn, optimizer, callbacks=callbacks, **{"dtype": "fp16", **options})


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_record_holds_what_the_step_can_be_asked(backend: str) -> None:
    kept = Kept()
    scale = 2.0**-14  # at which gradients become subnormal numbers and zeros of FP16
    step = step_of(small(), kept, backend=backend, loss_scale=scale)
    for number, batch in enumerate(batches(4), 1):
        loss, aux = step(*batch)
        record = kept.records[-1]
        assert (record.step, record.dtype, record.skipped_steps) == (number, "fp16", 0)
        assert record.loss == float(loss) and record.aux == {"right": float(aux["right"]), "n": 3.0}
        assert record.loss_scale == scale and record.grad_norm == float(step.grad_norm)
        scaled = torch.cat([scale * one.reshape(-1) for one in step.gradients().values()]).double().abs().numpy()
        assert record.zero == (scaled < 2.0**-25).mean() > 0 and record.infinite == 0
        assert record.subnormal == ((scaled >= 2.0**-25) & (scaled < 2.0**-14)).mean() > 0
    assert [one.milliseconds is None for one in kept.records] == [True, False, False, False]
    assert kept.records[-1].memory is not None and kept.records[-1].memory > 1 << 20


def test_steps_between_records_do_what_they_do_without_callbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one operator more, so that nothing waits for a GPU; a step that is told makes one copy to the host."""
    copies: list[str] = []
    monkeypatch.setattr(exponents, "_looks", lambda part: False)  # as on a GPU
    for name in ("cpu", "item", "tolist", "numpy", "__bool__", "__float__", "__int__"):
        plain = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda self, *args, name=name, plain=plain: (copies.append(name), plain(self, *args))[1]
        )
    seen: dict[bool, list[tuple[list[str], list[str]]]] = {True: [], False: []}
    for watched in (False, True):
        step = step_of(small(), *([Kept(every=3), Kept(every=3)] if watched else []))
        for batch in batches(6):
            copies.clear()
            with Dispatched() as mode:
                step(*batch)
            seen[watched].append((mode.names, list(copies)))
    for number, (plain, watched) in enumerate(zip(seen[False], seen[True], strict=True), 1):
        if number % 3:
            assert watched == plain, number
            continue
        assert len(watched[0]) > len(plain[0])
        assert len({one[0].count("aten._local_scalar_dense.default") for one in (plain, watched)}) == 1
        more = list(watched[1])
        for name in plain[1]:
            more.remove(name)
        assert more == ["cpu", "tolist"], number  # `tolist` of what is on the host by then


def test_a_skipped_step_is_told() -> None:
    kept = Kept()
    step = step_of(small(), kept)
    good, bad, last = batches(3)
    bad[0][0, 0] = torch.inf
    for batch in (good, bad, last):
        step(*batch)
    assert [record.skipped_steps for record in kept.records] == [0, 1, 1]
    assert [record.loss_scale for record in kept.records] == [65536.0, 65536.0, 32768.0]
    assert kept.records[1].infinite > 0 and not np.isfinite(kept.records[1].loss)


def test_gathered_batches_are_one_step_with_their_mean_loss() -> None:
    """And each callback is told its own steps; a flush is one too."""
    kept, often = Kept(every=2), Kept()
    step = step_of(small(), kept, often, accumulate=2, loss_scale=4.0)
    losses = [float(step(*batch)[0]) for batch in batches(9)]
    step.flush()
    assert [record.step for record in kept.records] == [2, 4] and len(often.records) == 5
    assert kept.records[-1] is often.records[3]  # read once
    means = [sum(losses[first : first + 2]) / 2 for first in (0, 2, 4, 6)]
    assert [record.loss for record in often.records] == pytest.approx([*means, losses[8]])


def test_a_resumed_training_goes_on_counting() -> None:
    model, kept = small(), Kept()
    step = step_of(model, kept)
    for batch in batches(3):
        step(*batch)
    state = copy.deepcopy(step.state_dict())
    torch.amp.GradScaler("cpu").load_state_dict(state)
    resumed, plain = step_of(model, kept), step_of(model)
    resumed.load_state_dict(state)
    plain.load_state_dict(state)  # it counts nothing
    resumed(*batches(1)[0])
    assert [record.step for record in kept.records] == [1, 2, 3, 4]
    assert "steps" in state["amp_compiler"] and "steps" not in plain.state_dict()["amp_compiler"]
    with pytest.raises(amp.AmpError, match="number of steps is -1"):
        resumed.load_state_dict({**state, "amp_compiler": {**state["amp_compiler"], "steps": -1}})


def test_a_step_in_subgraphs_tells_its_callbacks() -> None:
    def branching(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        result = model(x)
        return F.cross_entropy(result if result.sum() > -1e9 else -result, y)

    model, kept = small(), Kept()
    step = eager_step(model, branching, callbacks=[kept])
    losses = [float(step(*batch)) for batch in batches(2)]
    assert "subgraph" in step.execution
    assert [record.loss for record in kept.records] == losses
    assert kept.records[-1].grad_norm == float(step.grad_norm) and kept.records[-1].dtype == "bf16"


def test_what_a_callback_raises_comes_out_behind_the_update() -> None:
    """And callbacks change no number; in plain FP32, which is watched too."""

    class Stop(amp.callbacks.Callback):
        def on_step(self, record: amp.callbacks.StepRecord) -> None:
            if record.step == 2:
                raise KeyboardInterrupt

    kept = Kept()
    step, plain = step_of(small(), Stop(), kept, enabled=False), step_of(small(), enabled=False)
    for number, batch in enumerate(batches(3), 1):
        with pytest.raises(KeyboardInterrupt) if number == 2 else nullcontext():
            step(*batch)
        plain(*batch)
    assert [(record.step, record.loss_scale, record.dtype) for record in kept.records] == [
        (1, 1.0, "fp16"),
        (3, 1.0, "fp16"),
    ]
    assert all(map(torch.equal, step.model.parameters(), plain.model.parameters()))


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        (lambda: Kept(), "callbacks is a Kept; pass a list"),
        (lambda: "run.jsonl", "callbacks is a str"),
        (lambda: [Kept], "callbacks holds Kept, which is no amp.callbacks.Callback"),
        (lambda: [Kept(every=0)], "every="),
        (lambda: [Kept(every=2.0)], "every="),
        (lambda: [Kept(every=True)], "every="),
    ],
)
def test_what_is_no_callback_is_refused(callbacks: Any, message: str) -> None:
    with pytest.raises(amp.AmpError, match=message):
        eager_step(small(), loss_fn, callbacks=callbacks())


def test_the_memory_is_what_the_process_itself_has_held():
    message, held = log._memory(torch.device("cpu")), own_memory.peak()
    assert held - (16 << 20) <= message <= held
