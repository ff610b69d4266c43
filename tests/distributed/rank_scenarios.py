"""What the processes of the tests beside it do: each scenario runs on every rank, one by one.

A scenario is a function of its place in a group of its own; what it returns is what the tests look at. All of them run
in the same few processes, because starting one takes longer than most scenarios.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor, nn

import amp_compiler as amp
from amp_compiler.distributed.ranks import Ranks

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
COMPILED = ("compiled",)  # takes Inductor's seconds
SEEDED = ("low_types_of_seeds",)  # takes many trainings, of the other pairs of type and optimizer too
SEEDS = 8
FOUR = ("in_fp32", "accumulated")  # of four ranks
FEW_OF_FOUR = ("low_weights", "differences_later")  # which take little
WAITING = ("a_rank_that_never_comes",)  # takes a timeout's seconds


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


def run_ranks(size: int, names: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    """Run scenarios in so many processes; what each returned, by name and rank.

    They are forks of one process that has imported what they need, and done nothing else.
    """
    processes.set_forkserver_preload(["torch.distributed", "torch._dynamo", "amp_compiler.training.step"])
    with tempfile.TemporaryDirectory() as folder:
        processes.start_processes(_run, (size, list(names), folder), size, start_method="forkserver")  # type: ignore[no-untyped-call]
        found = [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(size)]
    return {name: [one[name] for one in found] for name in found[0]}


def _run(rank: int, size: int, names: list[str], folder: str) -> None:
    import checkpoint_scenarios  # noqa: F401  # adds its own to the table; here, because it imports this module
    import shard_scenarios  # noqa: F401

    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    found: dict[str, Any] = {}
    for name in names:
        seconds = 3 if name in WAITING else 60
        group = dist.new_group(list(range(size)), timeout=datetime.timedelta(seconds=seconds))
        try:
            found[name] = SCENARIOS[name](Place(rank, size, group, Path(folder)))
        except Exception as error:  # noqa: BLE001  # the test of this scenario shows it
            found[name] = {"error": f"{type(error).__name__}: {error}", "is_ours": isinstance(error, amp.AmpError)}
        dist.barrier()
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


# Models and batches: of all ranks together, from fixed seeds.


class Tied(nn.Module):
    """An embedding whose table is the head's weight as well."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(16, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.table(ids))))


class Rotated(nn.Module):
    """A layer with a complex weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.turns = nn.Linear(8, 4), nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x) * self.turns).abs()


def dense(wide: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(8, wide), nn.GELU(), nn.LayerNorm(wide), nn.Linear(wide, 4))


def squares(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


def words(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


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

    def made(self, seed: int, **options: Any) -> tuple[nn.Module, amp.TrainingStep]:
        torch.manual_seed(seed)
        model = self.model()
        options = {"backend": "eager", **self.options, **options}
        return model, amp.training_step(model, self.loss, self.optimizer(model.parameters()), **options)


CASES = {
    "sgd": Case(dense, squares, rows, sgd, {}),
    "adamw": Case(dense, squares, rows, adamw, {}),
    "clipping": Case(dense, squares, rows, adamw, {"clip_norm": 0.1}),
    "tied": Case(Tied, words, ids, sgd, {}),
    "traced": Case(dense, squares, rows, adagrad, {}),
    "complex": Case(Rotated, squares, rows, adamw, {"clip_norm": 0.1}),
}


def trained_together(place: Place, case: Case, **options: Any) -> tuple[nn.Module, amp.TrainingStep]:
    """Ranks that begin with weights of their own, and train each on a part of every batch."""
    model, step = case.made(place.rank, process_group=place.group, **options)
    for batch in case.batches():
        step(*map(place.part, batch))
    return model, step


def trained_alone(place: Place, case: Case, **options: Any) -> tuple[nn.Module, amp.TrainingStep]:
    """One process, with the weights of rank 0, that takes the ranks' parts one after another (accumulate=)."""
    model, step = case.made(0, process_group=place.alone, accumulate=place.size, **options)
    for batch in case.batches():
        for parts in zip(*(tensor.chunk(place.size) for tensor in batch), strict=True):
            step(*parts)
    return model, step


def trained_jointly(place: Place, case: Case, **options: Any) -> nn.Module:
    """One process that takes the whole batches."""
    model, step = case.made(0, process_group=place.alone, **options)
    for batch in case.batches():
        step(*batch)
    return model


@scenario
def in_fp32(place: Place) -> dict[str, Any]:
    """Every case: the weights of ranks, of one process on their parts, and of one on whole batches."""
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        ours, step = trained_together(place, case, enabled=False)
        found[name] = {"together": weights_of(ours), "norm": step.grad_norm.clone(), "gradients": step.gradients()}
        if place.rank == 0:
            found[name]["alone"] = weights_of(trained_alone(place, case, enabled=False)[0])
            found[name]["jointly"] = weights_of(trained_jointly(place, case, enabled=False))
    return found


@scenario
def seeds(place: Place) -> dict[str, Any]:
    """Dropout of two ranks on the same batch, and what one process draws from the seed of each."""
    case = replace(CASES["adamw"], model=lambda: nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4)))
    (batch,) = rows(1)
    found: dict[str, Any] = {}
    for name, group in {"together": place.group, "alone": place.alone}.items():
        model, step = case.made(0, process_group=group, dtype="bf16")
        torch.manual_seed(100 + place.rank)
        losses = [step(*batch).clone() for _ in range(3)]
        found[name] = {"losses": losses, "drawn": torch.get_rng_state()}
        found["same"] = found.get("same", same_everywhere(step, model))
    return found


def same_everywhere(step: amp.TrainingStep, *models: nn.Module) -> list[Tensor]:
    """All that must be the same on every rank."""
    states = [tensor for one in step._optimizers for state in one.state.values() for tensor in state.values()]
    return [*(tensor for model in models for tensor in weights_of(model)), step.loss_scale, step.skipped_steps, *states]


@scenario
def accumulated(place: Place) -> dict[str, Any]:
    """Batches of two parts each: the ranks reduce once for both."""
    case = replace(CASES["adamw"], options={"accumulate": 2, "clip_norm": 0.1})
    model, step = trained_together(place, case, dtype="fp16")
    texts = [program.graph_module.print_readable(print_output=False) for program in step._programs.values()]
    found = {
        "same": same_everywhere(step, model),
        "messages": sorted(text.count("all_to_all_single.default(") for text in texts),
    }
    exact, _ = trained_together(place, case, enabled=False)
    if place.rank == 0:
        alone, one = case.made(0, process_group=place.alone, accumulate=2 * place.size, enabled=False)
        for first, second in zip(*[iter(case.batches())] * 2, strict=True):
            for x, y in (first, second):
                for part in zip(x.chunk(place.size), y.chunk(place.size), strict=True):
                    one(*part)
        found |= {"together": weights_of(exact), "alone": weights_of(alone)}
    return found


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


@contextlib.contextmanager
def sums_in_messages() -> Iterator[None]:
    """Within it steps are made as for a group that does not go through gloo: messages add, in the type of gradients."""
    known = Ranks.uses_gloo
    Ranks.uses_gloo = lambda self, device: False  # type: ignore[method-assign]
    try:
        yield
    finally:
        Ranks.uses_gloo = known  # type: ignore[method-assign]


@scenario
def overflows(place: Place) -> dict[str, Any]:
    """As the ranks add by themselves, and as messages do."""
    found = overflowed(place)
    with sums_in_messages():
        return {**found, "in messages": overflowed(place)}


def overflowed(place: Place) -> dict[str, Any]:
    """FP16: at the third step one rank alone overflows, at the fifth the sum alone."""
    model = nn.Linear(4, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    step = amp.training_step(
        model,
        lambda m, x: m(x).sum(),
        optimizer,
        dtype="fp16",
        loss_scale=1024.0,
        process_group=place.group,
        backend="eager",
    )
    scale = amp.DynamicLossScale(1024.0, growth_interval=1000)
    dynamic = amp.training_step(
        model,
        lambda m, x: m(x).sum(),
        optimizer,
        dtype="fp16",
        loss_scale=scale,
        process_group=place.group,
        backend="eager",
    )
    found: dict[str, Any] = {"weights": [], "skipped": [], "scales": []}
    for x in overflowing(place, of_one=2, of_the_sum=1):
        dynamic(x)
        found["weights"].append(model.weight.detach().clone())
        found["skipped"].append(int(dynamic.skipped_steps))
        found["scales"].append(float(dynamic.loss_scale))
    found["report"] = None
    step(x * (1000 if place.rank == 1 else 1))
    found["same"] = same_everywhere(step, model)
    found["report"] = step.nonfinite_report(cure=False)
    return found


@scenario
def a_gan(place: Place) -> dict[str, Any]:
    """Two steps with an optimizer each over shared modules, one of them with BatchNorm."""
    torch.manual_seed(place.rank)
    nets = {
        "generator": nn.Sequential(nn.Linear(4, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8)),
        "judge": nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)),
    }

    def judged(nets: Any, real: Tensor, noise: Tensor) -> Tensor:
        made = nets["generator"](noise).detach()
        return F.softplus(-nets["judge"](real)).mean() + F.softplus(nets["judge"](made)).mean()

    def fooled(nets: Any, noise: Tensor) -> Tensor:
        return F.softplus(-nets["judge"](nets["generator"](noise))).mean()

    optimizers = {name: torch.optim.Adam(net.parameters(), 1e-3) for name, net in nets.items()}
    options: dict[str, Any] = {"dtype": "fp16", "process_group": place.group, "backend": "eager"}
    judge = amp.training_step(nets, judged, optimizers["judge"], **options)
    generator = amp.training_step(nets, fooled, optimizers["generator"], **options)
    losses = []
    for real, noise in rows():
        losses.append(float(judge(place.part(real), place.part(noise))))
        generator(place.part(noise))
    return {
        "same": [*same_everywhere(judge, *nets.values()), *same_everywhere(generator)],
        "losses": losses,
        "batches": int(nets["generator"][1].num_batches_tracked),
    }


@scenario
def buffers(place: Place) -> dict[str, Any]:
    """BatchNorm's statistics: those of the first rank, or each rank's own."""
    found = {}
    for name, broadcast in (("broadcast", True), ("local", False)):
        torch.manual_seed(place.rank)
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        step = amp.training_step(
            model,
            squares,
            sgd(model.parameters()),
            dtype="bf16",
            backend="eager",
            process_group=place.group,
            broadcast_buffers=broadcast,
        )
        means = [torch.zeros(8)]
        for batch in rows(3):
            means.append(
                0.9 * means[-1]
                + 0.1
                * (
                    place.part(batch[0]).bfloat16() @ model[0].weight.detach().bfloat16().t()
                    + model[0].bias.detach().bfloat16()
                )
                .float()
                .mean(0)
            )
            step(*map(place.part, batch))
        found[name] = {
            "weights": [p.detach().clone() for p in model.parameters()],
            "buffers": [b.clone() for b in model.buffers()],
            "own": means[-1],
        }
    return found


@scenario
def low_types(place: Place) -> dict[str, Any]:
    """How far FP16 and BF16 lead from FP32: here, and with torch.autocast and DistributedDataParallel."""
    found = {}
    for name, dtype, short in (("sgd", torch.bfloat16, "bf16"), ("adamw", torch.float16, "fp16")):
        case = replace(CASES[name], options={"loss_scale": amp.DynamicLossScale(128.0)})
        ours, step = trained_together(place, case, dtype=short)
        in_fp32, _ = trained_together(
            place, case, dtype=short, rules={"version": 1, "extends": "default", "reduce": {"precision": "fp32"}}
        )
        found[short, name] = {
            "fp32": weights_of(trained_together(place, CASES[name], enabled=False)[0]),
            "ours": weights_of(ours),
            "ours, sums in FP32": weights_of(in_fp32),
            "theirs": _with_autocast(place, case, dtype),
            "same": same_everywhere(step, ours),
        }
    return found


@scenario
def low_types_of_seeds(place: Place) -> dict[str, Any]:
    """How far 16-bit types lead from FP32, by the weights and batches of several seeds: L2 norms of the difference."""
    found: dict[str, Any] = {}
    for seed, name in ((seed, name) for seed in range(SEEDS) for name in ("sgd", "adamw")):
        case = replace(CASES[name], batches=lambda seed=seed: rows(STEPS, 1000 + seed))
        exact = [weight.double() for weight in _trained(place, case, seed, enabled=False)]
        for dtype, short in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
            low = replace(case, options={"loss_scale": amp.DynamicLossScale(128.0), "dtype": short})
            ways = {
                "theirs": _with_autocast(place, low, dtype, seed),
                "whole": _trained(place, low, seed),
                "split": _trained(place, low, seed, rules={"version": 1, "extends": "default", "reduce": SPLIT}),
                "in messages": _in_messages(place, low, seed),
            }
            for way, weights in ways.items():
                off = torch.cat([(a.double() - b).flatten() for a, b in zip(weights, exact, strict=True)])
                found.setdefault((short, name, way), []).append(float(off.norm()))
    return found


SPLIT: dict[str, Any] = {"shard": "update"}


def _trained(place: Place, case: Case, seed: int, **options: Any) -> list[Tensor]:
    """The FP32 weights, or masters, that ranks have trained."""
    model, step = case.made(seed, process_group=place.group, **options)
    for batch in case.batches():
        step(*map(place.part, batch))
    states = step._optimizers[0].state_dict()["state"]
    return [states[n].get("master", one).detach().view(one.shape) for n, one in enumerate(model.parameters())]


def _in_messages(place: Place, case: Case, seed: int) -> list[Tensor]:
    with sums_in_messages():
        return _trained(place, case, seed)


def _with_autocast(place: Place, case: Case, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    model = case.model()
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=place.group)
    optimizer = case.optimizer(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0, enabled=dtype is torch.float16)
    for batch in case.batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype):
            loss = case.loss(wrapped, *map(place.part, batch))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return weights_of(model)


class Forked(nn.Module):
    """Two heads, of which a Python value says which one runs; a third that none of the ranks runs."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.unused = nn.Linear(8, 8), nn.Linear(8, 4)
        self.heads = nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)])
        self.chosen = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.heads[self.chosen](self.base(x))


@scenario
def missing_gradients(place: Place) -> dict[str, Any]:
    """A rank that runs another head; then both run one; then they exchange them."""
    found: dict[str, Any] = {"weights": []}
    torch.manual_seed(place.rank)
    model = Forked()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    step = amp.training_step(model, squares, optimizer, dtype="bf16", backend="eager", process_group=place.group)
    before = model.unused.weight.detach().clone()
    for number, batch in enumerate(rows(12)):
        model.chosen = 0 if number % 4 == 2 else (place.rank + number // 4) % 2
        step(*map(place.part, batch))
        found["weights"].append(weights_of(model))
    found["unused"] = torch.equal(before, model.unused.weight)
    found["states"] = len(optimizer.state)
    found["steps"] = [float(state["step"]) for _, state in sorted(optimizer.state_dict()["state"].items())]
    return found


@scenario
def a_checkpoint(place: Place) -> dict[str, Any]:
    """Saved by every rank, the same; loaded by one process, which goes on as the ranks do; and by the ranks."""
    options = {"rules": {"version": 1, "extends": "default", "reduce": {"precision": "fp32"}}, "dtype": "fp16"}
    case = replace(CASES["adamw"], options=options)
    model, step = case.made(place.rank, process_group=place.group)
    batches = case.batches()[:10]
    for batch in batches[:5]:
        step(*map(place.part, batch))
    (optimizer,) = step._optimizers
    saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step.state_dict()})
    for batch in batches[5:]:
        step(*map(place.part, batch))

    def resumed(group: Any, accumulate: int, parts: Callable[[Tensor], Sequence[Tensor]]) -> list[Tensor]:
        again, other = case.made(7, process_group=group, accumulate=accumulate)
        again.load_state_dict(saved["model"])
        other._optimizers[0].load_state_dict(copy.deepcopy(saved["optimizer"]))  # which keeps the tensors
        other.load_state_dict(saved["step"])
        for batch in batches[5:]:
            for part in zip(*map(parts, batch), strict=True):
                other(*part)
        return weights_of(again)

    return {
        "saved": saved,
        "went on": weights_of(model),
        "ranks": resumed(place.group, 1, lambda tensor: [place.part(tensor)]),
        "alone": resumed(place.alone, place.size, lambda tensor: tensor.chunk(place.size)),
    }


@scenario
def compiled_in_ddp(place: Place) -> dict[str, Any]:
    """The other way: DistributedDataParallel around amp.compile, in a loop of one's own."""
    case = CASES["sgd"]
    torch.manual_seed(0)
    model = case.model()
    wrapped = nn.parallel.DistributedDataParallel(
        amp.compile(model, dtype="bf16", backend="eager"), process_group=place.group
    )
    optimizer = case.optimizer(model.parameters())
    for batch in case.batches()[:5]:
        optimizer.zero_grad()
        case.loss(wrapped, *map(place.part, batch)).backward()
        optimizer.step()
    return {"weights": weights_of(model)}


@scenario
def a_mesh(place: Place) -> dict[str, Any]:
    """A mesh of one dimension is its group; of more, the dimension has to be said."""
    from torch.distributed.device_mesh import init_device_mesh

    case = CASES["sgd"]
    line = init_device_mesh("cpu", (place.size,))
    model, step = case.made(place.rank, mesh=line, dtype="bf16")
    step(*map(place.part, case.batches()[0]))
    square = init_device_mesh("cpu", (1, place.size), mesh_dim_names=("pp", "dp"))
    try:
        case.made(place.rank, mesh=square)
        told = ""
    except amp.AmpError as error:
        told = str(error)
    other, again = case.made(place.rank, mesh=square["dp"], dtype="bf16")
    again(*map(place.part, case.batches()[0]))
    return {"line": weights_of(model), "square": weights_of(other), "told": told}


@scenario
def low_weights(place: Place) -> dict[str, Any]:
    """Weights in 16 bits alone, rounded stochastically: by one random state."""
    rules = {"version": 1, "extends": "default", "weights": {"master": "low", "rounding": "stochastic"}}
    case = replace(CASES["adamw"], options={"rules": rules}, model=lambda: nn.Linear(8, 4), batches=lambda: rows(10))
    model, step = trained_together(place, case, dtype="bf16")
    return {"same": same_everywhere(step, model)}


@scenario
def compiled(place: Place) -> dict[str, Any]:
    """By Inductor, in FP32, in several buckets."""
    rules = {"version": 1, "extends": "default", "reduce": {"bucket_mb": 0.0001}}
    case = replace(CASES["adamw"], options={"rules": rules, "clip_norm": 0.5}, batches=lambda: rows(10))
    model, step = trained_together(place, case, enabled=False, backend="inductor")
    eager, _ = trained_together(place, case, enabled=False)
    return {"same": same_everywhere(step, model), "together": weights_of(model), "eager": weights_of(eager)}


class Judging(nn.Module):
    """A value decides which head runs, so that it is no one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.heads = nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)])

    def forward(self, x: Tensor) -> Tensor:
        return self.heads[int(x[0, 0] > 0)](self.norm(self.base(x)))


@scenario
def in_pieces(place: Place) -> dict[str, Any]:
    """A loss that is no one graph, whose ranks run other heads at other steps."""
    case = Case(Judging, squares, lambda: rows(6), sgd, {"clip_norm": 0.5})
    model, step = trained_together(place, case, dtype="bf16")
    found = {
        "same": same_everywhere(step, model),
        "execution": step.execution,
        "weights": [p.detach() for p in model.parameters()],
    }
    wide = {"version": 1, "extends": "default", "reduce": {"precision": "fp32"}}
    model, step = trained_together(place, case, dtype="bf16", rules=wide)
    alone, _ = trained_alone(place, case, dtype="bf16", rules=wide)
    found["wide"] = [p.detach() for p in model.parameters()]
    found["alone"] = [p.detach() for p in alone.parameters()]
    return found


@dataclass
class Sample:
    """A batch of a type of one's own."""

    x: Tensor
    y: Tensor


BATCHES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "list": lambda x, y: [x, y],
    "dict": lambda x, y: {"x": x, "y": y},
    "nested": lambda x, y: {"pair": [x, (y,)]},
    "dataclass": Sample,
    "list of dataclasses": lambda x, y: [Sample(x, y)],
}


def of_any_kind(model: Any, batch: Any) -> Tensor:
    """The loss of a batch of one of `BATCHES`."""
    if isinstance(batch, list) and len(batch) == 1:
        (batch,) = batch
    if isinstance(batch, Sample):
        return squares(model, batch.x, batch.y)
    if isinstance(batch, list):
        return squares(model, *batch)
    if "pair" in batch:
        return squares(model, batch["pair"][0], *batch["pair"][1])
    return squares(model, batch["x"], batch["y"])


@scenario
def batches_of_other_kinds(place: Place) -> dict[str, Any]:
    """Batches in containers and classes, the same kind on all ranks, and another one on the second."""
    found: dict[str, Any] = {}
    case = replace(CASES["sgd"], options={"dtype": "bf16"}, batches=lambda: rows(4))
    found["tensors"] = weights_of(trained_together(place, case)[0])
    other = replace(case, loss=of_any_kind)
    kinds = {name: (name, name) for name in BATCHES}
    kinds |= {f"{name} beside a list": ("list", name) for name in BATCHES if name != "list"}
    for name, given in kinds.items():
        model, step = other.made(place.rank, process_group=place.group)

        def run(step: Any = step, make: Any = BATCHES[given[place.rank]]) -> None:
            for batch in case.batches():
                step(make(*map(place.part, batch)))

        found[name] = {"told": told(run), "weights": weights_of(model), "by": step.execution if step._last else ""}
    for name, make in BATCHES.items():
        model, step = other.made(place.rank, process_group=place.group)
        x, y = map(place.part, case.batches()[0])
        end = 4 - place.rank
        uneven = told(lambda: step(make(x[:end], y[:end])))  # noqa: B023  # called at once
        step(make(x, y))
        again = told(lambda: step(make(x[:end], y[:end])))  # noqa: B023
        found[f"uneven {name}"] = {"told": uneven, "again": again, "weights": weights_of(model)}
    return found


# What goes wrong: each returns what this rank was told, by what it was.


def told(run: Callable[[], Any]) -> str:
    try:
        run()
    except amp.AmpError as error:
        return str(error)
    return ""


@scenario
def differences(place: Place) -> dict[str, Any]:
    """The second rank has something else, from the beginning."""
    case, odd = CASES["sgd"], place.rank == 1

    def made(**options: Any) -> str:
        return told(lambda: case.made(0, process_group=place.group, dtype="bf16", **options))

    found = {
        "rules": made(rules={"version": 1, "extends": "default", "deny": ["aten.gelu"]} if odd else "default"),
        "preset": made(rules="fast" if odd else "default"),
        "options": made(clip_norm=1.0 if odd else None),
        "fails": made(backend="nonsense" if odd else "eager"),
    }
    other = replace(case, model=lambda: dense(17 if odd else 16))
    found["shapes"] = told(lambda: other.made(0, process_group=place.group))
    other = replace(case, model=lambda: nn.Sequential(*dense(), nn.Tanh() if odd else nn.Sigmoid()))
    found["modules"] = told(lambda: other.made(0, process_group=place.group))
    other = replace(case, optimizer=adamw if odd else sgd)
    found["optimizers"] = told(lambda: other.made(0, process_group=place.group))
    version = torch.__version__
    if odd:
        torch.__version__ = "2.0.1"
    found["torch"] = made()
    torch.__version__ = version
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + int(odd))
    found["threads"] = made()
    torch.set_num_threads(threads)
    return found


@scenario
def differences_later(place: Place) -> dict[str, Any]:
    """The second rank differs at a call; behind the error all of them go on."""
    case, odd = CASES["sgd"], place.rank == 1
    model, step = case.made(0, process_group=place.group, dtype="bf16")
    batches = case.batches()
    x, y = map(place.part, batches[0])
    found = {"first shape": told(lambda: step(x[: 3 if odd else 4], y[: 3 if odd else 4]))}
    step(x, y)
    found["later shape"] = told(lambda: step(x[: 2 if odd else 4], y[: 2 if odd else 4]))
    (optimizer,) = step._optimizers
    optimizer.param_groups[0]["lr"] = 0.5 if odd else 0.05
    found["rate"] = told(lambda: step(x, y))
    optimizer.param_groups[0]["lr"] = 0.05
    found["fails"] = told(lambda: step({"x": x}, y) if odd else step(x, y))
    step.model.train(not odd)
    step.model.train()
    step(x, y)
    found["same"] = same_everywhere(step, model)
    other, again = case.made(0, process_group=place.group, dtype="bf16")
    if odd:
        other.load_state_dict(case.model().state_dict())
    found["loaded"] = told(lambda: again(x, y))
    return found


@scenario
def what_is_refused(place: Place) -> dict[str, Any]:
    """Models that are spread over the ranks already."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (place.size,))

    def step_of(model: nn.Module) -> str:
        return told(
            lambda: amp.training_step(model, squares, sgd(model.parameters()), process_group=place.group)(
                *map(place.part, rows(1)[0])
            )
        )

    plan = {"0": ColwiseParallel()}
    return {
        "DDP": step_of(nn.parallel.DistributedDataParallel(dense(), process_group=place.group)),
        "FSDP": step_of(fully_shard(dense(), mesh=mesh)),
        "DTensor": step_of(parallelize_module(nn.Sequential(nn.Linear(8, 4)), mesh, plan)),
        "SyncBatchNorm": step_of(
            nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)))
        ),
    }


@scenario
def a_rank_that_never_comes(place: Place) -> dict[str, Any]:
    """The second rank stops by itself, between two steps."""
    case = CASES["sgd"]
    _, step = case.made(0, process_group=place.group, dtype="bf16")
    x, y = map(place.part, case.batches()[0])
    step(x, y)
    return {"told": "" if place.rank == 1 else told(lambda: step(x, y))}
