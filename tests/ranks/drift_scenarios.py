"""Scenarios in which one rank alone sets what all of them must have alike; see `rank_harness`."""

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from rank_harness import (
    Place,
    adamw,
    dense,
    error_of,
    rows,
    same_everywhere,
    scenario,
    sgd,
    squares,
    step_of,
    weights_of,
)
from torch import Tensor, nn

import amp_compiler as amp
from amp_compiler.ops.loss_scale import DynamicLossScale


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


Change = Callable[[nn.Module, torch.optim.Optimizer, amp.TrainingStep], object]


def _set(name: str, value: Any) -> Change:
    return lambda model, optimizer, step: optimizer.param_groups[0].__setitem__(name, value)


def _scale(value: float) -> Change:
    return lambda model, optimizer, step: setattr(step, "loss_scale", value)


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


def _state(model: nn.Module, optimizer: torch.optim.Optimizer, step: amp.TrainingStep) -> None:
    optimizer.state[next(model.parameters())]["exp_avg"].mul_(2)


STOCHASTIC = {"version": 1, "extends": "default", "weights": {"master": "low", "rounding": "stochastic"}}
FP16, BF16 = {"dtype": "fp16", "loss_scale": 1024.0}, {"dtype": "bf16"}
CHANGES: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Any], Change]] = {
    "static scale": (dense, sgd, FP16, _scale(64)),
    "dynamic scale": (dense, sgd, {"dtype": "fp16", "loss_scale": "dynamic"}, _scale(64)),
    "rate": (dense, sgd, BF16, _set("lr", 0.5)),
    "betas": (dense, adamw, BF16, _set("betas", (0.5, 0.9))),
    "rate in a tensor": (dense, _lr_tensor, BF16, lambda m, optimizer, s: optimizer.param_groups[0]["lr"].fill_(0.5)),
    "frozen": (dense, sgd, BF16, lambda model, optimizer, step: next(model.parameters()).requires_grad_(False)),
    "groups": (dense, _two_groups, BF16, _regrouped),
    "permuted": (dense, sgd, BF16, _permuted),
    "rounding": (dense, sgd, {**BF16, "rules": STOCHASTIC}, _rounding),
    "buffer": (Counting, sgd, BF16, lambda model, optimizer, step: model.table.mul_(2)),
    "state": (dense, adamw, BF16, _state),
}


@scenario
def set_on_one_rank(place: Place) -> dict[str, Any]:
    """Behind two calls the second rank alone changes something; what each is told, and where it stays."""
    result: dict[str, Any] = {}
    x, y = map(place.part, rows(1)[0])
    for name, (make, optimize, options, change) in CHANGES.items():
        torch.manual_seed(0)
        model = make()
        optimizer = optimize(model.parameters())
        step = step_of(place, model, optimizer, **options)
        step(x, y), step(x, y)
        before = weights_of(model)
        if place.rank == 1:
            change(model, optimizer, step)
            before = weights_of(model)
        result[name] = {"told": [error_of(lambda: step(x, y)) for _ in range(2)]}  # noqa: B023  # called at once
        result[name] |= {"weights": weights_of(model), "before": before}
    return result


@scenario
def written_past_the_counters(place: Place) -> dict[str, list[str]]:
    """The second rank alone writes behind three calls what no version counter tells of, and all go on for five more."""
    result: dict[str, list[str]] = {}
    x, y = map(place.part, rows(1)[0])
    for name, optimize, write in (
        ("norm", sgd, lambda model, state: model[1].weight.data.mul_(2)),
        ("moment", adamw, lambda model, state: state[model[1].weight]["exp_avg"].data.add_(1)),
        ("nothing", adamw, lambda model, state: None),
    ):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4))
        optimizer = optimize(model.parameters())
        step = step_of(place, model, optimizer, **BF16)
        step(x, y), step(x, y), step(x, y)
        if place.rank == 1:
            write(model, optimizer.state)
        result[name] = [error_of(lambda: step(x, y)) for _ in range(5)]  # noqa: B023  # called at once
    return result


@scenario
def set_again(place: Place) -> dict[str, Any]:
    """A loss scale that ranks set before every call, otherwise from the third on; then alike again."""
    x, y = map(place.part, rows(1)[0])
    model = dense()
    step = step_of(place, model, **FP16)
    step(x, y)
    told_of = []
    for number in range(6):
        step.loss_scale = 2.0 ** (number + place.rank * (2 <= number < 4))
        told_of.append(error_of(lambda: step(x, y)))
    return {"told": told_of, "same": same_everywhere(step, model)}


@scenario
def one_scale_of_two_steps(place: Place) -> dict[str, Any]:
    """The second rank sets it on one of them, and all go on with the other."""
    x, y = map(place.part, rows(1)[0])
    scale = DynamicLossScale(1024.0)
    first, second = (step_of(place, dense(), dtype="fp16", loss_scale=scale) for _ in range(2))
    first(x, y), second(x, y)
    if place.rank == 1:
        first.loss_scale = 64
    return {"told": error_of(lambda: second(x, y))}


@scenario
def buffers_of_each_rank(place: Place) -> dict[str, Any]:
    """The first rank alone runs the model, which writes a buffer that steps write; then each has its own buffers."""
    x, y = map(place.part, rows(1)[0])
    model = Counting()
    step = step_of(place, model, **BF16)
    step(x, y)
    if place.rank == 0:
        model(x)
    result = {"told": error_of(lambda: step(x, y)), "same": same_everywhere(step, model)}
    own = Counting()
    step = step_of(place, own, **BF16, broadcast_buffers=False)
    step(x, y)
    own.table.mul_(place.rank + 1)
    return result | {"told of its own": error_of(lambda: step(x, y)), "weights": [p.detach() for p in own.parameters()]}


# What is read off a step, beside DistributedDataParallel, GradScaler and clip_grad_norm_.

UNCHECKED = {"version": 1, "extends": "default", "loss_scale": {"mode": "none", "check_finite": False}}
SCALES: dict[str, dict[str, Any]] = {
    "fp16 dynamic": {"dtype": "fp16", "loss_scale": "dynamic"},
    "fp16 static": {"dtype": "fp16", "loss_scale": 1024.0},
    "bf16": {"dtype": "bf16", "loss_scale": None},
    "bf16 unchecked": {"dtype": "bf16", "rules": UNCHECKED},
}
Read = tuple[str, float | None, int, bool]
READ: tuple[Read, ...] = (
    ("fp16 dynamic", None, 1, False),
    ("fp16 dynamic", 0.1, 2, True),
    ("fp16 static", 0.1, 1, False),
    ("bf16", None, 2, False),
    ("bf16 unchecked", None, 1, False),
    ("bf16 unchecked", None, 2, True),
)
UPDATES = 3


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def _batches(place: Place, scale: str, accumulate: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Of so many updates; at the second one, the last batch overflows on the second rank in FP16."""
    for number, (x, y) in enumerate(rows(UPDATES * accumulate)):
        x, y = place.part(x), place.part(y)
        overflows = scale.startswith("fp16") and place.rank == 1 and number == 2 * accumulate - 1
        yield (number + 1) % accumulate, x, y * (1e6 if overflows else 1)


@scenario
def readings(place: Place) -> dict[str, Any]:
    """Every reading behind every call, and what torch gives in its place."""
    return {"read": [(_ours(place, *one), _theirs(place, *one)) for one in READ]}


def _ours(place: Place, scale: str, clip: float | None, accumulate: int, split: bool) -> dict[str, Any]:
    options = {"rules": {"version": 1, "extends": "default"}, **SCALES[scale]}
    if split:
        options["rules"] = {**options["rules"], "reduce": {"shard": "update"}}
    model, path = _net(), place.folder / f"{scale} {clip} {accumulate} {split}.jsonl"
    path.unlink(missing_ok=True)
    dist.barrier(place.group)
    log = [amp.callbacks.JSONLines(path)]
    step = step_of(place, model, clip_norm=clip, accumulate=accumulate, callbacks=log, **options)
    result = []
    for gathers, x, y in _batches(place, scale, accumulate):
        loss = float(step(x, y))
        report = () if gathers else step.nonfinite_report(cure=False).parameters
        result.append({
            "loss": loss, "norm": float(step.grad_norm), "skipped": int(step.skipped_steps),
            "scale": float(step.loss_scale), "bad": sorted(report), "updated": not gathers,
        })  # fmt: skip
    lines = [json.loads(line) for line in path.read_text().splitlines()] if place.rank == 0 else []
    return {"read": result, "log": lines, "events": step.nonfinite_events()}


def _theirs(place: Place, scale: str, clip: float | None, accumulate: int, split: bool) -> list[dict[str, Any]]:
    options = SCALES[scale]
    dtype = torch.float16 if options["dtype"] == "fp16" else torch.bfloat16
    ddp = nn.parallel.DistributedDataParallel(_net(), process_group=place.group)
    optimizer, inputs = sgd(ddp.parameters()), options.get("loss_scale")
    fixed = inputs if isinstance(inputs, float) else None
    scaler = torch.amp.GradScaler("cpu", fixed or 2.0**16, enabled=inputs is not None)
    result, skipped = [], 0
    for gathers, x, y in _batches(place, scale, accumulate):
        ddp.require_backward_grad_sync = not gathers
        with torch.autocast("cpu", dtype):
            loss = squares(ddp, x, y)
        scaler.scale(loss / accumulate).backward()
        now = float(scaler.get_scale())
        if gathers:
            norm = nn.utils.get_total_norm([p.grad for p in ddp.parameters()]) / now
            bad = []
        else:
            scaler.unscale_(optimizer)
            bad = sorted(name for name, p in ddp.module.named_parameters() if not p.grad.isfinite().all())
            norm = nn.utils.clip_grad_norm_(ddp.parameters(), math.inf if clip is None else clip)
            scaler.step(optimizer)
            scaler.update(fixed)
            skipped += bool(bad)
            optimizer.zero_grad()
        result.append({
            "loss": float(loss.detach()), "norm": float(norm), "skipped": skipped, "scale": float(scaler.get_scale()),
            "bad": bad, "updated": not gathers,
        })  # fmt: skip
    return result
