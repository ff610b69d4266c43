"""A value that is not finite, wherever it stands, leaves weights, moments, counters, buffers and copies untouched."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from toys import eager_step

import amp_compiler as amp

GENERATOR = torch.Generator().manual_seed(0)
TOKENS = torch.randint(0, 11, (32,), generator=GENERATOR)
Y = torch.randint(0, 5, (32,), generator=GENERATOR)
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.1),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.a = nn.Embedding(11, 8), nn.Linear(8, 16, bias=False)
        self.batch_norm, self.b = nn.BatchNorm1d(16), nn.Linear(16, 16)
        self.layer_norm, self.head = nn.LayerNorm(16), nn.Linear(16, 5)
        self.side = nn.Linear(2, 3, bias=False)
        nn.init.constant_(self.side.weight, 0.01)


def steep(value, gap):
    """The root of the gap, 0 at 0, where its derivative by the value is infinite."""
    return (value - value.detach() + gap).sqrt().mean()


def loss_fn(model, batch, y):
    rows = model.embedding(batch["tokens"])
    hidden = F.relu(model.batch_norm(model.a(rows)))
    loss = F.cross_entropy(model.head(model.layer_norm(model.b(hidden))), y)
    loss = loss + model.side(batch["side"]).mean()
    loss = loss + steep(rows, batch["rows"]) + steep(model.head.bias, batch["bias"])
    loss = loss + steep(model.layer_norm.weight, batch["layer_norm"])
    return (loss + steep(model.batch_norm.weight, batch["batch_norm"])) * batch["gain"]


def batch(**changed):
    numbers = dict.fromkeys(("rows", "bias", "layer_norm", "batch_norm", "gain"), 1.0) | {"side": 1.0} | changed
    side = torch.full((32, 2), numbers.pop("side"))
    return {"tokens": TOKENS, "side": side, **{key: torch.tensor(number) for key, number in numbers.items()}}


ALL = None  # the gradients of all parameters, or nearly all
# What is poisoned, and the parameters with a gradient that is not finite. The loss is finite in all but the last two.
PLACES = {
    "a bias": (batch(bias=0.0), {"head.bias"}),
    "a LayerNorm's weight": (batch(layer_norm=0.0), {"layer_norm.weight"}),
    "a BatchNorm's weight": (batch(batch_norm=0.0), {"batch_norm.weight"}),
    "an embedding": (batch(rows=0.0), {"embedding.weight"}),
    "a 16-bit matrix": (batch(side=3e4), {"side.weight"}),  # 32 * 3e4 * 1024 / 96 is not a number of FP16
    "the backward": (batch(gain=1e30), ALL),  # 1e30 is one of FP32, as is the loss, but none of FP16
    "a loss of inf": (batch(gain=float("inf")), ALL),
    "a loss of NaN": (batch(gain=float("nan")), ALL),
}


def running(name, accumulate=1):
    """Model, optimizer and a step behind two updates."""
    torch.manual_seed(0)
    model = Net()
    optimizer = OPTIMIZERS[name](model.parameters())
    step = eager_step(model, loss_fn, optimizer, dtype="fp16", loss_scale=1024.0, accumulate=accumulate)
    for _ in range(2 * accumulate):
        step(batch(), Y)
    return model, optimizer, step


def trained(model, optimizer, step):
    """Parameters, moments, step counters and 16-bit copies, by name."""
    held = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        held |= {f"{name}, {key}": value.clone() for key, value in optimizer.state[parameter].items()}
        copies = step._state.low_weights._copies.get(id(parameter), {})
        held |= {f"{name}, {dtype}": copy.clone() for dtype, copy in copies.items()}
    return held


def buffers(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def changed(before, after):
    assert before.keys() == after.keys()
    return {name for name, value in before.items() if not torch.equal(value, after[name])}


def test_a_step_with_one_value_that_is_not_finite_changes_nothing():
    model, optimizer, step = running("adamw")
    for place, (poisoned, bad) in PLACES.items():
        step(batch(), Y)
        skipped = int(step.skipped_steps)
        before, statistics = trained(model, optimizer, step), buffers(model)
        assert sum("float16" in key for key in before) >= 5 and len(statistics) == 3
        loss = step(poisoned, Y)
        assert not changed(before, trained(model, optimizer, step)), place
        assert not changed(statistics, buffers(model)), place
        assert int(step.skipped_steps) == skipped + 1 and bool(loss.isfinite()) == ("a loss" not in place), place
        result = set(step.nonfinite_events()[-1].parameters)
        assert result == bad if bad else len(result) > 5, place
        step(batch(), Y)
        assert int(step.skipped_steps) == skipped + 1
        assert changed(before, trained(model, optimizer, step)) == set(before)
        assert changed(statistics, buffers(model)) == set(statistics)


@pytest.mark.parametrize(("steps", "moved"), [(1, []), (2, ["a"])])
def test_gradients_of_one_optimizer_overflow(steps, moved):
    """In one step all optimizers are skipped; of two steps with one scale that one alone, as by `GradScaler`."""
    nets, gains = nn.ModuleDict({name: nn.Linear(2, 1) for name in "ab"}), {"a": 1.0, "b": float("inf")}
    before, scale = {name: net.weight.clone() for name, net in nets.items()}, amp.DynamicLossScale(init_scale=2.0)
    for names in ("ab",) if steps == 1 else "ab":
        step = eager_step(
            nn.ModuleDict({name: nets[name] for name in names}),
            lambda nets, gains: sum((nets[name](torch.ones(1, 2)) * gains[name]).sum() for name in nets),
            {name: torch.optim.SGD(nets[name].parameters(), 0.1) for name in names},
            dtype="fp16",
            loss_scale=scale,
        )
        step({name: torch.tensor(gains[name]) for name in names})
    assert [name for name, net in nets.items() if not torch.equal(net.weight, before[name])] == moved


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_bad_middle_batch_of_three_skips_them_all_and_only_the_buffers_of_the_first_move(name):
    model, optimizer, step = running(name, accumulate=3)
    for place in ("an embedding", "the backward", "a loss of NaN"):
        skipped = int(step.skipped_steps)
        before, statistics = trained(model, optimizer, step), buffers(model)
        step(batch(), Y)
        first = buffers(model)
        assert changed(statistics, first) == set(statistics)
        step(PLACES[place][0], Y), step(batch(), Y)
        assert not changed(before, trained(model, optimizer, step)), place
        # The gradients' sum is checked, so that the third batch, good by itself, is part of what is skipped.
        assert not changed(first, buffers(model)) and int(step.skipped_steps) == skipped + 1, place
        for _ in range(3):
            step(batch(), Y)
        assert int(step.skipped_steps) == skipped + 1
        assert changed(before, trained(model, optimizer, step)) == set(before)
        assert changed(first, buffers(model)) == set(first)
