"""Scenarios of trainings that several ranks do as one process does them; see `rank_harness`, which runs them."""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from rank_harness import (
    CASES,
    Case,
    F,
    Place,
    Tied,
    overflowing,
    programs_of,
    rows,
    same_everywhere,
    scenario,
    sgd,
    squares,
    trained_alone,
    trained_jointly,
    trained_together,
    weights_of,
    words,
)
from torch import Tensor, nn

import amp_compiler as amp
from amp_compiler.ranks.traffic import traffic_of

SEEDS = 8
LOW_TYPES = ("sgd", torch.bfloat16, "bf16"), ("adamw", torch.float16, "fp16")
JOINTLY = ("clipping", "complex")  # AdamW; two ranks do every case, and four in the slow tests


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
def jointly_in_fp32(place: Place) -> dict[str, Any]:
    """The weights of ranks, and of one process on whole batches."""
    found: dict[str, Any] = {}
    for name, case in ((name, CASES[name]) for name in JOINTLY):
        found[name] = {"together": weights_of(trained_together(place, case, enabled=False)[0])}
        if place.rank == 0:
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


class Checksummed(nn.Linear):
    """Its forward calls a function of C of which Dynamo gives a warning, once in a process."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + zlib.adler32(b"") - 1


@scenario
def notices(place: Place) -> dict[str, Any]:
    """What each rank says of captures, of a step in subgraphs and of a rule that matches nothing; torch's warnings."""
    said: list[str] = []
    logger, handler = logging.getLogger("amp_compiler"), logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        rules = {"version": 1, "extends": "default", "rules": [{"match": {"module": "none"}, "precision": "fp32"}]}
        _, step = CASES["sgd"].made(0, process_group=place.group, dtype="bf16", rules=rules)
        for length in (4, 3):
            x, y = map(place.part, rows(1)[0])
            step(x[:length], y[:length])
        _, step = replace(CASES["sgd"], model=lambda: Checksummed(8, 4)).made(
            0, process_group=place.group, dtype="bf16"
        )
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            step(x, y)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return {"said": said, "warned": [str(one.message) for one in warned], "plan": str(step.plan)}


@scenario
def accumulated(place: Place) -> dict[str, Any]:
    """Batches of two parts each: the ranks reduce once for both."""
    case = replace(CASES["adamw"], options={"accumulate": 2, "clip_norm": 0.1})
    model, step = trained_together(place, case, dtype="fp16")
    texts = [program.report.graph_module.print_readable(print_output=False) for program in programs_of(step)]
    found = {
        "same": same_everywhere(step, model),
        "messages": sorted(text.count("all_reduce.default(") for text in texts),
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


@scenario
def overflows(place: Place) -> dict[str, Any]:
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


class Gan:
    """Two steps with an optimizer each over shared modules.

    Args:
        seed: of the weights.
        between: what stands in the generator behind its first layer.
        options: of both steps.
    """

    def __init__(self, seed: int, between: Callable[[int], nn.Module], **options: Any) -> None:
        torch.manual_seed(seed)
        nets = self.nets = {
            "generator": nn.Sequential(nn.Linear(4, 16, bias=False), between(16), nn.ReLU(), nn.Linear(16, 8)),
            "judge": nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)),
        }

        def judged(nets: Any, real: Tensor, noise: Tensor) -> Tensor:
            made = nets["generator"](noise).detach()
            return F.softplus(-nets["judge"](real)).mean() + F.softplus(nets["judge"](made)).mean()

        def fooled(nets: Any, noise: Tensor) -> Tensor:
            return F.softplus(-nets["judge"](nets["generator"](noise))).mean()

        optimizers = {name: torch.optim.Adam(net.parameters(), 1e-3) for name, net in nets.items()}
        self.losses, self.optimizers = {"judge": judged, "generator": fooled}, optimizers
        self.judge = amp.training_step(nets, judged, optimizers["judge"], backend="eager", **options)
        self.generator = amp.training_step(nets, fooled, optimizers["generator"], backend="eager", **options)

    def trained(self, part: Callable[[Tensor], Tensor]) -> list[float]:
        """The judge's losses, of parts of the batches."""
        losses = []
        for real, noise in rows():
            losses.append(float(self.judge(part(real), part(noise))))
            self.generator(part(noise))
        return losses

    def weights(self) -> list[Tensor]:
        return [value for net in self.nets.values() for value in weights_of(net)]


@scenario
def a_gan(place: Place) -> dict[str, Any]:
    """In FP16, with BatchNorm; and in FP32 without, as one process trains it on whole batches."""
    gan = Gan(place.rank, nn.BatchNorm1d, dtype="fp16", process_group=place.group)
    found = {"losses": gan.trained(place.part), "batches": int(gan.nets["generator"][1].num_batches_tracked)}
    found["same"] = [*same_everywhere(gan.judge, *gan.nets.values()), *same_everywhere(gan.generator)]
    exact = Gan(place.rank, nn.LayerNorm, enabled=False, process_group=place.group)
    exact.trained(place.part)
    alone = Gan(0, nn.LayerNorm, enabled=False, process_group=place.alone)
    if place.rank == 0:
        alone.trained(lambda batch: batch)
    return {**found, "together": exact.weights(), "jointly": alone.weights()}


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
def delayed_scales(place: Place) -> dict[str, Any]:
    """What FP8 operands were in the last step, each rank with another batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16))
    step = amp.training_step(
        model, squares, sgd(model.parameters()), rules="fp8-delayed", dtype="bf16", backend="eager",
        process_group=place.group,
    )  # fmt: skip
    step(torch.full((2, 16), 2.0**place.rank), torch.zeros(2, 16))
    return {"kept": step.state_dict()["amp_compiler"]["amaxes"]["0:0"]}


@scenario
def low_types(place: Place) -> dict[str, Any]:
    """How far FP16 and BF16 lead from FP32: here, and with torch.autocast and DistributedDataParallel."""
    return _low_types(place, LOW_TYPES)


@scenario
def low_types_of_fp16(place: Place) -> dict[str, Any]:
    return _low_types(place, LOW_TYPES[1:])


def _low_types(place: Place, kinds: Sequence[tuple[str, torch.dtype, str]]) -> dict[str, Any]:
    found = {}
    for name, dtype, short in kinds:
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
            "sent": [traffic_of(one.report.graph_module.graph, place.size, ()).sent for one in programs_of(step)],
        }
    return found


@scenario
def low_types_of_seeds(place: Place) -> dict[str, Any]:
    """How far 16-bit types lead from FP32, by the weights and batches of several seeds: L2 norms of the difference."""
    found: dict[str, Any] = {}
    for seed, name in ((seed, name) for seed in range(SEEDS) for name in ("sgd", "adamw")):
        case = replace(CASES[name], batches=lambda seed=seed: rows(50, 1000 + seed))
        exact = [weight.double() for weight in _trained(place, case, seed, enabled=False)]
        for dtype, short in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
            low = replace(case, options={"loss_scale": amp.DynamicLossScale(128.0), "dtype": short})
            ways = {
                "theirs": _with_autocast(place, low, dtype, seed),
                "whole": _trained(place, low, seed),
                "split": _trained(place, low, seed, rules={"version": 1, "extends": "default", "reduce": SPLIT}),
                "in fp32": _trained(place, low, seed, rules={"version": 1, "extends": "default", "reduce": IN_FP32}),
            }
            for way, weights in ways.items():
                off = torch.cat([(a.double() - b).flatten() for a, b in zip(weights, exact, strict=True)])
                found.setdefault((short, name, way), []).append(float(off.norm()))
    return found


SPLIT: dict[str, Any] = {"shard": "update"}
IN_FP32: dict[str, Any] = {"precision": "fp32"}


def _trained(place: Place, case: Case, seed: int, **options: Any) -> list[Tensor]:
    """The FP32 weights, or masters, that ranks have trained."""
    model, step = case.made(seed, process_group=place.group, **options)
    for batch in case.batches():
        step(*map(place.part, batch))
    states = step._optimizers[0].state_dict()["state"]
    return [states[n].get("master", one).detach().view(one.shape) for n, one in enumerate(model.parameters())]


def _with_autocast(place: Place, case: Case, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    model = case.model()
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=place.group)
    optimizer = case.optimizer(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0, enabled=dtype is torch.float16)
    clip_norm, gathered = case.options.get("clip_norm"), case.options.get("accumulate", 1)
    for number, batch in enumerate(case.batches(), 1):
        updates = number % gathered == 0
        with contextlib.nullcontext() if updates else wrapped.no_sync():
            with torch.autocast("cpu", dtype):
                loss = case.loss(wrapped, *map(place.part, batch)) / gathered
            scaler.scale(loss).backward()
        if updates:
            if clip_norm is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return [one.detach().clone() for one in model.parameters()]


@scenario
def low_types_of_cases(place: Place) -> dict[str, Any]:
    """As `low_types_of_seeds`, of what else a training has: distances of theirs and ours."""
    found: dict[str, Any] = {}
    for seed, name in ((seed, name) for seed in range(SEEDS_OF_CASES) for name in (*LOW_CASES, "overflow", "gan")):
        for dtype, short in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
            options = {"dtype": short, "loss_scale": amp.DynamicLossScale(128.0)}
            if name == "gan":
                made = (
                    Gan(seed, nn.LayerNorm, enabled=False, process_group=place.group),
                    Gan(seed, nn.LayerNorm, **options, process_group=place.group),
                )
                for one in made:
                    one.trained(place.part)
                exact, ours = (one.weights() for one in made)
                theirs = _gan_with_autocast(place, seed, dtype)
            else:
                case = replace(LOW_CASES.get(name, CASES["sgd"]), batches=_batches_of(name, seed))
                low = replace(case, options={**case.options, **options})
                if name == "overflow":
                    if short == "bf16":
                        continue  # has FP32's range
                    low = replace(low, batches=lambda batches=low.batches: _overflows_on_one_rank(place, batches()))
                exact = _trained(place, case, seed, enabled=False)
                theirs, ours = _with_autocast(place, low, dtype, seed), _trained(place, low, seed)
            off = [
                float(torch.cat([(a.double() - b).flatten() for a, b in zip(one, exact, strict=True)]).norm())
                for one in (theirs, ours)
            ]
            found.setdefault((short, name), []).append(off)
    return found


SEEDS_OF_CASES = 5
LOW_CASES = {
    "clipping": CASES["clipping"],
    "tied": Case(Tied, words, rows, sgd, {}),
    "accumulated": replace(CASES["adamw"], options={"accumulate": 2}),
}


def _batches_of(name: str, seed: int) -> Callable[[], list[tuple[Tensor, ...]]]:
    def made() -> list[tuple[Tensor, ...]]:
        found = rows(100 if name == "accumulated" else 50, 1000 + seed)
        if name == "tied":  # places of the largest as words
            return [(torch.cat([x, y], 1).argmax(1), x.argmax(1)) for x, y in found]
        return found

    return made


def _overflows_on_one_rank(place: Place, batches: list[tuple[Tensor, ...]]) -> Any:
    """One batch more in the midst, of which the second rank's rows are too large for FP16."""
    x, y = (one.clone() for one in batches[20])
    if place.rank == 1:
        place.part(y).fill_(1e30)
    return [*batches[:20], (x, y), *batches[20:]]


def _gan_with_autocast(place: Place, seed: int, dtype: torch.dtype) -> list[Tensor]:
    """As DistributedDataParallel, which takes one loss of one module, averages FP32 gradients of both steps."""
    gan = Gan(seed, nn.LayerNorm, enabled=False, process_group=place.alone)
    scalers = {name: torch.amp.GradScaler("cpu", 128.0, enabled=dtype is torch.float16) for name in gan.nets}
    for real, noise in rows():
        for name, batch in (("judge", (real, noise)), ("generator", (noise,))):
            with torch.autocast("cpu", dtype):
                loss = gan.losses[name](gan.nets, *map(place.part, batch))
            own = list(gan.nets[name].parameters())
            gradients = torch.autograd.grad(scalers[name].scale(loss), own)
            for parameter, gradient in zip(own, gradients, strict=True):
                parameter.grad = gradient / place.size
                dist.all_reduce(parameter.grad, group=place.group)
            scalers[name].step(gan.optimizers[name])
            scalers[name].update()
    return gan.weights()


class Forked(nn.Module):
    """Two heads, of which a Python value says which one runs; a third that none of the ranks runs."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.unused = nn.Sequential(nn.Linear(8, 8), nn.SyncBatchNorm(8)), nn.Linear(8, 4)
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
    step = amp.training_step(
        model,
        squares,
        optimizer,
        dtype="bf16",
        backend="eager",
        process_group=place.group,
        rules={"version": 1, "extends": "default", "reduce": {"bucket_mb": 0.0001}},  # sent between the norm's messages
    )
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
def in_subgraphs(place: Place) -> dict[str, Any]:
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
