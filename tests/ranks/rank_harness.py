"""What the processes of the tests beside it do: each scenario runs on every rank, when a test first asks for it.

A scenario is a function of its place in a group of its own; what it returns is what the tests look at. All of them run
in the same few processes, because starting one takes longer than most scenarios.
"""

from __future__ import annotations

import datetime
import gc
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor, nn
from toys import Tied, squares
from toys import classes as words
from toys import mlp as dense

import amp_compiler as amp

STEPS, ROWS = 50, 8  # steps, and rows of a batch of all ranks together
F = nn.functional


@dataclass(frozen=True)
class Place:
    """Where a scenario runs.

    Args:
        rank: of this process in the group.
        size: of the group.
        group: of this scenario.
        folder: of all scenarios and ranks.
    """

    rank: int
    size: int
    group: Any
    folder: Path

    def part(self, batch: Tensor) -> Tensor:
        """This rank's rows of a batch of all ranks together."""
        return batch.chunk(self.size)[self.rank]

    @property
    def alone(self) -> Any:
        """A group of this rank alone."""
        return dist.new_group([self.rank], use_local_synchronization=True)

    def first(self, size: int) -> Place:
        """The place of this process in a group of the first so many; all processes ask, and those beyond have none."""
        return replace(self, size=size, group=dist.new_group(list(range(size))))


Scenario = Callable[[Place], dict[str, Any]]
SCENARIOS: dict[str, Scenario] = {}
WAITING = ("a_rank_that_never_comes",)  # takes a timeout's seconds


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


class RankProcesses:
    """So many processes; `found[name]` is what each rank returned of a scenario, which runs at the first question.

    They are forks of one process that has imported what they need, and done nothing else.
    """

    def __init__(self, size: int) -> None:
        processes.set_forkserver_preload(["torch.distributed", "torch._dynamo", "amp_compiler.training.step"])
        self._folder = tempfile.TemporaryDirectory()
        self._names = [processes.get_context("forkserver").SimpleQueue() for _ in range(size)]
        self._running = processes.start_processes(  # type: ignore[no-untyped-call]
            _run, (size, self._names, self._folder.name), size, join=False, daemon=True, start_method="forkserver"
        )
        self._found: dict[str, list[dict[str, Any]]] = {}

    def __getitem__(self, name: str) -> list[dict[str, Any]]:
        if name not in self._found:
            for queue in self._names:
                queue.put(name)
            files = [Path(self._folder.name) / f"{name} {rank}.pt" for rank in range(len(self._names))]
            while not all(file.exists() for file in files):
                assert not self._running.join(timeout=0.02), f"the ranks ended in {name}"
            self._found[name] = [torch.load(file, weights_only=False) for file in files]
        return self._found[name]

    def close(self) -> None:
        """End the processes."""
        for queue in self._names:
            queue.put(None)
        while not self._running.join():
            pass
        self._folder.cleanup()


def _run(rank: int, size: int, names: list[Any], folder: str) -> None:
    import checkpoint_scenarios  # noqa: F401  # each adds its own to the table; here, because they import this module
    import difference_scenarios  # noqa: F401
    import drift_scenarios  # noqa: F401
    import norm_scenarios  # noqa: F401
    import shard_scenarios  # noqa: F401
    import training_scenarios  # noqa: F401
    import uneven_scenarios  # noqa: F401

    gc.freeze()  # garbage is looked for seldom, and not in what was imported: see conftest.py
    gc.set_threshold(400_000, 20, 50)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    while (name := names[rank].get()) is not None:
        result: dict[str, Any]
        seconds = 3 if name in WAITING else 60
        group = dist.new_group(list(range(size)), timeout=datetime.timedelta(seconds=seconds))
        try:
            result = SCENARIOS[name](Place(rank, size, group, Path(folder)))
        except Exception as error:  # noqa: BLE001  # the test of this scenario shows it
            result = {"error": f"{type(error).__name__}: {error}", "is_ours": isinstance(error, amp.AmpError)}
        dist.barrier()
        path = Path(folder) / f"{name} {rank}"
        torch.save(result, path)
        path.rename(path.with_suffix(".pt"))  # which is there once it is whole
    dist.destroy_process_group()


def of(matches: RankProcesses, name: str, ranks: int | None = None) -> list[dict[str, Any]]:
    """What the first ranks (else all) returned of a scenario, which failed on none of them."""
    assert [one.get("error") for one in matches[name]] == [None] * len(matches[name])
    return matches[name][:ranks]


def equal(some: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    """Whether tensors are equal to the bit, in the same types."""
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(some, others, strict=True))


def distance(some: Iterable[Tensor], others: Iterable[Tensor]) -> float:
    """The largest difference of tensors, of which some may be complex."""
    wide = torch.complex128
    return max(float((a.to(wide) - b.to(wide)).abs().max()) for a, b in zip(some, others, strict=True))


# Models and batches: of all ranks together, from fixed seeds.


class Rotated(nn.Module):
    """A layer with a complex weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.turns = nn.Linear(8, 4), nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x) * self.turns).abs()


def rows(steps: int = STEPS, seed: int = 1) -> list[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(ROWS, 8, generator=generator), torch.randn(ROWS, 4, generator=generator)) for _ in range(steps)
    ]


def ids(steps: int = STEPS) -> list[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(2)
    return [tuple(torch.randint(16, (ROWS,), generator=generator) for _ in range(2)) for _ in range(steps)]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.05, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-2)


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    """One whose own code is traced."""
    return torch.optim.Adagrad(parameters, 1e-2)


def weights_of(model: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in model.state_dict().values()]


@dataclass(frozen=True)
class Case:
    """A training that one process and several do alike."""

    model: Callable[[], nn.Module]
    loss: Callable[..., Tensor]
    batches: Callable[[], list[tuple[Tensor, ...]]]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    options: dict[str, Any]

    def built(self, seed: int, **options: Any) -> tuple[nn.Module, amp.TrainingStep]:
        torch.manual_seed(seed)
        model = self.model()
        options = {"backend": "eager", **self.options, **options}
        return model, amp.training_step(model, self.loss, self.optimizer(model.parameters()), **options)


CASES = {
    "sgd": Case(dense, squares, rows, sgd, {}),
    "adamw": Case(dense, squares, rows, adamw, {}),
    "clipping": Case(dense, squares, rows, adamw, {"clip_norm": 0.1}),
    "tied": Case(lambda: Tied(16, 8), words, ids, sgd, {}),
    "traced": Case(dense, squares, lambda: rows(15), adagrad, {}),
    "complex": Case(Rotated, squares, lambda: rows(15), adamw, {"clip_norm": 0.1}),
}


def trained_together(place: Place, case: Case, **options: Any) -> tuple[nn.Module, amp.TrainingStep]:
    """Ranks that begin with weights of their own, and train each on a part of every batch."""
    model, step = case.built(place.rank, process_group=place.group, **options)
    for batch in case.batches():
        step(*map(place.part, batch))
    return model, step


def trained_alone(place: Place, case: Case, **options: Any) -> tuple[nn.Module, amp.TrainingStep]:
    """One process, with the weights of rank 0, that takes the ranks' parts one after another (accumulate=)."""
    model, step = case.built(0, process_group=place.alone, **{"accumulate": place.size, **options})
    for batch in case.batches():
        for parts in zip(*(tensor.chunk(place.size) for tensor in batch), strict=True):
            step(*parts)
    return model, step


def trained_jointly(place: Place, case: Case, **options: Any) -> nn.Module:
    """One process that takes the whole batches."""
    model, step = case.built(0, process_group=place.alone, **options)
    for batch in case.batches():
        step(*batch)
    return model


def same_everywhere(step: amp.TrainingStep, *models: nn.Module) -> list[Tensor]:
    """All that must be the same on every rank."""
    states = [tensor for one in step._optimizers for state in one.state.values() for tensor in state.values()]
    return [*(tensor for model in models for tensor in weights_of(model)), step.loss_scale, step.skipped_steps, *states]


def overflowing(place: Place, of_one: int, of_the_sum: int) -> Iterator[Tensor]:
    """Six batches, [1, 4], for FP16 with a scale of 1024: the third overflows on rank 1 alone, the fifth in the sum.

    Args:
        of_one: the column in which the third does.
        of_the_sum: that of the fifth.
    """
    for number in range(6):
        x = torch.ones(1, 4)
        if number == 2 and place.rank == 1:
            x[0, of_one] = 1000.0  # times 1024 it is beyond 65504
        if number == 4:
            x[0, of_the_sum] = 80.0  # times 512: 40960 on each rank is finite, their sum is not
        yield x


def step_of(place: Place, model: nn.Module, optimizer: Any = sgd, loss: Any = squares, **options: Any) -> Any:
    """A step of the place's ranks, node by node."""
    result = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer(model.parameters())
    options = {"backend": "eager", "process_group": place.group, **options}
    return amp.training_step(model, loss, result, **options)


def rules(**section: Any) -> dict[str, Any]:
    """`default` with such a section `reduce`."""
    return {"version": 1, "extends": "default", "reduce": section}


def error_of(run: Callable[[], Any]) -> str:
    try:
        run()
    except amp.AmpError as error:
        return str(error)
    return ""
