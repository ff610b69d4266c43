"""`RankCoordinator`: the ranks of a training step are compared when it is made, and agree at every call."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from importlib.metadata import version
from itertools import chain
from pathlib import PurePath
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from amp_compiler.errors import BUG, RankError
from amp_compiler.fx.graph import neutral_dtype
from amp_compiler.fx.plain import is_plain
from amp_compiler.fx.synchronized_norms import GROUPS
from amp_compiler.passes.step.reduce_gradients import SharedGradient
from amp_compiler.policy.rules import RuleSet
from amp_compiler.ranks.group import check_groups, group_of_norm, ranks_of_norm
from amp_compiler.ranks.parts import Parts
from amp_compiler.ranks.ranks import Ranks, check_equal, token
from amp_compiler.ranks.values import RankValues

Shared = tuple[SharedGradient, ...]
_SAME = "give all ranks the same model, loss function, optimizer, rules and options"
_BATCH = (
    "give all ranks batches of one shape: pad them, or drop the last one (DataLoader(drop_last=True)); else the mean"
    " over all samples would not be that of the ranks' means, which uneven='weight' weighs by their numbers of samples"
)
_CALLS = "call the step and step.flush() on all ranks alike"
_LOADED = "set, load and write on all ranks alike, or on none"
MOST_AGREED = 4096  # combinations that are kept in mind
_FAILED = -1  # of a rank that agreed, and then could not build its program
SAVING = "optimizer.state_dict()"
SAVING_ALL, LOADING_ALL, FLUSHING = "amp.save_checkpoint", "amp.load_checkpoint", "step.flush()"
# Of a rank that comes for something else than a call:
_REQUESTS = {-2: SAVING, -3: SAVING_ALL, -4: LOADING_ALL, -5: FLUSHING}


@dataclass(frozen=True)
class RankState:
    """What a rank has at a call.

    Args:
        gradients: what its graph has a gradient of, in the order of the backward.
        buffers: which buffers it writes, where all ranks take the first one's.
        batch: types and shapes of its batch's tensors.
        gather: as for `GatherGradients`; of a flush, how many batches were gathered.
        numbers: the values of the optimizers' `param_groups`, as `settings_of` gives them.
        parts: names of the weights that are split over the ranks.
        norms: the messages of its forward and backward, in order.
        parameters: as for `RankValues`.
    """

    gradients: Shared
    buffers: tuple[str, ...]
    batch: tuple[str, ...]
    gather: str
    numbers: tuple[str, ...]
    parts: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()

    def message(self) -> dict[str, Any]:
        """What other ranks are told of it."""
        gradients = [(one.name, str(one.dtype).removeprefix("torch."), one.order, one.behind) for one in self.gradients]
        return {
            "gradients": gradients,
            "the batch": self.batch,
            "the buffers that are written": self.buffers,
            "the accumulated batches": self.gather,
            "the optimizer's settings": self.numbers,
            "the weights that are split": self.parts,
            "the messages of SyncBatchNorm": self.norms,
            "the optimizer's parameters": self.parameters,
        }


class RankCoordinator:
    """The ranks of one training step.

    At every call each rank says one number, of what it is about to run. Where these differ in a way that was not agreed
    on before, or a rank has to recompile, all of them say what they have. What a rank has no gradient of counts as
    zero if another has one. What must be equal and is not, or a rank that fails, is an error on every rank.

    Weights, buffers, states and scales are compared before the 1st, 2nd, 4th, 8th call and so on, for what no version
    counter tells of, and where they were set, loaded or written between two calls: where ranks did not do the same, and
    where all did, but of a row of such calls only at the 1st, 2nd, 4th, 8th.

    Args:
        ranks: the processes.
        values: what has to be equal.
        parts: which weights are split over the ranks; `None` where none are.
    """

    def __init__(self, ranks: Ranks, values: RankValues, parts: Parts | None) -> None:
        self.ranks, self.values, self._parts = ranks, values, parts
        self._agreed: dict[tuple[int, ...], Shared] = {}
        self._open = self._compared = False
        self._now: tuple[RankState, Shared] | None = None
        self._reads: dict[str, bool] | None = None
        self._changes: tuple[object, ...] = ()  # since the last call
        self._row = self._calls = 0  # number of calls in a row that had some, and of all calls

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Around what decides at a call what will run: where this rank fails, the others are told."""
        self._open, self._now, self._reads = False, None, None
        with self.ranks.announcing_failure(self._announce):
            yield

    def look(self, generation: int) -> None:
        """See what was set, loaded or written since the last call, before anything is sent.

        Args:
            generation: as for `RankValues.changes`.
        """
        self._changes = self.values.changes(generation)
        self._row = self._row + 1 if self._changes else 0
        self._calls += 1

    @property
    def _wants_comparison(self) -> bool:
        """Whether this rank wants the values to be compared."""
        return not self._compared or self._row.bit_count() == 1 or self._calls.bit_count() == 1

    def _announce(self, error: Exception) -> None:
        if self._now is not None:
            self._numbers(_FAILED)
        elif not self._open:
            self._numbers(0)
        self.ranks.failed(error)

    def _numbers(self, number: int) -> tuple[int, ...]:
        numbers = self.ranks.numbers(number)
        requests = [_REQUESTS.get(one) for one in numbers]
        if len({*requests}) > 1:
            rank, request = next((rank, one) for rank, one in enumerate(requests) if one is not None)
            other = next(rank for rank, one in enumerate(requests) if one != request)
            goes = "goes on to train" if requests[other] is None else f"for {requests[other]}"
            raise RankError(
                f"rank {rank} asks for {request}, and rank {other} {goes}",
                hint=f"call {request} on all ranks: each has a part only",
            )
        return numbers

    def join(self, request: str) -> None:
        """Wait until all ranks call the same, in which they tell one another more.

        Args:
            request: `SAVING`, `SAVING_ALL`, `LOADING_ALL` or `FLUSHING`.

        Raises:
            RankError: one of them trains on, or calls another.
        """
        self._numbers(next(number for number, one in _REQUESTS.items() if one == request))

    def samples(self, own: int) -> tuple[int, ...]:
        """The numbers of samples of all ranks' batches.

        Args:
            own: of this one, from 1 on.

        Raises:
            RankError: one of them failed, or came for something else.
        """
        numbers = self._numbers(own)
        if 0 in numbers:
            self._open = True
            self.ranks.exchange({})
        return numbers

    def builds(self) -> None:
        """Say that this rank has to capture; `agree` follows, and `settle`."""
        if not self._open:
            self._open = True
            self._numbers(0)

    def keeps(self, state: RankState, shared: Shared) -> bool:
        """Whether a program may run; where not, one must be made, for what `agree` gives then.

        Args:
            state: of this rank with the program.
            shared: what the program was made for.

        Raises:
            RankError: the ranks differ, or one failed.
        """
        numbers = self._numbers(self._number(state, shared))
        if self._known(numbers, state) == shared:
            return True
        self._open = True
        if self._parts is not None and self.agree_on_parts(self._parts.decided).keys() - self._parts.decided.keys():
            return False
        return self.agree(state) == shared

    def agree_on_parts(self, reads: Mapping[str, bool]) -> dict[str, bool]:
        """Which weights are to be split, of those that any rank reads; asked once a call, then known.

        Args:
            reads: the weights that this rank reads, by name: whether it reads them in the low type alone.
        """
        if self._reads is None:
            merged: dict[str, bool] = {}
            for one in self.ranks.exchange({"reads": sorted(reads.items())}):
                for name, alone in one["reads"]:
                    merged[name] = merged.get(name, True) and alone
            self._reads = merged
        return self._reads

    def decide(self, state: RankState) -> Shared:
        """What all ranks together have a gradient of, where this rank made its gradients already.

        Raises:
            RankError: the ranks differ, or one failed.
        """
        if not self._open:
            known = self._known(self._numbers(self._number(state, state.gradients)), state)
            if known is not None:
                return known
            self._open = True
        shared = self.agree(state)
        self.settle(state, state.gradients)
        return shared

    def _known(self, numbers: tuple[int, ...], state: RankState) -> Shared | None:
        """What was agreed on for these numbers; ranks that say the same have the same."""
        if self._wants_comparison:
            return None
        return state.gradients if len({*numbers}) == 1 else self._agreed.get(numbers)

    def _number(self, state: RankState, shared: Shared) -> int:
        """What is said of a call where this rank may run; another one where anything was loaded or written."""
        number = _number(state, shared)
        compare = self._wants_comparison
        return token((number, self._changes, compare)) if self._changes or compare else number

    @property
    def has_agreed(self) -> bool:
        """Whether `agree` was asked in this call."""
        return self._now is not None

    def agree(self, state: RankState) -> Shared:
        """What all ranks together have a gradient of; asked once a call, then known.

        Raises:
            RankError: the ranks differ, or one failed.
        """
        if self._now is not None:
            if self._now[0] != state:
                raise RankError("the graph has other gradients when it is made again", hint=BUG)
            return self._now[1]
        messages = self.ranks.exchange({**state.message(), "compare": self._wants_comparison, "changes": self._changes})
        for what, hint in (("the batch", _BATCH), ("the accumulated batches", _CALLS)):
            check_equal([{what: one[what]} for one in messages], hint)
        own = {"gradients", "compare", "changes"}
        check_equal([{key: value for key, value in one.items() if key not in own} for one in messages], _SAME)
        if any(one["compare"] for one in messages) or len({one["changes"] for one in messages}) > 1:
            self._compared = False
            check_equal(self.ranks.exchange(self.values.message()), _LOADED)
            self._compared = True
        self._now = state, _union([one["gradients"] for one in messages])
        return self._now[1]

    def settle(self, state: RankState, shared: Shared) -> None:
        """Wait, where anything was agreed on, until all ranks are ready to run.

        Raises:
            RankError: a rank could not build its program.
        """
        if not self._open or self._now is None:
            return
        numbers, agreed = self._numbers(_number(state, shared)), self._now[1]
        self._open, self._now = False, None
        if _FAILED in numbers:
            self.ranks.exchange({})
        if len(self._agreed) >= MOST_AGREED:
            self._agreed.clear()
        self._agreed[numbers] = agreed


def _number(state: RankState, shared: Shared) -> int:
    return token((state.message(), [one.name for one in shared]))


def _union(messages: Sequence[Sequence[tuple[str, str, tuple[int, ...], int]]]) -> Shared:
    """What any rank has, in the order of the first that has it, and behind as many messages as on any of them."""
    merged: dict[str, tuple[str, str, tuple[int, ...], int]] = {}
    for rank, one in enumerate(messages):
        for name, dtype, order, behind in one:
            known = merged.setdefault(name, (name, dtype, order, behind))
            if known[1] != dtype:
                raise RankError(
                    f"rank {rank} makes the gradient of '{name}' in {dtype}, a rank before it in {known[1]}",
                    hint=_SAME,
                )
            merged[name] = (*known[:3], max(known[3], behind))
    return tuple(
        SharedGradient(name, getattr(torch, dtype), tuple(order), behind)
        for name, dtype, order, behind in merged.values()
    )


def batch_form(leaves: Sequence[Any], uneven: bool = False) -> tuple[str, ...]:
    """Types and shapes of the tensors of a batch.

    Args:
        leaves: of the batch, flat.
        uneven: whether the first size may be another on each rank.

    Example:
        >>> batch_form([torch.ones(2, 3), 1])
        ('fp32[2, 3]',)
        >>> batch_form([torch.ones(2, 3), torch.ones(())], uneven=True)
        ('fp32[:, 3]', 'fp32[]')
    """
    return tuple(_typed(one, uneven) for one in tensors_of(leaves))


def tensors_of(leaves: Sequence[Any]) -> list[Tensor]:
    """The tensors of a batch, those in objects of other classes too.

    Args:
        leaves: of the batch, flat.
    """
    return [one for leaf in leaves for one in _tensors_in(leaf, set())]


def _tensors_in(value: Any, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif id(value) not in seen and not isinstance(value, (type, torch.nn.Module)):
        seen.add(id(value))
        inner = pytree.tree_leaves(value)
        if len(inner) == 1 and inner[0] is value:  # no container that torch knows
            held = [getattr(value, one.name, None) for one in fields(value)] if is_dataclass(value) else []
            inner = held or list(getattr(value, "__dict__", {}).values())
        for one in inner:
            yield from _tensors_in(one, seen)


def settings_of(optimizers: Sequence[torch.optim.Optimizer]) -> tuple[str, ...]:
    """The values of all groups of parameters that no device is waited for, one text for each."""
    return tuple(
        f"{type(optimizer).__name__} group {index} {name}={shown!r}"
        for optimizer in optimizers
        for index, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name != "params" and (shown := _number_of(value)) is not None
    )


def _number_of(value: Any) -> Any:
    """A value of a group as it is compared; `None` for one that would be read from a device, and others."""
    if isinstance(value, Tensor):
        return value.tolist() if value.device.type == "cpu" else None
    if type(value) in (list, tuple):
        return tuple(map(_number_of, value))
    return value if is_plain(value) else None


def begin(
    ranks: Ranks,
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    rules: RuleSet,
    options: Mapping[str, Any],
) -> None:
    """Compare what the ranks were given, and give all of them the weights and buffers of the first.

    Args:
        ranks: the processes.
        model: the loss as a module.
        optimizers: checked optimizers.
        rules: in use.
        options: others that must be equal, by name.

    Raises:
        AmpError: a `SyncBatchNorm` takes its statistics over other ranks.
        RankError: the ranks differ, or one failed.
    """
    model.__dict__[GROUPS] = functools.partial(group_of_norm, ranks)
    norms = {"norms": [ranks_of_norm(ranks, one) for one in model.modules() if isinstance(one, torch.nn.SyncBatchNorm)]}
    messages = ranks.exchange({**_machine(model), **_arguments(model, optimizers, rules), **options, **norms})
    groups = [one.pop("norms") for one in messages]
    check_equal(messages, _SAME)
    check_groups(groups)
    held = [one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]]
    tensors = chain(model.parameters(), model.buffers(), held)
    ranks.broadcast({id(tensor): tensor for tensor in tensors}.values())


def _machine(model: torch.nn.Module) -> dict[str, Any]:
    """What must be equal for all ranks to compute the same bits of the same numbers."""
    device = next(iter(model.parameters())).device
    if device.type == "cuda":
        processor = f"{torch.cuda.get_device_name(device)}"
    else:
        processor = f"{torch.backends.cpu.get_cpu_capability()} with {torch.get_num_threads()} threads"
    return {"versions": f"torch {torch.__version__}, amp_compiler {version('amp_compiler')}", "processors": processor}


def _arguments(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], rules: RuleSet) -> dict[str, Any]:
    names = {id(parameter): name.partition(".")[2] for name, parameter in model.named_parameters()}
    return {
        "modules": [f"{name.partition('.')[2]} {type(one).__name__}".strip() for name, one in model.named_modules()],
        "parameters": [
            f"{name.partition('.')[2]} {_typed(one)}{list(one.stride())}{'' if one.requires_grad else ' frozen'}"
            for name, one in model.named_parameters()
        ],
        "buffers": [f"{name.partition('.')[2]} {_typed(one)}" for name, one in model.named_buffers()],
        "rules": [f"'{rule.text}'" if rule.text else PurePath(rule.where).name for rule in rules.rules],
        "sections of the rules": [f"{key}: {value}" for key, value in _sections(rules)],
        "optimizers": [
            *(f"{type(one).__name__}" for one in optimizers),
            *settings_of(optimizers),
            *(names.get(id(p), f"{_typed(p)}") for one in optimizers for g in one.param_groups for p in g["params"]),
        ],
    }


def _sections(rules: RuleSet) -> Iterator[tuple[str, Any]]:
    sections: dict[str, Mapping[str, Any]] = {
        "loss_scale": rules.loss_scale,
        "weights": rules.weights,
        "keep": rules.keep,
        "reduce": rules.reduce,
    }
    for name, section in sections.items():
        yield from ((f"{name}.{key}", section[key]) for key in sorted(section))


def _typed(tensor: Tensor, uneven: bool = False) -> str:
    sizes = [":" if uneven and place == 0 else str(size) for place, size in enumerate(tensor.shape)]
    return f"{neutral_dtype(tensor.dtype).short}[{', '.join(sizes)}]"
