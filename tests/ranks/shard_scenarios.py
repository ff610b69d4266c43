"""Scenarios in which the update is split over the ranks; see `rank_harness`, whose processes run them."""

import copy
import gc
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any
from unittest import mock

import rank_harness as ranks
import torch
from rank_harness import (
    CASES,
    Case,
    Place,
    error_of,
    rows,
    scenario,
    squares,
    step_of,
    trained_together,
    weights_of,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from training_scenarios import Judging

import amp_compiler as amp
from amp_compiler.ops.cpu import update as cpu_update

REDUCE: dict[str, Any] = {"shard": "update", "bucket_mb": 0.0001}  # several buckets even of these models


def rules(**section: Any) -> dict[str, Any]:
    scale = {"mode": "dynamic", "init": 2.0**20, "growth_interval": 2}
    return {"version": 1, "extends": "default", "reduce": section, "loss_scale": scale}


def odd(wide: int = 9) -> nn.Module:
    """With weights that two ranks cannot halve, and those of a norm, which stay in FP32."""
    return nn.Sequential(nn.Linear(8, wide), nn.GELU(), nn.LayerNorm(wide), nn.Linear(wide, 4))


def plain() -> nn.Module:
    """All weights are read in 16 bits, and four ranks can share each."""
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def two_groups(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    inputs = list(parameters)
    decayed, others = [p for p in inputs if p.dim() > 1], [p for p in inputs if p.dim() <= 1]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 3e-2}], 1e-2)


def few() -> list[tuple[Tensor, ...]]:
    return rows(6)


BF16, FP16 = {"dtype": "bf16"}, {"dtype": "fp16"}
SPLIT = {
    "sgd": replace(CASES["sgd"], model=odd, batches=few, options=BF16),
    "adamw": replace(CASES["adamw"], model=odd, batches=few, options=BF16),
    "two groups": replace(CASES["adamw"], model=odd, batches=few, optimizer=two_groups, options=BF16),
    "fp16": replace(CASES["adamw"], model=odd, batches=few, options=FP16),
    "largest gradient": replace(
        CASES["adamw"], model=odd, batches=few, options={"dtype": "fp16", "loss_scale": "nvcaffe"}
    ),
    "clipping": replace(CASES["adamw"], model=odd, batches=few, options={**FP16, "clip_norm": 0.1}),
    "accumulated": replace(CASES["adamw"], model=odd, batches=few, options={**FP16, "accumulate": 2}),
    "tied": replace(CASES["tied"], batches=lambda: ranks.ids(6), options=BF16),
    "16-bit model": replace(CASES["adamw"], model=lambda: odd().bfloat16(), batches=few, options=BF16),
}
PARTS = tuple(name for name in SPLIT if name not in ("sgd", "adamw", "fp16"))  # which are in others


def masters_of(model: nn.Module, step: amp.TrainingStep) -> list[Tensor]:
    """The whole FP32 value of every parameter, which all ranks ask for."""
    (optimizer,) = step._optimizers
    states = optimizer.state_dict()["state"]
    inputs = [p for group in optimizer.param_groups for p in group["params"]]
    result = {id(p): states.get(number, {}).get("master", p).detach().clone() for number, p in enumerate(inputs)}
    return [result[id(p)] for p in model.parameters()]


def moments_of(step: amp.TrainingStep) -> list[Tensor]:
    states = step._optimizers[0].state_dict()["state"]
    return [value.clone() for _, one in sorted(states.items()) for key, value in sorted(one.items()) if key != "master"]


def everything(model: nn.Module, step: amp.TrainingStep) -> dict[str, Any]:
    return {
        "weights": weights_of(model),
        "masters": masters_of(model, step),
        "moments": moments_of(step),
        "numbers": [step.loss_scale, step.skipped_steps],
        "norm": step.grad_norm,
    }


@scenario
def parts(place: Place) -> dict[str, Any]:
    """Each of those cases, with the update split and whole."""
    result: dict[str, Any] = {}
    for name in PARTS:
        whole = trained_together(place, SPLIT[name], rules=rules(bucket_mb=REDUCE["bucket_mb"]))
        split = trained_together(place, SPLIT[name], rules=rules(**REDUCE))
        state = split[1]._optimizers[0].state[next(split[0].parameters())]
        held = {key: tuple(value.shape) for key, value in state.items()}
        result[name] = {"whole": everything(*whole), "split": everything(*split), "held": held}
    return result


class Messages(TorchDispatchMode):
    """Adds up what a rank sends, as rings of ranks send it, by the name of the message."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.sent = size, {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        share = {"all_reduce": 2.0, "reduce_scatter_tensor": 1.0, "all_gather_into_tensor": self.size}
        name = func._schema.name.rpartition("::")[2]
        if name in share:
            sent = share[name] * (self.size - 1) / self.size * args[0].numel() * args[0].element_size()
            self.sent[name] = self.sent.get(name, 0.0) + sent
        return result


@scenario
def bytes_of_a_step(place: Place) -> dict[str, Any]:
    """What really is sent and held, of a model all of whose weights are split."""
    case = replace(CASES["adamw"], model=plain, options=BF16)
    model, step = case.built(place.rank, process_group=place.group, rules=rules(**REDUCE))
    batch = list(map(place.part, rows(1)[0]))
    step(*batch)
    with Messages(place.size) as messages:
        step(*batch)
    states = step._optimizers[0].state.values()
    held = [value for state in states for key, value in state.items() if key != "step"]
    return {
        "elements": sum(p.numel() for p in model.parameters()),
        "sent": messages.sent,
        "state": sum(value.untyped_storage().nbytes() for value in held),
        "weights": sum(p.untyped_storage().nbytes() for p in model.parameters()),
        "plan": str(step.plan),
        "again": amp.PrecisionPlan.from_dict(step.plan.to_dict()) == step.plan,
        "stages": step.stages["gather_weights"].text,
    }


def live_bytes() -> int:
    """Of the memory of all tensors that this process holds."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if type(one) in (Tensor, nn.Parameter)]
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


@scenario
def memory_between_steps(place: Place) -> dict[str, Any]:
    """Bytes that live behind a step beside its batch, and the plan, of weights that fill most of them."""
    result: dict[str, Any] = {}
    x, y = torch.randn(1, 128), torch.randn(1, 64)
    for name, section, loss in (
        ("whole", {"shard": "none"}, squares),
        ("split", {"shard": "update"}, squares),
        ("subgraphs", {"shard": "none"}, lambda m, x, y: squares(m, x, y) * (1 if bool(x[0, 0] == x[0, 0]) else 2)),
    ):
        before = live_bytes()
        model = nn.Sequential(nn.Linear(128, 512, bias=False), nn.Linear(512, 64, bias=False))
        optimizer = torch.optim.AdamW(model.parameters())
        step = step_of(place, model, optimizer, loss, rules=rules(**section), **BF16)
        step(x, y), step(x, y)
        result[name] = {"live": live_bytes() - before, "plan": str(step.plan), "by": step.execution}
        result["elements"] = sum(p.numel() for p in model.parameters())
        if name == "split":  # whose parts of gradients a profile counts
            result["counted"] = str(amp.profile(step, [(x, y)]))
        del model, optimizer, step
    return result


def copied(model: nn.Module, step: amp.TrainingStep) -> dict[str, Any]:
    (optimizer,) = step._optimizers
    return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step.state_dict()})


def load(saved: dict[str, Any], model: nn.Module, step: amp.TrainingStep) -> None:
    own = copy.deepcopy(saved)  # a state_dict that is loaded keeps its tensors
    model.load_state_dict(own["model"])
    step._optimizers[0].load_state_dict(own["optimizer"])
    step.load_state_dict(own["step"])


@scenario
def a_checkpoint_of_parts(place: Place) -> dict[str, Any]:
    """From the ranks to one process and to one of a 16-bit model, and from one process to the ranks."""
    case = replace(SPLIT["fp16"], batches=lambda: rows(6))
    split, whole = rules(shard="update", precision="fp32"), rules(precision="fp32")
    batches = case.batches()

    def went_on(step: amp.TrainingStep, cut: Callable[[Tensor], Iterable[Tensor]]) -> None:
        for batch in batches[3:]:
            for part in zip(*map(cut, batch), strict=True):
                step(*part)

    def together(tensor: Tensor) -> list[Tensor]:
        return [place.part(tensor)]

    def one_by_one(tensor: Tensor) -> Iterable[Tensor]:
        return tensor.chunk(place.size)

    model, step = case.built(place.rank, process_group=place.group, rules=split)
    for batch in batches[:3]:
        step(*map(place.part, batch))
    saved = copied(model, step)
    went_on(step, together)
    result: dict[str, Any] = {"saved": saved, "split": everything(model, step), "from one": {}}
    alone: dict[str, Any] = {"process_group": place.alone, "accumulate": place.size, "rules": whole}
    low = replace(case, model=lambda: odd().half())
    for name, other in (("one process", case), ("a 16-bit model", low)):
        again, resumed = other.built(7, **alone)
        load(saved, again, resumed)
        went_on(resumed, one_by_one)
        result[name] = everything(again, resumed)
    first, single = case.built(0, **alone)
    for batch in batches[:3]:
        for part in zip(*map(one_by_one, batch), strict=True):
            single(*part)
    saved = copied(first, single)
    for name, begun in (("made anew", False), ("that trained before", True)):
        again, resumed = case.built(7, process_group=place.group, rules=split)
        if begun:
            resumed(*map(place.part, batches[0]))
            for number, parameter in enumerate(first.parameters()):  # as a run of a 16-bit model has them
                saved["optimizer"]["state"][number]["master"] = parameter.detach()
        load(saved, again, resumed)
        went_on(resumed, together)
        result["from one"][name] = everything(again, resumed)
        result["from one"][name]["masters"] = masters_of(again, resumed)
    went_on(single, one_by_one)
    result["from one"]["itself"] = everything(first, single)
    return result


@scenario
def saved_on_one_rank(place: Place) -> dict[str, Any]:
    """A rank that asks for the whole state alone; then all do."""
    model, step = SPLIT["adamw"].built(place.rank, process_group=place.group, rules=rules(**REDUCE))
    batch = list(map(place.part, rows(1)[0]))
    step(*batch)
    (optimizer,) = step._optimizers
    said = error_of(lambda: optimizer.state_dict() if place.rank == 0 else step(*batch))
    step(*batch)
    return {"told": said, "after": everything(model, step)}


@scenario
def written_between(place: Place) -> dict[str, Any]:
    """Weights that are written between two steps: masters follow, but for what is as it was."""
    result = {}
    for name, section in (("whole", {}), ("split", REDUCE)):
        model, step = SPLIT["sgd"].built(place.rank, process_group=place.group, rules=rules(**section))
        for number, batch in enumerate(few()):
            if number == 3:
                with torch.no_grad():
                    model[0].weight[2:5] = 0.25
                    model[3].bias.fill_(-1.0)
            step(*map(place.part, batch))
        result[name] = everything(model, step)
    case = replace(SPLIT["sgd"], model=lambda: odd(8192), optimizer=lambda inputs: torch.optim.SGD(inputs, 0.0))
    model, step = case.built(place.rank, process_group=place.group, rules=rules(**REDUCE))
    places = [-1, -10_001, -20_001]  # of the last rank's part of 32,768, of which sampling takes 1,024
    for batch, one in zip(few(), places, strict=False):
        step(*map(place.part, batch))
        model[0].weight.data.view(-1)[one] = 64.0
    step(*map(place.part, batch))
    result["single"] = {"written": [float(model[0].weight.detach().view(-1)[one]) for one in places]}
    return result


@scenario
def what_cannot_be_split(place: Place) -> dict[str, Any]:
    """Each with what it was told."""
    batch = list(map(place.part, rows(1)[0]))

    def run(case: Case, then: Callable[[amp.TrainingStep], Any] = lambda step: None, **options: Any) -> str:
        def built() -> None:
            _, step = case.built(0, process_group=place.group, **{"rules": rules(**REDUCE), **BF16, **options})
            step(*batch)
            then(step)

        return error_of(built)

    low = {**rules(**REDUCE), "weights": {"master": "low"}}
    damped = replace(CASES["sgd"], optimizer=lambda inputs: torch.optim.SGD(inputs, 0.1, momentum=0.9, dampening=0.5))

    def whole_after_parts() -> None:
        model = plain()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for section in (REDUCE, {}):
            step_of(place, model, optimizer, rules=rules(**section), **BF16)(*batch)

    return {
        "whole": error_of(whole_after_parts),
        "traced": run(CASES["traced"]),
        "low": run(CASES["sgd"], rules=low),
        "dampening": run(damped),
        "subgraphs": run(replace(CASES["sgd"], model=Judging)),
        "gradients": run(CASES["sgd"], lambda step: step.gradients()),
        "fp32": run(CASES["sgd"], lambda step: step.gradients(), enabled=False),  # splits nothing, so it has them
    }


@scenario
def compiled_parts(place: Place) -> dict[str, Any]:
    """By Inductor, with the kernels of the CPU, and without them."""
    case = replace(SPLIT["clipping"], batches=few)
    result = {"eager": everything(*trained_together(place, case, rules=rules(**REDUCE)))}
    model, step = trained_together(place, case, rules=rules(**REDUCE), backend="inductor")
    result["compiled"] = everything(model, step)
    result["cut"] = step.stages["cut_step"].text
    with mock.patch.object(cpu_update, "available", lambda: False):
        result["opened"] = everything(*trained_together(place, case, rules=rules(**REDUCE), backend="inductor"))
    return result
