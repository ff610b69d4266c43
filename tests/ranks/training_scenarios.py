"""Scenarios of trainings that several ranks do as one process does them; see `rank_harness`, which runs them."""

import contextlib
import itertools
import logging
import warnings
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from rank_harness import (
    CASES,
    STEPS,
    Case,
    F,
    Place,
    Tied,
    adamw,
    overflowing,
    rows,
    rules,
    same_everywhere,
    scenario,
    sgd,
    squares,
    step_of,
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
LOW_TYPES = ("sgd", "bf16"), ("adamw", "fp16")
IN_FP32 = tuple(name for name in CASES if name not in ("sgd", "adamw"))  # which are in "tied" and "clipping"
JOINTLY = ("clipping", "complex")  # AdamW; two ranks do every case, and four in the slow tests


@scenario
def in_fp32(place: Place) -> dict[str, Any]:
    """The weights of ranks, of one process on whole batches and, where there are two ranks, of one on their parts."""
    result: dict[str, Any] = {}
    for name in IN_FP32 if place.size == 2 else JOINTLY:
        ours, step = trained_together(place, CASES[name], enabled=False)
        result[name] = {"together": weights_of(ours), "norm": step.grad_norm.clone(), "gradients": step.gradients()}
        if place.rank == 0:
            result[name]["jointly"] = weights_of(trained_jointly(place, CASES[name], enabled=False))
            if place.size == 2:
                result[name]["alone"] = weights_of(trained_alone(place, CASES[name], enabled=False)[0])
    return result


@scenario
def seeds(place: Place) -> dict[str, Any]:
    """Dropout of two ranks on the same batch, and what one process draws from the seed of each."""
    case = replace(CASES["adamw"], model=lambda: nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4)))
    (batch,) = rows(1)
    result: dict[str, Any] = {}
    for name, group in {"together": place.group, "alone": place.alone}.items():
        model, step = case.built(0, process_group=group, dtype="bf16")
        torch.manual_seed(100 + place.rank)
        losses = [step(*batch).clone() for _ in range(3)]
        result[name] = {"losses": losses, "drawn": torch.get_rng_state()}
        result["same"] = result.get("same", same_everywhere(step, model))
    return result


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
        idle = {"version": 1, "extends": "default", "rules": [{"match": {"module": "none"}, "precision": "fp32"}]}
        _, step = CASES["sgd"].built(0, process_group=place.group, dtype="bf16", rules=idle)
        for length in (4, 3):
            x, y = map(place.part, rows(1)[0])
            step(x[:length], y[:length])
        _, step = replace(CASES["sgd"], model=lambda: Checksummed(8, 4)).built(
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
    model, step = trained_together(place, replace(case, batches=lambda: rows(6)), dtype="fp16")
    texts = [
        program.report.graph_module.print_readable(print_output=False) for program in step._choice.programs.values()
    ]
    messages = sorted(text.count("all_reduce.default(") for text in texts)
    result = {"same": same_everywhere(step, model), "messages": messages}
    exact, _ = trained_together(place, case, enabled=False)
    if place.rank == 0:
        alone, _ = trained_alone(place, case, enabled=False, accumulate=2 * place.size)
        result |= {"together": weights_of(exact), "alone": weights_of(alone)}
    return result


@scenario
def overflows(place: Place) -> dict[str, Any]:
    """FP16, the update whole and split: at the third step one rank alone overflows, at the fifth the sum alone.

    Where it is split, that rank does in a part of the gradient that the other one updates.
    """
    result: dict[str, Any] = {}
    for way, section, of_one, of_the_sum in (("whole", {}, 2, 1), ("split", {"shard": "update"}, 0, 3)):
        model = nn.Linear(4, 1, bias=False)
        nn.init.ones_(model.weight)
        scale = amp.DynamicLossScale(1024.0, growth_interval=1000)
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        step = step_of(
            place, model, optimizer, lambda m, x: m(x).sum(), dtype="fp16", loss_scale=scale, rules=rules(**section)
        )
        seen = result[way] = {"weights": [], "skipped": [], "scales": []}
        for number, x in enumerate(overflowing(place, of_one, of_the_sum)):
            step(x)
            seen["weights"].append(model.weight.detach().clone())
            seen["skipped"].append(int(step.skipped_steps))
            seen["scales"].append(float(step.loss_scale))
            if number == 2:
                seen["report"] = step.nonfinite_report(cure=False).parameters
        seen["events"] = [(one.step, one.parameters) for one in step.nonfinite_events()]
        seen["same"] = weights_of(model) if way == "split" else same_everywhere(step, model)
    return result


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
            result = nets["generator"](noise).detach()
            return F.softplus(-nets["judge"](real)).mean() + F.softplus(nets["judge"](result)).mean()

        def fooled(nets: Any, noise: Tensor) -> Tensor:
            return F.softplus(-nets["judge"](nets["generator"](noise))).mean()

        optimizers = {name: torch.optim.Adam(net.parameters(), 1e-3) for name, net in nets.items()}
        self.losses, self.optimizers = {"judge": judged, "generator": fooled}, optimizers
        self.judge = amp.training_step(nets, judged, optimizers["judge"], backend="eager", **options)
        self.generator = amp.training_step(nets, fooled, optimizers["generator"], backend="eager", **options)

    def trained(self, part: Callable[[Tensor], Tensor], steps: int = STEPS) -> list[float]:
        """The judge's losses, of parts of the batches."""
        losses = []
        for real, noise in rows(steps):
            losses.append(float(self.judge(part(real), part(noise))))
            self.generator(part(noise))
        return losses

    def weights(self) -> list[Tensor]:
        return [value for net in self.nets.values() for value in weights_of(net)]


@scenario
def a_gan(place: Place) -> dict[str, Any]:
    """In FP16, with BatchNorm; and in FP32 without, as one process trains it on whole batches."""
    gan = Gan(place.rank, nn.BatchNorm1d, dtype="fp16", process_group=place.group)
    result: dict[str, Any] = {"losses": gan.trained(place.part, 10)}
    result["batches"] = int(gan.nets["generator"][1].num_batches_tracked)
    result["same"] = [*same_everywhere(gan.judge, *gan.nets.values()), *same_everywhere(gan.generator)]
    exact = Gan(place.rank, nn.LayerNorm, enabled=False, process_group=place.group)
    result["exact"] = exact.trained(place.part)
    alone = Gan(0, nn.LayerNorm, enabled=False, process_group=place.alone)
    if place.rank == 0:
        alone.trained(lambda batch: batch)
    return {**result, "together": exact.weights(), "jointly": alone.weights()}


@scenario
def buffers(place: Place) -> dict[str, Any]:
    """BatchNorm's statistics: those of the first rank, or each rank's own."""
    result = {}
    for name, broadcast in (("broadcast", True), ("local", False)):
        torch.manual_seed(place.rank)
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        step = step_of(place, model, dtype="bf16", broadcast_buffers=broadcast)
        mean = torch.zeros(8)
        for batch in rows(3):
            weight, bias, x = (
                one.detach().bfloat16() for one in (model[0].weight, model[0].bias, place.part(batch[0]))
            )
            mean = 0.9 * mean + 0.1 * (x @ weight.t() + bias).float().mean(0)
            step(*map(place.part, batch))
        parameters = [p.detach().clone() for p in model.parameters()]
        result[name] = {"weights": parameters, "buffers": [b.clone() for b in model.buffers()], "own": mean}
    return result


@scenario
def delayed_scales(place: Place) -> dict[str, Any]:
    """What FP8 operands were in the last step, each rank with another batch."""
    torch.manual_seed(0)
    step = step_of(place, nn.Sequential(nn.Linear(16, 16)), rules="fp8-delayed", dtype="bf16")
    step(torch.full((2, 16), 2.0**place.rank), torch.zeros(2, 16))
    return {"kept": step.state_dict()["amp_compiler"]["amaxes"]["0:0"]}


@scenario
def fp8_weights(place: Place) -> dict[str, Any]:
    """Weights of steps that keep them in FP8, and of steps that round them anew; whole, and split over the ranks."""
    result: dict[str, Any] = {"whole": [], "split": []}
    for way, passes in itertools.product(result, ((), amp.pipelines.STEP.skip("place_operands"))):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        section = {"shard": "update", "bucket_mb": 0.0001} if way == "split" else {}
        chosen = {"version": 1, "extends": "fp8-rowwise", "reduce": section}
        step = step_of(place, model, adamw, rules=chosen, dtype="bf16", passes=passes)
        for number in range(4):
            model[0].weight.data.mul_(1 + number % 2)  # past its version counter
            step(torch.full((4, 16), 1.0 + number + place.rank), torch.ones(4, 16))
        result[way].append(weights_of(model))
    return result


@scenario
def low_types(place: Place) -> dict[str, Any]:
    """How far 16-bit types lead from FP32, of one seed, and what the ranks of a step have alike and send."""
    result: dict[str, Any] = {"off": {}, "same": {}, "sent": {}}
    for name, low in LOW_TYPES if place.size == 2 else LOW_TYPES[1:]:
        result["off"] |= _off(place, name, low, 0, but=("split",))
        case = replace(CASES[name], options=_scaled(low), batches=lambda: rows(3))
        model, step = trained_together(place, case)
        result["same"][low, name] = same_everywhere(step, model)
        graphs = [one.report.graph_module.graph for one in step._choice.programs.values()]
        result["sent"][low, name] = [traffic_of(graph, place.size, ()).sent for graph in graphs]
    return result


@scenario
def low_types_of_seeds(place: Place) -> dict[str, Any]:
    """As `low_types`, of the weights and batches of several seeds, and of what else a training has."""
    result: dict[str, Any] = {}
    for seed, name, low in itertools.product(range(SEEDS), ("sgd", "adamw", *OTHERS), ("bf16", "fp16")):
        if (name not in OTHERS or seed < SEEDS_OF_CASES) and (name, low) != ("overflow", "bf16"):  # it has FP32's range
            for key, distance in _off(place, name, low, seed).items():
                result.setdefault(key, []).append(distance)
    return result


def _scaled(low: str) -> dict[str, Any]:
    return {"loss_scale": amp.DynamicLossScale(128.0), "dtype": low}


Ways = dict[str, Callable[[], list[Tensor]]]


def _off(place: Place, name: str, low: str, seed: int, but: tuple[str, ...] = ()) -> dict[tuple[str, str, str], float]:
    """L2 norms of the difference from FP32: of torch.autocast in DistributedDataParallel, and of ours."""
    ways = _ways_of_a_gan(place, low, seed) if name == "gan" else _ways(place, name, low, seed)
    wide = [weight.double() for weight in ways.pop("exact")()]
    return {
        (low, name, way): float(
            torch.cat([(a.double() - b).flatten() for a, b in zip(run(), wide, strict=True)]).norm()
        )
        for way, run in ways.items()
        if way not in but
    }


def _ways_of_a_gan(place: Place, low: str, seed: int) -> Ways:
    def trained(**options: Any) -> list[Tensor]:
        gan = Gan(seed, nn.LayerNorm, process_group=place.group, **options)
        gan.trained(place.part)
        return gan.weights()

    return {
        "exact": lambda: trained(enabled=False),
        "theirs": lambda: _gan_with_autocast(place, seed, DTYPES[low]),
        "whole": lambda: trained(**_scaled(low)),
    }


def _ways(place: Place, name: str, low: str, seed: int) -> Ways:
    case = replace(OTHERS.get(name) or CASES.get(name, CASES["sgd"]), batches=_batches_of(name, seed))
    mixed = replace(case, options={**case.options, **_scaled(low)})
    if name == "overflow":
        mixed = replace(mixed, batches=lambda batches=mixed.batches: _overflows_on_one_rank(place, batches()))
    ways: Ways = {
        "exact": lambda: _trained(place, case, seed, enabled=False),
        "theirs": lambda: _with_autocast(place, mixed, DTYPES[low], seed),
        "whole": lambda: _trained(place, mixed, seed),
    }
    if name not in OTHERS:
        ways["split"] = lambda: _trained(place, mixed, seed, rules=rules(shard="update"))
        ways["in fp32"] = lambda: _trained(place, mixed, seed, rules=rules(precision="fp32"))
    return ways


def _trained(place: Place, case: Case, seed: int, **options: Any) -> list[Tensor]:
    """The FP32 weights, or masters, that ranks have trained."""
    model, step = case.built(seed, process_group=place.group, **options)
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


SEEDS_OF_CASES = 5
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
OTHERS: dict[str, Case | None] = {
    "clipping": CASES["clipping"],
    "tied": Case(lambda: Tied(16, 8), words, rows, sgd, {}),
    "accumulated": replace(CASES["adamw"], options={"accumulate": 2}),
    "overflow": None,
    "gan": None,
}


def _batches_of(name: str, seed: int) -> Callable[[], list[tuple[Tensor, ...]]]:
    def built() -> list[tuple[Tensor, ...]]:
        result = rows(100 if name == "accumulated" else 50, 1000 + seed)
        if name == "tied":  # places of the largest as words
            return [(torch.cat([x, y], 1).argmax(1), x.argmax(1)) for x, y in result]
        return result

    return built


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
    """A rank that runs another head; then both run one; then they exchange them, and all freeze a weight."""
    result: dict[str, Any] = {}
    for way, section in (("whole", {}), ("split", {"shard": "update"})):
        seen = result[way] = {"weights": []}
        torch.manual_seed(place.rank)
        model = Forked()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        small = rules(bucket_mb=0.0001, **section)  # sent between the norm's messages
        step = step_of(place, model, optimizer, dtype="bf16", rules=small)
        before = model.unused.weight.detach().clone()
        for number, batch in enumerate(rows(5)):
            model.chosen = 0 if number == 2 else (place.rank + number // 3) % 2
            model.base[0].weight.requires_grad_(number < 4)
            step(*map(place.part, batch))
            seen["weights"].append([p.detach().clone() for name, p in model.named_parameters() if "unused" not in name])
        seen["unused"] = torch.equal(before, model.unused.weight.to(before.dtype))
        states = sorted(optimizer.state_dict()["state"].items())
        seen["steps"] = [float(state["step"]) for _, state in states]
        seen["moments"] = [state[key].clone() for _, state in states for key in ("exp_avg", "exp_avg_sq")]
    return result


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
    model, step = case.built(place.rank, mesh=line, dtype="bf16")
    step(*map(place.part, case.batches()[0]))
    square = init_device_mesh("cpu", (1, place.size), mesh_dim_names=("pp", "dp"))
    try:
        case.built(place.rank, mesh=square)
        message = ""
    except amp.AmpError as error:
        message = str(error)
    other, again = case.built(place.rank, mesh=square["dp"], dtype="bf16")
    again(*map(place.part, case.batches()[0]))
    return {"line": weights_of(model), "square": weights_of(other), "told": message}


@scenario
def low_weights(place: Place) -> dict[str, Any]:
    """Weights in 16 bits alone, rounded stochastically: by one random state."""
    low = {"version": 1, "extends": "default", "weights": {"master": "low", "rounding": "stochastic"}}
    case = replace(CASES["adamw"], options={"rules": low}, model=lambda: nn.Linear(8, 4), batches=lambda: rows(10))
    model, step = trained_together(place, case, dtype="bf16")
    return {"same": same_everywhere(step, model)}


class Judging(nn.Module):
    """A value decides which head runs, so that it is not one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.heads = nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)])

    def forward(self, x: Tensor) -> Tensor:
        return self.heads[int(x[0, 0] > 0)](self.norm(self.base(x)))


@scenario
def in_subgraphs(place: Place) -> dict[str, Any]:
    """A loss that is not one graph, whose ranks run other heads at other steps."""
    case = Case(Judging, squares, lambda: rows(4), sgd, {"clip_norm": 0.5})
    model, step = trained_together(place, case, dtype="bf16")
    result = {"same": same_everywhere(step, model), "execution": step.execution}
    wide = rules(precision="fp32")
    model, step = trained_together(place, case, dtype="bf16", rules=wide)
    alone, _ = trained_alone(place, case, dtype="bf16", rules=wide)
    result["wide"] = [p.detach() for p in model.parameters()]
    result["alone"] = [p.detach() for p in alone.parameters()]
    return result
