"""torch's own list of optimizers (`optim_db`, with their options) through `amp.training_step`.

Each set of options runs in each of its implementations (a loop, `foreach`, `fused`) and in these forms:
in FP32, where every weight and every state must be that of a plain torch loop; in BF16 with FP32 masters, held against
autocast; with sparse gradients of an embedding; with a complex parameter. The optimizer has two groups of parameters.
`differentiable` is left out: it takes no leaves, so no torch loop trains a model with it.
"""

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.testing._internal.common_optimizers import OptimizerInfo, optim_db

import amp_compiler as amp

FORMS = ("FP32", "BF16", "sparse", "complex")
OUTCOMES = ("right", "refused", "raw", "wrong", "not run")
STEPS = 4
MATRICES_ALONE = ("Muon",)
SPARSE_ALONE = ("SparseAdam",)
# Bias corrections are computed in another order than on torch's CPU way where they are tensors; norms are summed in
# another order.
TOLERANCE = {"rtol": 2e-6, "atol": 2e-6}
AS_FAR = 2.0  # as autocast from FP32
FLOOR = 2.0**-8  # of the way that FP32 went


@dataclass(frozen=True)
class Result:
    """What became of one set of options in one form.

    Args:
        optimizer: name of its class.
        options: torch's description of them, and the implementation.
        outcome: one of `OUTCOMES`.
        note: the text of the error, or what is wrong, or why it was not run.
    """

    optimizer: str
    options: str
    outcome: str
    note: str = ""


class Dense(nn.Module):
    """Two matrices; vectors and a scalar too, unless the optimizer takes matrices alone."""

    def __init__(self, vectors: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8, bias=vectors), nn.Linear(8, 4, bias=vectors)
        if vectors:
            self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x))) * (self.gain if hasattr(self, "gain") else 1)


class Sparse(nn.Module):
    """Two embeddings, whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.EmbeddingBag(12, 4, mode="sum", sparse=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x)) * self.last(x)


class Complex(nn.Module):
    """A complex matrix between real data and a real loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Parameter(torch.randn(6, 4, dtype=torch.complex64)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ (self.first * self.last)).abs()


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Far enough from its minimum that no step ends there."""
    return (model(x).float() - y).square().sum()


def variants(info: OptimizerInfo) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every set of options in every implementation, with a description."""
    for one in info.optim_inputs_func(device="cpu"):
        every = tuple(one for one in info.supported_impls if one != "differentiable")
        for chosen in ("", *every):
            message = f"{one.desc}, {chosen}" if chosen else one.desc
            yield message, {**one.kwargs, **{flag: flag == chosen for flag in every}}


def has(info: OptimizerInfo, form: str) -> bool:
    """Whether torch says that the optimizer has this form."""
    if form == "sparse":
        return bool(info.supports_sparse) or info.optim_cls.__name__ in SPARSE_ALONE
    if form == "complex":
        return bool(info.supports_complex)
    return info.optim_cls.__name__ not in SPARSE_ALONE


def judged(info: OptimizerInfo, options: dict[str, Any], form: str) -> tuple[str, str]:
    """Outcome and note of one optimizer in one form."""
    batches = [_batch(form, seed) for seed in range(STEPS)]
    model = _model(info, form)
    try:
        exact = _torchs(model, info, options, batches)
    except Exception as error:  # noqa: BLE001 - what torch itself does not run is not ours to run
        return "not run", f"torch: {type(error).__name__}: {error}".splitlines()[0]
    ours = copy.deepcopy(model)
    optimizer = _optimizer(info, ours, options)
    try:
        step = amp.training_step(
            ours, loss, optimizer, backend="eager", **({"dtype": "bf16"} if form == "BF16" else {"enabled": False})
        )
        for batch in batches:
            step(*batch)
    except amp.AmpError as error:
        return "refused", str(error)
    except Exception as error:  # noqa: BLE001 - told as such
        return "raw", f"{type(error).__name__}: {error}"
    if form == "BF16":
        return _as_near(model, ours, exact[0], _torchs(model, info, options, batches, low=True)[0])
    return _equal((ours, optimizer), exact)


def sweep(form: str) -> list[Result]:
    """Every optimizer of torch's list with all of its options in one form."""
    result = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for info in optim_db:
            if not has(info, form):
                continue
            for message, options in variants(info):
                result.append(Result(info.optim_cls.__name__, message, *judged(info, options, form)))
                torch._dynamo.reset()
    return result


def totals(matches: list[Result]) -> dict[str, int]:
    """How many of each outcome."""
    counted = Counter(one.outcome for one in matches)
    return {outcome: counted[outcome] for outcome in OUTCOMES}


def _model(info: OptimizerInfo, form: str) -> nn.Module:
    torch.manual_seed(1)
    result: dict[str, Callable[[], nn.Module]] = {"sparse": Sparse, "complex": Complex}
    return result.get(form, lambda: Dense(vectors=info.optim_cls.__name__ not in MATRICES_ALONE))()


def _batch(form: str, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if form == "sparse":
        return torch.randint(0, 12, (5, 3), generator=generator), torch.randn(5, 4, generator=generator)
    return torch.randn(16, 6, generator=generator), torch.randn(16, 4, generator=generator)


def _optimizer(info: OptimizerInfo, model: nn.Module, options: dict[str, Any]) -> Optimizer:
    """With the first layer in one group, and the rest in another of half the rate where torch lets groups differ."""
    options = copy.deepcopy(options)
    first = [one for name, one in model.named_parameters() if name.startswith("first")]
    rest = [one for name, one in model.named_parameters() if not name.startswith("first")]
    if not info.supports_param_groups:
        return info.optim_cls([*first, *rest], **options)
    result = info.optim_cls([{"params": first}, {"params": rest}], **options)
    result.param_groups[1]["lr"] = result.param_groups[1]["lr"] * 0.5
    return result


def _torchs(
    model: nn.Module,
    info: OptimizerInfo,
    options: dict[str, Any],
    batches: list[tuple[Tensor, Tensor]],
    low: bool = False,
) -> tuple[nn.Module, Optimizer]:
    """A copy of the model after the steps of a plain torch loop, and its optimizer."""
    model = copy.deepcopy(model)
    optimizer = _optimizer(info, model, options)
    for batch in batches:

        def closure(batch: tuple[Tensor, Tensor] = batch) -> Tensor:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16) if low else nullcontext():
                value = loss(model, *batch)
            value.backward()
            return value

        if info.step_requires_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return model, optimizer


def _equal(ours: tuple[nn.Module, Optimizer], theirs: tuple[nn.Module, Optimizer]) -> tuple[str, str]:
    for name, got in ours[0].state_dict().items():
        if wrong := _differs(got, theirs[0].state_dict()[name]):
            return "wrong", f"{name}: {wrong}"
    states = [one.state_dict() for one in (ours[1], theirs[1])]
    if [group.keys() for group in states[0]["param_groups"]] != [group.keys() for group in states[1]["param_groups"]]:
        return "wrong", "the groups have other options"
    if states[0]["state"].keys() != states[1]["state"].keys():
        return "wrong", f"state of {list(states[0]['state'])}, not of {list(states[1]['state'])}"
    for number, entries in states[1]["state"].items():
        if states[0]["state"][number].keys() != entries.keys():
            return "wrong", f"state {number} has {list(states[0]['state'][number])}, not {list(entries)}"
        for key, value in entries.items():
            if wrong := _differs(states[0]["state"][number][key], value):
                return "wrong", f"{key} of {number}: {wrong}"
    return "right", ""


def _differs(got: Any, wanted: Any) -> str:
    if not isinstance(wanted, Tensor):
        return "" if float(got) == float(wanted) else f"{got}, not {wanted}"
    wanted = wanted.to_dense()  # torch's SGD keeps a sparse momentum
    try:
        torch.testing.assert_close(torch.as_tensor(got), wanted, check_dtype=isinstance(got, Tensor), **TOLERANCE)
    except AssertionError as error:
        return " ".join(str(error).split())
    return ""


def _as_near(start: nn.Module, ours: nn.Module, exact: nn.Module, autocast: nn.Module) -> tuple[str, str]:
    """Whether the weights are as near to FP32's as those that autocast trains."""
    begun, result, wanted, theirs = (
        torch.cat([one.detach().double().flatten() for one in model.parameters()])
        for model in (start, ours, exact, autocast)
    )
    way, off, allowed = (float((one - wanted).norm()) for one in (begun, result, theirs))
    if off <= AS_FAR * allowed + FLOOR * way:
        return "right", ""
    return "wrong", f"{off / way:.1e} of the way off FP32, autocast {allowed / way:.1e}"
