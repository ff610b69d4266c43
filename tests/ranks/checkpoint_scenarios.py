"""Scenarios of checkpoints that several ranks write and read; see `rank_harness`, whose processes run them."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rank_harness import CASES, Case, Place, error_of, rows, scenario, weights_of
from shard_scenarios import BF16, SPLIT, masters_of, moments_of, odd, rules
from torch import Tensor, nn

import amp_compiler as amp

FORMS: dict[str, dict[str, Any]] = {
    "split": rules(shard="update", precision="fp32", bucket_mb=0.0001),
    "whole": rules(precision="fp32"),
}
# What reads the checkpoint of what, with the number of ranks; "begun" has made a step before.
Readers = dict[str, tuple[tuple[str, int, str], ...]]
READ: Readers = {
    "split": (("split", 4, "begun"), ("split", 2, "begun"), ("whole", 1, "")),
    "whole": (("split", 2, ""),),
    "one process": (("whole", 2, "begun"),),
}
CASE = replace(SPLIT["fp16"], batches=lambda: rows(6))


def prepared(place: Place, seed: int, form: str, case: Case = CASE) -> tuple[nn.Module, amp.TrainingStep]:
    """A step of the place's ranks; a single one gathers the parts of two."""
    options = {"process_group": place.group} if place.size > 1 else {"process_group": place.alone, "accumulate": 2}
    return case.built(seed, rules=FORMS[form], **options)


def calls(place: Place, batches: list[tuple[Tensor, ...]]) -> Iterator[list[Tensor]]:
    for batch in batches:
        if place.size > 1:
            yield [place.part(tensor) for tensor in batch]
        else:
            yield from map(list, zip(*(tensor.chunk(2) for tensor in batch), strict=True))


def train(place: Place, step: amp.TrainingStep, batches: list[tuple[Tensor, ...]]) -> None:
    for batch in calls(place, batches):
        step(*batch)


def state_of(model: nn.Module, step: amp.TrainingStep) -> dict[str, Any]:
    """What training goes on from, whole; all ranks ask for it."""
    return {
        "masters": masters_of(model, step),
        "moments": moments_of(step),
        "scale": str(step.state_dict()),
        "rates": [group["lr"] for group in step._optimizers[0].param_groups],
    }


@scenario
def resharded(place: Place) -> dict[str, Any]:
    """Two ranks, whose update is split or whole, and one process write; four, two and one read, and go on."""
    batches = CASE.batches()
    places = {size: one for size, one in {1: place.first(1), 2: place.first(2), 4: place}.items() if place.rank < size}
    folder, result = place.folder / "resharded", {}
    for form, size in (("split", 2), ("whole", 2), ("one process", 1)):
        if size in places:
            at = places[size]
            model, step = prepared(at, place.rank, "whole" if form == "one process" else form)
            step._optimizers[0].param_groups[0]["lr"] = 0.005
            train(at, step, batches[:3])
            amp.save_checkpoint(step, folder / form, 3, extra={"rank": place.rank})
            result[form] = {"saved": state_of(model, step), "low": weights_of(model)[0].dtype}
            train(at, step, batches[3:])
            result[form]["went on"] = state_of(model, step)
    dist.barrier(place.group)
    for writer, readers in READ.items():
        for form, size, begun in readers:
            if size in places:
                at = places[size]
                model, step = prepared(at, 7, form)
                if begun:
                    train(at, step, batches[:1])
                extra = amp.load_checkpoint(step, folder / writer)
                result[writer, form, size] = {"loaded": state_of(model, step), "extra": extra.extra}
                train(at, step, batches[3:])
                result[writer, form, size] |= {"went on": state_of(model, step), "low": weights_of(model)}
    return result


def noisy() -> nn.Module:
    """With statistics and dropout, of which each rank has its own."""
    return nn.Sequential(nn.Linear(8, 9), nn.BatchNorm1d(9), nn.Dropout(0.5), nn.Linear(9, 4))


@scenario
def of_each_rank(place: Place) -> dict[str, Any]:
    """Random state and statistics, on as many ranks; and read by another number of them."""
    options = {**BF16, "broadcast_buffers": False}
    case = replace(CASES["adamw"], model=noisy, options=options)
    batches, result, at = rows(6), {}, place.first(2)
    if place.rank < 2:
        model, step = prepared(at, place.rank, "split", case)
        torch.manual_seed(place.rank)
        train(at, step, batches[:3])
        amp.save_checkpoint(step, place.folder / "own", 3)
        result["statistics"] = [buffer.clone() for buffer in model.buffers()]
        train(at, step, batches[3:])
        result["went on"] = {**state_of(model, step), "buffers": list(model.buffers())}
        again, resumed = prepared(at, 7, "split", case)
        torch.manual_seed(7)
        amp.load_checkpoint(resumed, place.folder / "own")
        train(at, resumed, batches[3:])
        result["resumed"] = {**state_of(again, resumed), "buffers": list(again.buffers())}
    dist.barrier(place.group)
    if place.rank == 0:
        again, resumed = case.built(7, **{**options, "broadcast_buffers": True}, process_group=place.alone)
        amp.load_checkpoint(resumed, place.folder / "own")
        result["alone"] = list(again.buffers())
    return result


@scenario
def what_goes_wrong(place: Place) -> dict[str, Any]:
    """Each with what a rank was told; of four ranks the first two."""
    at, folder, second, result = place.first(2), place.folder / "wrong", place.rank == 1, {}
    if place.rank > 1:
        return result
    model, step = prepared(at, 0, "split", replace(CASE, model=odd))
    batch = next(calls(at, rows(1)))
    step(*batch)

    def wrong(name: str, run: Callable[[], Any]) -> None:
        result[name] = error_of(run)

    for number in (1, 2):
        amp.save_checkpoint(step, folder, number)
    before = state_of(model, step)
    wrong("other numbers", lambda: amp.load_checkpoint(step, folder, 1 + place.rank))
    wrong("other folders", lambda: amp.load_checkpoint(step, folder / "none" if second else folder))
    wrong("numbers to save", lambda: amp.save_checkpoint(step, folder, 3 + place.rank))
    wrong("a wrong number", lambda: amp.save_checkpoint(step, folder, -1 if second else 3))
    wrong("folders to save", lambda: amp.save_checkpoint(step, place.folder / "second" if second else folder, 3))
    wrong("there already", lambda: amp.save_checkpoint(step, folder, 2))
    wrong("one trains", lambda: step(*batch) if second else amp.save_checkpoint(step, folder, 3))
    wrong("one loads", lambda: (amp.load_checkpoint if second else amp.save_checkpoint)(step, folder, 3))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with mock.patch.object(torch, "save", full) if second else mock.MagicMock():
        wrong("a full disk", lambda: amp.save_checkpoint(step, folder, 3))
    result["names"] = sorted(one.name for one in folder.iterdir())
    other = prepared(at, 0, "split", replace(CASE, model=lambda: odd(10)))[1]
    wrong("another model", lambda: amp.load_checkpoint(other, folder))
    dist.barrier(at.group)
    if second:
        file = folder / "2" / "rank-1.pt"
        file.write_bytes(file.read_bytes()[:-100])
    dist.barrier(at.group)
    wrong("a truncated file", lambda: amp.load_checkpoint(step, folder))
    result["same"] = str(before) == str(state_of(model, step))
    loaded = amp.load_checkpoint(step, folder, 1)
    step(*batch)
    result["after"] = (loaded.number, amp.save_checkpoint(step, folder, 3).name, state_of(model, step))
    return result


def example() -> str:
    """The script of docs/ranks.md that saves and loads."""
    page = (Path(__file__).parents[2] / "docs" / "ranks.md").read_text(encoding="utf-8")
    (script,) = [one for one in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "save_checkpoint" in one]
    return script


@scenario
def the_example_of_the_docs(place: Place) -> dict[str, Any]:
    """To its end, and another time stopped and started again; in the processes that there are, two of them."""
    at, result = place.first(2), {}
    if place.rank > 1:
        return result
    with mock.patch.object(dist, "init_process_group"), mock.patch.object(dist, "destroy_process_group"):
        for name, last, folder in (("undisturbed", 20, "a"), ("stopped", 12, "b"), ("started again", 20, "b")):
            script = example().replace("range(start, 20)", f"range(start, {last})")
            script = script.replace('dtype="bf16"', 'dtype="bf16", backend="eager"').replace(
                "dist.group.WORLD", "GROUP"
            )
            names: dict[str, Any] = {"GROUP": at.group}
            exec(compile(script.replace('"checkpoints"', repr(str(place.folder / folder))), "ranks.md", "exec"), names)
            result[name] = {"start": names["start"], "weights": weights_of(names["model"])}
            dist.barrier(at.group)
    result["kept"] = sorted(int(one.name) for one in (place.folder / "b").iterdir())
    return result
