"""Scenarios in which one rank alone sets what all of them must have alike; see `rank_harness`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from rank_harness import Place, adamw, dense, rows, scenario, sgd, squares, told, weights_of
from torch import Tensor, nn

import amp_compiler as amp


class Counting(nn.Module):
    """A layer with a table that it reads, and a number of calls that it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)
        self.register_buffer("table", torch.ones(4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.inner(x) * self.table


def _lr_tensor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, torch.tensor(1e-2))


def _two_groups(parameters: Any) -> torch.optim.Optimizer:
    first, *others = parameters
    return torch.optim.SGD([{"params": [first], "lr": 0.5}, {"params": others}], 0.05)


def _two_rates(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.05)


Change = Callable[[nn.Module, torch.optim.Optimizer, amp.TrainingStep], object]


def _set(name: str, value: Any) -> Change:
    return lambda model, optimizer, step: optimizer.param_groups[0].__setitem__(name, value)


def _scale(value: float) -> Change:
    return lambda model, optimizer, step: setattr(step, "loss_scale", value)


def _frozen(model: nn.Module, optimizer: torch.optim.Optimizer, step: amp.TrainingStep) -> None:
    next(model.parameters()).requires_grad_(False)


def _regrouped(model: nn.Module, optimizer: torch.optim.Optimizer, step: amp.TrainingStep) -> None:
    first, second = optimizer.param_groups
    second["params"].append(first["params"].pop())


def _permuted(model: nn.Module, optimizer: torch.optim.Optimizer, step: amp.TrainingStep) -> None:
    weight = next(model.parameters())
    with torch.no_grad():
        weight.copy_(weight.flip(0))


def _rounding(model: nn.Module, optimizer: torch.optim.Optimizer, step: amp.TrainingStep) -> None:
    state = step.state_dict()
    state["amp_compiler"]["rounding"] = [1, 2]
    step.load_state_dict(state)


def _table(model: nn.Module, optimizer: torch.optim.Optimizer, step: amp.TrainingStep) -> None:
    model.table.mul_(2)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer, step: amp.TrainingStep) -> None:
    optimizer.state[next(model.parameters())]["exp_avg"].mul_(2)


STOCHASTIC = {"version": 1, "extends": "default", "weights": {"master": "low", "rounding": "stochastic"}}
FP16, BF16 = {"dtype": "fp16", "loss_scale": 1024.0}, {"dtype": "bf16"}
CHANGES: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Any], Change]] = {
    "static scale": (dense, sgd, FP16, _scale(64)),
    "dynamic scale": (dense, sgd, {"dtype": "fp16", "loss_scale": "dynamic"}, _scale(64)),
    "rate": (dense, sgd, BF16, _set("lr", 0.5)),
    "betas": (dense, adamw, BF16, _set("betas", (0.5, 0.9))),
    "decay": (dense, adamw, BF16, _set("weight_decay", 0.5)),
    "rate in a tensor": (dense, _lr_tensor, BF16, lambda m, optimizer, s: optimizer.param_groups[0]["lr"].fill_(0.5)),
    "another tensor": (dense, _lr_tensor, BF16, _set("lr", torch.tensor(0.5))),
    "frozen": (dense, sgd, BF16, _frozen),
    "groups": (dense, _two_groups, BF16, _regrouped),
    "permuted": (dense, sgd, BF16, _permuted),
    "rounding": (dense, sgd, {**BF16, "rules": STOCHASTIC}, _rounding),
    "buffer": (Counting, sgd, BF16, _table),
    "state": (dense, adamw, BF16, _state),
}


@scenario
def set_on_one_rank(place: Place) -> dict[str, Any]:
    """Behind two calls the second rank alone changes something; what each is told, and where it stays."""
    found: dict[str, Any] = {}
    x, y = map(place.part, rows(1)[0])
    for name, (make, optimize, options, change) in CHANGES.items():
        torch.manual_seed(0)
        model = make()
        optimizer = optimize(model.parameters())
        step = amp.training_step(model, squares, optimizer, backend="eager", process_group=place.group, **options)
        step(x, y), step(x, y)
        before = weights_of(model)
        if place.rank == 1:
            change(model, optimizer, step)
            before = weights_of(model)
        found[name] = {"told": [told(lambda: step(x, y)) for _ in range(2)]}  # noqa: B023  # called at once
        found[name] |= {"weights": weights_of(model), "before": before}
    return found
