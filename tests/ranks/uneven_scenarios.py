"""Scenarios in which ranks have batches of other numbers of samples; see `rank_harness`, which runs them."""

from typing import Any

import torch
from rank_harness import (
    Place,
    adagrad,
    dense,
    error_of,
    rows,
    rules,
    same_everywhere,
    scenario,
    sgd,
    squares,
    step_of,
    weights_of,
)
from torch import Tensor, nn
from training_scenarios import Forked

import amp_compiler as amp

COUNTS = (2, 6), (6, 2), (3, 5), (2, 6), (5, 3), (4, 4)  # rows of each rank; a SyncBatchNorm takes no single one


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))


def branching(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """No one graph."""
    return squares(model, x, y) * (1 if bool(x[0, 0] == x[0, 0]) else 2)


FP32: dict[str, Any] = {"enabled": False}
FP16: dict[str, Any] = {"dtype": "fp16", "loss_scale": 1024.0, "accumulate": 2}
SPLIT = rules(shard="update")
UNEVEN: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "accumulated": (dense, squares, adagrad, {**FP32, "accumulate": 2, "clip_norm": 0.5}),
    "subgraphs": (dense, branching, sgd, {**FP32, "accumulate": 3}),
    "norms": (normed, squares, sgd, FP32),
    "split": (dense, squares, sgd, {**FP16, "rules": SPLIT, "clip_norm": 0.5}),
}


@scenario
def uneven_batches(place: Place) -> dict[str, Any]:
    """Weights of ranks, of one process on all rows at once, and of one that takes the mean of the ranks' means."""
    return {name: _trained(place, *case) for name, case in UNEVEN.items()}


def _trained(place: Place, make: Any, loss: Any, optimize: Any, options: dict[str, Any]) -> dict[str, Any]:
    gathered, result = options.get("accumulate", 1), dict[str, Any]()

    def built(group: Any, synchronized: bool = False, **changed: Any) -> tuple[nn.Module, amp.TrainingStep]:
        torch.manual_seed(0)
        model = make()
        if synchronized:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model, group)
        return model, step_of(place, model, optimize, loss, **{**options, "process_group": group, **changed})

    model, step = built(place.group, synchronized=True, uneven="weight")
    jointly, one = built(place.alone, accumulate=1, enabled=False)
    means, other = built(place.alone, accumulate=2 * gathered, enabled=False)
    norms, joined = [], list[tuple[Tensor, ...]]()
    for counts, batch in zip(COUNTS, rows(len(COUNTS)), strict=True):
        parts = [tensor.split(counts) for tensor in batch]
        step(*(part[place.rank] for part in parts))
        for part in zip(*parts, strict=True):
            other(*part)
        joined.append(batch)
        if len(joined) == gathered:
            one(*map(torch.cat, zip(*joined, strict=True)))
            joined.clear()
            norms.append((float(step.grad_norm), float(one.grad_norm)))
    result |= {"same": same_everywhere(step, model), "norms": norms, "by": step.execution}
    result["weights"], result["jointly"], result["means"] = (
        [p.detach().float().clone() for p in net.parameters()] for net in (model, jointly, means)
    )
    return result


@scenario
def uneven_batches_refused(place: Place) -> dict[str, Any]:
    """Batches of which the second rank cannot say how many samples they have; behind each error all go on."""
    x, y = map(place.part, rows(1)[0])
    odd, model = place.rank == 1, dense()

    def built(uneven: str) -> amp.TrainingStep:
        return step_of(place, model, dtype="bf16", uneven=uneven)

    step = built("weight")
    result = {
        "rows": error_of(lambda: step(x, y[:3] if odd else y)),
        "none": error_of(lambda: step(x[:0], y[:0]) if odd else step(x, y)),
        "shape": error_of(lambda: step(x, y[:, :1] if odd else y)),
        "fine": error_of(lambda: step(x[: 3 if odd else 4], y[: 3 if odd else 4])),
        "options": error_of(lambda: built("weight" if odd else "refuse")),
        "word": error_of(lambda: built("mean")),
    }
    return {"told": result, "same": same_everywhere(step, model)}


FLUSHED: dict[str, tuple[Any, dict[str, Any]]] = {
    "fp32": (squares, {**FP32, "clip_norm": 0.5}),
    "subgraphs": (branching, {"dtype": "bf16"}),
    "split": (squares, {"dtype": "fp16", "loss_scale": 1024.0, "rules": SPLIT}),
}


@scenario
def flushed(place: Place) -> dict[str, Any]:
    """Two batches behind a whole round of three, which a flush uses; and steps that gather three, then two."""
    result: dict[str, Any] = {}
    for name, (loss, options) in FLUSHED.items():
        result[name] = {}
        for way in ("flush", "two"):
            torch.manual_seed(0)
            model = dense()
            optimizer = sgd(model.parameters())
            step = step_of(place, model, optimizer, loss, accumulate=3, **options)
            batches = [tuple(map(place.part, batch)) for batch in rows(5)]
            for batch in batches[:3]:
                step(*batch)
            if way == "two":
                step = step_of(place, model, optimizer, loss, accumulate=2, **options)
            else:
                step.flush()  # of nothing
            for batch in batches[3:]:
                step(*batch)
            if way == "flush":
                step.flush()
            states = optimizer.state_dict()["state"]
            kept = [states[number].get("master", p).detach().clone() for number, p in enumerate(model.parameters())]
            result[name][way] = {"weights": kept, "norm": step.grad_norm.clone(), "own": weights_of(model)}
    return result


@scenario
def flushed_otherwise(place: Place) -> dict[str, Any]:
    """Ranks of which each trains a head of its own; uneven batches; a flush of one rank, while the other trains on."""
    result: dict[str, Any] = {}
    x, y = map(place.part, rows(1)[0])
    for name, accumulate in (("flush", 3), ("whole", 1)):
        torch.manual_seed(0)
        model = Forked()
        model.chosen = place.rank
        step = step_of(place, model, accumulate=accumulate, **FP32)
        step(x, y)
        step.flush()
        result[name] = weights_of(model)
    torch.manual_seed(0)
    model, counts = dense(), (2, 6)
    step = step_of(place, model, accumulate=3, uneven="weight", **FP32)
    step(*(tensor.split(counts)[place.rank] for tensor in rows(1)[0]))
    step.flush()
    torch.manual_seed(0)
    jointly = dense()
    one = step_of(place, jointly, process_group=place.alone, **FP32)
    one(*rows(1)[0])
    result |= {"uneven": weights_of(model), "jointly": weights_of(jointly)}
    step(x, y)
    result["told"] = [error_of(step.flush if place.rank == odd else lambda: step(x, y)) for odd in (0, 1)]
    step(x, y), step.flush()
    return {**result, "same": same_everywhere(step, model)}
