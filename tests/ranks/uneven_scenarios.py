"""Scenarios in which ranks have batches of other numbers of samples; see `rank_harness`, which runs them."""

from __future__ import annotations

from typing import Any

import torch
from rank_harness import Place, adagrad, adamw, dense, rows, same_everywhere, scenario, sgd, squares, told
from torch import Tensor, nn

import amp_compiler as amp

COUNTS = (
    (2, 6),
    (6, 2),
    (3, 5),
    (2, 6),
    (5, 3),
    (4, 4),
)  # rows of each rank, of eight; a SyncBatchNorm takes no single one


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))


def branching(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """No one graph."""
    return squares(model, x, y) * (1 if bool(x[0, 0] == x[0, 0]) else 2)


FP32: dict[str, Any] = {"enabled": False}
FP16: dict[str, Any] = {"dtype": "fp16", "loss_scale": 1024.0, "accumulate": 2}
SPLIT = {"version": 1, "extends": "default", "reduce": {"shard": "update"}}
UNEVEN: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "clipping": (dense, squares, adamw, {**FP32, "clip_norm": 0.1}),
    "accumulated": (dense, squares, adagrad, {**FP32, "accumulate": 2, "clip_norm": 0.5}),
    "subgraphs": (dense, branching, sgd, {**FP32, "accumulate": 3}),
    "norms": (normed, squares, sgd, FP32),
    "fp16": (dense, squares, sgd, FP16),
    "split": (dense, squares, sgd, {**FP16, "rules": SPLIT, "clip_norm": 0.5}),
}


@scenario
def uneven_batches(place: Place) -> dict[str, Any]:
    """Weights of ranks, of one process on all rows at once, and of one that takes the mean of the ranks' means."""
    return {name: _trained(place, *case) for name, case in UNEVEN.items()}


def _trained(place: Place, make: Any, loss: Any, optimize: Any, options: dict[str, Any]) -> dict[str, Any]:
    gathered, found = options.get("accumulate", 1), dict[str, Any]()

    def made(group: Any, synchronized: bool = False, **changed: Any) -> tuple[nn.Module, amp.TrainingStep]:
        torch.manual_seed(0)
        model = make()
        if synchronized:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model, group)
        options_of = {"backend": "eager", "process_group": group, **options, **changed}
        return model, amp.training_step(model, loss, optimize(model.parameters()), **options_of)

    model, step = made(place.group, synchronized=True, uneven="weight")
    jointly, one = made(place.alone, accumulate=1, enabled=False)
    means, other = made(place.alone, accumulate=2 * gathered, enabled=False)
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
    found |= {"same": same_everywhere(step, model), "norms": norms, "by": step.execution}
    found["weights"], found["jointly"], found["means"] = (
        [p.detach().float().clone() for p in net.parameters()] for net in (model, jointly, means)
    )
    return found


@scenario
def uneven_batches_refused(place: Place) -> dict[str, Any]:
    """Batches of which the second rank cannot say how many samples they have; behind each error all go on."""
    x, y = map(place.part, rows(1)[0])
    odd, model = place.rank == 1, dense()

    def made(**options: Any) -> amp.TrainingStep:
        options = {"dtype": "bf16", "backend": "eager", "process_group": place.group, **options}
        return amp.training_step(model, squares, sgd(model.parameters()), **options)

    step = made(uneven="weight")
    found = {
        "rows": told(lambda: step(x, y[:3] if odd else y)),
        "none": told(lambda: step(x[:0], y[:0]) if odd else step(x, y)),
        "shape": told(lambda: step(x, y[:, :1] if odd else y)),
        "fine": told(lambda: step(x[: 3 if odd else 4], y[: 3 if odd else 4])),
        "options": told(lambda: made(uneven="weight" if odd else "refuse")),
        "word": told(lambda: made(uneven="mean")),
    }
    return {"told": found, "same": same_everywhere(step, model)}
