"""Scenarios of `SyncBatchNorm`: statistics over the rows of all ranks; see `rank_harness`, which runs them."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from rank_harness import (
    Case,
    Place,
    error_of,
    rows,
    rules,
    same_everywhere,
    scenario,
    sgd,
    squares,
    step_of,
    trained_together,
    weights_of,
)
from torch import Tensor, nn

import amp_compiler as amp

Kinds = dict[int, Callable[..., nn.Module]]
PLAIN: Kinds = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
JOINED: Kinds = dict.fromkeys(PLAIN, nn.SyncBatchNorm)
STEPS = 10


def of_rows(kinds: Kinds) -> nn.Module:
    norms = kinds[1](16), kinds[1](8, momentum=None, affine=False)
    return nn.Sequential(nn.Linear(8, 16), norms[0], nn.GELU(), nn.Linear(16, 8), norms[1], nn.Linear(8, 4))


def of_images(kinds: Kinds) -> nn.Module:
    volume, image = kinds[3](4, momentum=0.3, eps=1e-3), kinds[2](4, track_running_stats=False)
    layers = nn.Unflatten(1, (1, 2, 2, 2)), nn.Conv3d(1, 4, 2, padding=1), volume, nn.ReLU(), nn.Flatten(3), image
    return nn.Sequential(*layers, nn.Flatten(1), nn.Linear(108, 4))


MODELS = {"rows": of_rows, "images": of_images}


def by_torch(model: nn.Module, loss: Callable[..., Tensor], batches: Any, make: Any = sgd) -> list[Tensor]:
    """What one process trains of whole batches, in FP32, by plain torch."""
    optimizer = make(model.parameters())
    for batch in batches:
        optimizer.zero_grad()
        loss(model, *batch).backward()
        optimizer.step()
    return weights_of(model)


def case_of(make: Callable[[Kinds], nn.Module], kinds: Kinds = JOINED) -> Case:
    return Case(lambda: make(kinds), squares, lambda: rows(STEPS), sgd, {})


def messages(step: amp.TrainingStep) -> list[str]:
    """The messages of forward and backward in a step's graph, in order."""
    sent = r"= _c10d_functional\.(?!wait)(\w+)\.default.*  # phase=(?:forward|backward)"
    return re.findall(sent, step.stages["fuse_update"].text)


@scenario
def synchronized_norms(place: Place) -> dict[str, Any]:
    """As `BatchNorm` of one process is on whole batches in FP32."""
    result: dict[str, Any] = {}
    for name, make in MODELS.items():
        model, step = trained_together(place, case_of(make), enabled=False)
        result[name] = {"same": same_everywhere(step, model), "messages": messages(step), "weights": weights_of(model)}
        torch.manual_seed(0)
        result[name]["jointly"] = by_torch(make(PLAIN), squares, rows(STEPS))
    return result


@scenario
def synchronized_in_16_bits(place: Place) -> dict[str, Any]:
    """Whole, and with the update split over the ranks; with gradients in another type than the data's."""
    typed = {"match": {"family": "batch_norm"}, "backward": {"precision": "fp32"}}
    wide = {"version": 1, "extends": "default", "rules": [typed]}
    result: dict[str, Any] = {}
    for name, options in {
        "whole": {"dtype": "bf16"},
        "split": {"dtype": "bf16", "rules": rules(shard="update")},
        "backward in FP32": {"dtype": "fp16", "loss_scale": 128.0, "rules": wide},
    }.items():
        model, step = trained_together(place, case_of(of_rows), **options)
        result[name] = {"weights": weights_of(model), "messages": messages(step)}
    torch.manual_seed(0)
    result["jointly in FP32"] = by_torch(of_rows(PLAIN), squares, rows(STEPS))
    return result


@scenario
def synchronized_otherwise(place: Place) -> dict[str, Any]:
    """Gathered batches, evaluation, an overflow and its report."""
    case, result = case_of(of_rows), dict[str, Any]()
    model, step = trained_together(place, case, enabled=False, accumulate=2)
    result["gathered"] = {"same": same_everywhere(step, model), "weights": weights_of(model)}
    pairs = zip(rows(STEPS)[::2], rows(STEPS)[1::2], strict=True)
    torch.manual_seed(0)
    result["gathered"]["jointly"] = by_torch(of_rows(PLAIN), _mean_of_both, pairs)

    model, step = case.built(0, process_group=place.group, dtype="fp16", loss_scale="dynamic")
    x, y = map(place.part, rows(1)[0])
    before = weights_of(model)
    step(x * (float("inf") if place.rank == 1 else 1), y)
    result["overflow"] = {"skipped": int(step.skipped_steps), "before": before, "weights": weights_of(model)}
    result["overflow"]["report"] = str(step.nonfinite_report(cure=False)) if place.rank == 1 else ""
    model.eval()
    step(x, y)
    result["evaluated"] = {"messages": messages(step), "same": same_everywhere(step, model), "before": before}
    return result


def _mean_of_both(model: nn.Module, one: Sequence[Tensor], other: Sequence[Tensor]) -> Tensor:
    return (squares(model, *one) + squares(model, *other)) / 2


class InRegion(nn.Module):
    """A norm in a region of autocast in a type that the step does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.SyncBatchNorm(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            x = self.norm(x)
        return self.out(x.float())


class Twice(nn.Module):
    """A norm that one rank runs twice, or whose result Python looks into."""

    def __init__(self, times: int, looks: bool = False) -> None:
        super().__init__()
        self.norm, self.out, self.times, self.looks = nn.SyncBatchNorm(8), nn.Linear(8, 4), times, looks

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.norm(x)
        return self.out(x) if not self.looks or x[0, 0] > 0 else self.out(-x)


@scenario
def synchronized_and_refused(place: Place) -> dict[str, Any]:
    """Ranks that would wait for one another, and a loss that is not one graph."""
    batch = list(map(place.part, rows(1)[0]))

    def said(model: nn.Module) -> str:
        return error_of(lambda: step_of(place, model, dtype="bf16")(*batch))

    apart = nn.Sequential(nn.SyncBatchNorm(8, process_group=place.alone if place.rank == 0 else None), nn.Linear(8, 4))
    return {
        "twice": said(Twice(1 + place.rank)),
        "subgraphs": said(Twice(1, looks=True)),
        "groups": said(apart),
        "region": said(InRegion()),
        "one row": error_of(lambda: _one_row(place)),
    }


def _one_row(place: Place) -> None:
    _, step = case_of(of_rows).built(0, process_group=place.group)
    step(torch.ones(1, 8), torch.ones(1, 4))


@scenario
def synchronized_in_halves(place: Place) -> dict[str, Any]:
    """Of four ranks, statistics over the rows of the first two and of the last two."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]

    def half(size: int) -> nn.Module:
        return nn.SyncBatchNorm(size, process_group=halves[place.rank // 2])

    def both(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        parts = zip(x.chunk(2), y.chunk(2), strict=True)
        return sum(squares(model, *part) for part in parts) / 2  # type: ignore[return-value]

    def net(norm: Callable[[int], nn.Module]) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), norm(8), nn.Tanh(), nn.Linear(8, 4))

    case = Case(lambda: net(half), squares, lambda: rows(STEPS), sgd, {})
    model, step = trained_together(place, case, enabled=False, broadcast_buffers=False)
    torch.manual_seed(0)
    jointly = by_torch(net(nn.BatchNorm1d), both, rows(STEPS))
    own = [one.clone() for one in model.buffers()]
    return {"weights": weights_of(model), "jointly": jointly, "buffers": own, "messages": messages(step)}


@scenario
def compiled_norms(place: Place) -> dict[str, Any]:
    """By Inductor and node by node, in FP32 and in BF16, whose sums more than two ranks round."""
    case, result = case_of(of_rows), dict[str, Any]()
    for name, options in (("fp32", {"enabled": False}), ("bf16", {"dtype": "bf16"})):
        for backend in ("inductor", "eager"):
            model, step = trained_together(place, case, backend=backend, **options)
            result[f"{name} {backend}"] = {"same": same_everywhere(step, model), "weights": weights_of(model)}
    return result
