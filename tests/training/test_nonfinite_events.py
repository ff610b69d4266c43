"""`step.nonfinite_events()`: the last steps that were skipped."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from toys import eager_step

import amp_compiler as amp
from amp_compiler.ops.loss_scale import DynamicLossScale
from amp_compiler.training.reporting.events import MOST, Events, NonfiniteEvent, Places


def make(**options) -> amp.TrainingStep:
    model = nn.ModuleDict({"one": nn.Linear(4, 2), "two": nn.Linear(4, 2)})
    return eager_step(
        model,
        lambda model, x, y: (model["one"](x) + model["two"](y)).square().mean(),
        torch.optim.SGD(model.parameters(), 1e-3),
        dtype="fp16",
        **options,
    )


GOOD = torch.linspace(-1, 1, 12).view(3, 4)
BAD = GOOD.clone()
BAD[0, 0] = float("nan")


def test_skipped_steps_are_kept_with_their_number_their_scale_and_their_parameters():
    step = make(loss_scale=DynamicLossScale(init_scale=8.0))
    for x in (GOOD, BAD, GOOD, GOOD, BAD):
        step(x, GOOD)
    everything = ("one.weight", "one.bias", "two.weight", "two.bias")
    assert step.nonfinite_events() == (NonfiniteEvent(2, 8.0, everything), NonfiniteEvent(5, 4.0, everything))


@pytest.mark.parametrize("looks", [True, False])
def test_only_the_last_ones_are_kept(looks):
    step = make(loss_scale=2.0)
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
    run = events.watched(step, ("a", "b", "c"), Places(flags=0, skipped=1, scale=2.0))
    run(torch.tensor([0, 1, 1], dtype=torch.uint8), torch.tensor(0))
    assert events.read() == (NonfiniteEvent(1, 2.0, ("b", "c")),)


def test_of_gathered_batches_the_update_is_named():
    step = make(loss_scale=8.0, accumulate=2)
    for x in (GOOD, GOOD, BAD, GOOD, GOOD, GOOD):
        step(x, GOOD)
    assert [event.step for event in step.nonfinite_events()] == [2]


def test_a_run_that_is_resumed_goes_on_counting():
    class Nothing(amp.callbacks.Callback):
        def on_step(self, record):
            pass

    before, after = make(loss_scale=2.0, callbacks=[Nothing(100)]), make(loss_scale=2.0, callbacks=[Nothing(100)])
    before(GOOD, GOOD), before(GOOD, GOOD)
    after.load_state_dict(before.state_dict())
    after(BAD, GOOD)
    assert [event.step for event in after.nonfinite_events()] == [3]
