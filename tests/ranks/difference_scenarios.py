"""Scenarios in which ranks have other things than one another, or models that are spread; see `rank_harness`."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from rank_harness import (
    CASES,
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
    trained_together,
    weights_of,
)
from torch import Tensor, nn

import amp_compiler as amp
from amp_compiler.ranks.ranks import Ranks


@dataclass
class Sample:
    """A batch of a type of one's own."""

    x: Tensor
    y: Tensor


BATCHES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "list": lambda x, y: [x, y],
    "nested": lambda x, y: {"pair": [x, (y,)]},
    "list of dataclasses": lambda x, y: [Sample(x, y)],
}


def of_any_kind(model: Any, batch: Any) -> Tensor:
    """The loss of a batch of one of `BATCHES`."""
    if isinstance(batch, dict):
        return squares(model, batch["pair"][0], *batch["pair"][1])
    return squares(model, batch[0].x, batch[0].y) if len(batch) == 1 else squares(model, *batch)


@scenario
def batches_of_other_kinds(place: Place) -> dict[str, Any]:
    """Batches in containers and classes, the same kind on all ranks, and another one on the second."""
    result: dict[str, Any] = {}
    case = replace(CASES["sgd"], options={"dtype": "bf16"}, batches=lambda: rows(4))
    result["tensors"] = weights_of(trained_together(place, case)[0])
    other = replace(case, loss=of_any_kind)
    kinds = {name: (name, name) for name in BATCHES}
    kinds |= {f"{name} beside a list": ("list", name) for name in BATCHES if name != "list"}
    for name, inputs in kinds.items():
        model, step = other.built(place.rank, process_group=place.group)

        def run(step: Any = step, make: Any = BATCHES[inputs[place.rank]]) -> None:
            for batch in case.batches():
                step(make(*map(place.part, batch)))

        result[name] = {"told": error_of(run), "weights": weights_of(model), "by": step.execution if step._last else ""}
    for name, make in BATCHES.items():
        model, step = other.built(place.rank, process_group=place.group)
        x, y = map(place.part, case.batches()[0])
        end = 4 - place.rank
        uneven = error_of(lambda: step(make(x[:end], y[:end])))  # noqa: B023  # called at once
        step(make(x, y))
        again = error_of(lambda: step(make(x[:end], y[:end])))  # noqa: B023
        result[f"uneven {name}"] = {"told": uneven, "again": again, "weights": weights_of(model)}
    return result


# What goes wrong: each returns what this rank was told, by what it was.


@scenario
def differences(place: Place) -> dict[str, Any]:
    """The second rank has something else, from the beginning."""
    case, odd = CASES["sgd"], place.rank == 1

    def built(**options: Any) -> str:
        return error_of(lambda: case.built(0, process_group=place.group, **{"dtype": "bf16", **options}))

    result = {
        "rules": built(rules={"version": 1, "extends": "default", "deny": ["aten.gelu"]} if odd else "default"),
        "enabled": built(enabled=not odd),
        "dtype": built(dtype="fp16" if odd else "bf16"),
        "fails": built(backend="nonsense" if odd else "eager"),
    }
    other = replace(case, model=lambda: dense(17 if odd else 16))
    result["shapes"] = error_of(lambda: other.built(0, process_group=place.group))
    other = replace(case, model=lambda: nn.Sequential(*dense(), nn.Tanh() if odd else nn.Sigmoid()))
    result["modules"] = error_of(lambda: other.built(0, process_group=place.group))
    other = replace(case, optimizer=adamw if odd else sgd)
    result["optimizers"] = error_of(lambda: other.built(0, process_group=place.group))
    version = torch.__version__
    if odd:
        torch.__version__ = "2.0.1"
    result["torch"] = built()
    torch.__version__ = version
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + int(odd))
    result["threads"] = built()
    torch.set_num_threads(threads)
    return result


@scenario
def differences_later(place: Place) -> dict[str, Any]:
    """The second rank differs at a call; behind the error all of them go on."""
    case, odd = CASES["sgd"], place.rank == 1
    model, step = case.built(0, process_group=place.group, dtype="bf16")
    batches = case.batches()
    x, y = map(place.part, batches[0])
    result = {"first shape": error_of(lambda: step(x[: 3 if odd else 4], y[: 3 if odd else 4]))}
    step(x, y)
    result["later shape"] = error_of(lambda: step(x[: 2 if odd else 4], y[: 2 if odd else 4]))
    (optimizer,) = step._optimizers
    optimizer.param_groups[0]["lr"] = 0.5 if odd else 0.05
    result["rate"] = error_of(lambda: step(x, y))
    optimizer.param_groups[0]["lr"] = 0.05
    result["fails"] = error_of(lambda: step({"x": x}, y) if odd else step(x, y))
    step.model.train(not odd)
    step.model.train()
    step(x, y)
    return {**result, "same": same_everywhere(step, model)}


@scenario
def loaded_later(place: Place) -> dict[str, Any]:
    """Behind a call, something is loaded or written on one rank alone, or otherwise on each; then the hint is done."""
    odd, result = place.rank == 1, dict[str, Any]()
    x, y = map(place.part, rows(1)[0])

    def built(name: str) -> tuple[nn.Module, amp.TrainingStep]:
        model, step = CASES[name].built(0, process_group=place.group, dtype="bf16")
        step(x, y)
        return model, step

    model, step = built("sgd")
    before = copy.deepcopy(model.state_dict())
    if odd:
        model.load_state_dict(CASES["sgd"].model().state_dict())
    result["weights"] = [error_of(lambda: step(x, y)) for _ in range(4)]
    model.load_state_dict(before)
    result["fixed"] = error_of(lambda: step(x, y)), same_everywhere(step, model)
    torch.manual_seed(place.rank)
    model.load_state_dict(CASES["sgd"].model().state_dict())
    result["of each its own"] = [error_of(lambda: step(x, y)) for _ in range(4)]

    model, step = built("complex")
    with torch.no_grad():
        model.turns.imag.add_(int(odd))
    result["imaginary part"] = error_of(lambda: step(x, y))

    model, step = built("sgd")
    if odd:  # other weights for a while, as where one rank evaluates
        kept = weights_of(model)
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), kept, strict=True):
                parameter.zero_()
                parameter.copy_(value)
    result["for a while"] = error_of(lambda: step(x, y)), same_everywhere(step, model)
    return result


@scenario
def written_at_every_call(place: Place) -> dict[str, Any]:
    """Weights that all ranks clip behind every call, and how often the ranks tell one another more than a number."""
    model, step = CASES["sgd"].built(0, process_group=place.group, dtype="bf16")
    told_more = 0
    exchange = Ranks.exchange

    def counted(self: Ranks, said: Any) -> Any:
        nonlocal told_more
        told_more += 1
        return exchange(self, said)

    with mock.patch.object(Ranks, "exchange", counted):
        for batch in rows(20):
            step(*map(place.part, batch))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.clamp_(-0.1, 0.1)
    return {"same": same_everywhere(step, model), "told more": told_more}


@scenario
def what_is_refused(place: Place) -> dict[str, Any]:
    """Models that are spread over the ranks already, and losses that hold one."""
    from torch.distributed._composable import replicate
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import Replicate, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh, group = init_device_mesh("cpu", (place.size,)), place.group
    batch = list(map(place.part, rows(1)[0]))

    def said(model: nn.Module, loss: Any = squares) -> str:
        return error_of(lambda: step_of(place, model, sgd, loss)(*batch))

    def in_ddp(model: nn.Module) -> nn.Module:
        return nn.parallel.DistributedDataParallel(model, process_group=group)

    def in_fsdp() -> nn.Module:
        return FullyShardedDataParallel(dense(), process_group=group, device_id=torch.device("cpu"))

    def halved() -> nn.Module:
        return parallelize_module(nn.Sequential(nn.Linear(8, 4)), mesh, {"0": ColwiseParallel()})

    def with_buffer() -> nn.Module:
        model = dense()
        model[0].register_buffer("mask", distribute_tensor(torch.ones(4), mesh, [Replicate()]))
        return model

    inner = fully_shard(dense()[0], mesh=mesh)
    teacher = in_ddp(dense())
    return {
        "DDP": said(in_ddp(dense())),
        "DDP inside": said(nn.ModuleDict({"net": in_ddp(dense())}), lambda m, x, y: squares(m["net"], x, y)),
        "DDP in the loss": said(dense(), lambda m, x, y: (m(x) - teacher(x)).square().mean()),
        "replicate": said(replicate(dense(), process_group=group)),
        "FSDP": said(fully_shard(dense(), mesh=mesh)),
        "FSDP inside": said(nn.Sequential(inner, nn.Linear(16, 4))),
        "FSDP1": said(in_fsdp()),
        "FSDP1 compiled": error_of(lambda: amp.compile(in_fsdp(), backend="eager")(batch[0])),
        "DTensor": said(halved()),
        "DTensor buffer": said(with_buffer()),
        "DTensor buffer compiled": error_of(lambda: amp.compile(with_buffer(), backend="eager")(batch[0])),
        "DTensor compiled": error_of(lambda: amp.compile(halved(), backend="eager")(batch[0])),
    }


@scenario
def a_rank_that_never_comes(place: Place) -> dict[str, Any]:
    """The second rank stops by itself, between two steps."""
    case = CASES["sgd"]
    _, step = case.built(0, process_group=place.group, dtype="bf16")
    x, y = map(place.part, case.batches()[0])
    step(x, y)
    return {"told": "" if place.rank == 1 else error_of(lambda: step(x, y))}
