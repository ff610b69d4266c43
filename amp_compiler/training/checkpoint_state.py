"""`StepContents`: what a checkpoint holds of one training step, and how a step takes it over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from amp_compiler.errors import AmpError
from amp_compiler.fx.graph import LOW_TYPES
from amp_compiler.ops.layout import empty_laid_out_like
from amp_compiler.training.loss_module import ROOT
from amp_compiler.training.weights import MASTER, MasterWeights

if TYPE_CHECKING:
    from amp_compiler.ranks.dcp import Contents, Slice
    from amp_compiler.training.step import TrainingStep

_OTHER = "give the step the model, optimizer, dtype and rules that it was saved with"
_SHOWN = 3  # of what differs


class StepContents:
    """One step, as a checkpoint has it.

    Its entries are nested dicts: `model` and `outside` (see `training.outside`) by name, `optimizer`, and `ranks` with
    what each rank has of its own. Values other than tensors stand in a tuple, which DCP takes as a whole.

    Args:
        step: the step.
        name: in the checkpoint; empty for the only one.
        others: `id` of parameters that other steps of the same checkpoint train, and so have there.
    """

    def __init__(self, step: TrainingStep, name: str, others: set[int]) -> None:
        self._step, self._name, self._others = step, name, others
        self._module, self._optimizers = step._module, step._optimizers
        self._kept = step._state.kept
        self._weights = self._kept.weights
        ranks = step._setup.ranks
        self._rank, self._size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
        self._module.adopt(self._optimizers)
        self._names = {id(p): key.removeprefix(f"{ROOT}.") for key, p in self._module.named_parameters()}
        self._owners = {id(p): o for o in self._optimizers for group in o.param_groups for p in group["params"]}
        self.device = step._setup.device

    # What is saved

    def about(self) -> dict[str, Any]:
        """What is compared before a checkpoint is read, and the step's own `state_dict`, as plain values."""
        samples = self._kept.samples
        return {
            **self._kind(),
            "step": self._step.state_dict(),
            "samples": None if samples is None else samples.state(),
        }

    def _kind(self) -> dict[str, Any]:
        optimizers = [
            {
                "type": type(one).__name__,
                "groups": [[self._names[id(p)] for p in g["params"]] for g in one.param_groups],
            }
            for one in self._optimizers
        ]
        return {
            "master": "low" if self._weights.storage.low else "fp32",
            "optimizers": optimizers,
            "gathered": self._step._gathered,
            "accumulate": self._step._accumulate,
        }

    def entries(self) -> Iterator[str]:
        """Names of what all ranks must have alike."""
        yield from self._values()
        for parameter, state in self._states():
            yield from (f"{self._names[id(parameter)]} {key}" for key in state)

    def saved(self) -> dict[str, Any]:
        """All entries, of this rank.

        Raises:
            AmpError: gradients were gathered by a step in subgraphs.
        """
        step = self._step
        if step._gathered and step._choice.subgraph_step is not None:
            what = f"{step._gathered} of {step._accumulate} batches were gathered by a step in subgraphs"
            raise AmpError(what, hint="save behind the last of them")
        entries: dict[str, Any] = {}
        seen, own_buffers = set(), self._own_buffers()
        for key, value in self._values().items():
            head, _, name = key.partition(".")
            if self._rank and key in own_buffers.get("buffers", ()):
                continue  # they are the first rank's for any other number of ranks
            if isinstance(value, Tensor):
                seen.add(id(value))
                entries.setdefault(head, {})[name] = self._value(value)
            else:
                entries.setdefault(head, {})[name] = (value,)
        states: dict[str, Any] = {}
        for parameter, state in self._states():
            own = {
                key: self._shared(value, parameter, state, key) if isinstance(value, Tensor) else (value,)
                for key, value in state.items()
                if key != MASTER or id(parameter) not in seen
            }
            states[self._names[id(parameter)]] = own
        entries["optimizer"] = {"state": states, "param_groups": (self._groups(),)}
        entries["ranks"] = {str(self._rank): {**own_buffers, **self._sums()}}
        return entries

    def _values(self) -> dict[str, Any]:
        """Parameters, buffers and extra state of the models, but what other steps have; the tensors themselves."""
        every = self._module.state_dict(keep_vars=True)
        return {key: value for key, value in every.items() if id(value) not in self._others}

    def _states(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """The optimizers' state of each parameter that has any."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                yield from ((p, optimizer.state[p]) for p in group["params"] if optimizer.state.get(p))

    def _value(self, tensor: Tensor) -> Any:
        """What a weight or buffer goes on from: its master where it has one."""
        owner = self._owners.get(id(tensor))
        if owner is None:
            return tensor.detach()
        state = owner.state.get(tensor, {})
        if MASTER in state and tensor.dtype is torch.float32:
            MasterWeights.take_in(tensor, state)
        self._weights.follow(tensor, state)
        if MASTER in state:
            return self._shared(state[MASTER], tensor, state, MASTER)
        return tensor.detach().float() if self._has_master(tensor) else tensor.detach()

    def _has_master(self, parameter: Tensor) -> bool:
        return parameter.dtype in LOW_TYPES and not self._weights.storage.low

    def _shared(self, value: Tensor, parameter: Tensor, state: dict[str, Any], column: str) -> Any:
        """A state; where the ranks share it, this one's elements."""
        if parameter not in self._weights.parts or not value.dim():
            return value.detach()
        return self._slice(self._weights.parts.held(state, column, parameter).detach(), parameter)

    def _slice(self, part: Tensor, parameter: Tensor) -> Slice:
        from amp_compiler.ranks.dcp import Slice  # here: importing it takes a third of a second

        start = min(self._rank * part.numel(), parameter.numel())
        return Slice(part[: parameter.numel() - start], parameter.shape, start)

    def _groups(self) -> list[list[dict[str, Any]]]:
        return [
            [
                {
                    **{
                        key: value.detach().cpu() if isinstance(value, Tensor) else value
                        for key, value in group.items()
                    },
                    "params": [self._names[id(p)] for p in group["params"]],
                }
                for group in one.param_groups
            ]
            for one in self._optimizers
        ]

    def _own_buffers(self) -> dict[str, Any]:
        """Buffers, where each rank has its own."""
        reduction = self._step._setup.reduction
        if reduction is None or reduction.broadcast_buffers:
            return {}
        names = {id(buffer) for buffer in self._module.buffers()}
        return {"buffers": {key: value for key, value in self._values().items() if id(value) in names}}

    def _sums(self) -> dict[str, Any]:
        """Gradients that were gathered so far, of which each rank has its own."""
        if not self._step._gathered:
            return {}
        held = [p for group in self._groups_of() for p in group if id(p) in self._kept.sums.gathered]
        return {"sums": {self._names[id(p)]: self._kept.sums.get(p) for p in held}}

    def _groups_of(self) -> Iterator[list[Tensor]]:
        for one in self._optimizers:
            yield from (group["params"] for group in one.param_groups)

    # What is loaded

    def wanted(self, contents: Contents, about: Mapping[str, Any], ranks: int, where: str) -> dict[str, Any]:
        """Where to everything that a checkpoint has of this step is to be read, by the names of its entries.

        Args:
            contents: what it holds.
            about: as `about` gave it.
            ranks: how many wrote it.
            where: its folder, for errors.

        Raises:
            AmpError: it is another model, another optimizer or another kind of weights, or there are other ranks while
                gradients are gathered.
        """
        before = ("steps", self._name) if self._name else ()
        paths = {keys[len(before) :]: entry for entry, keys in contents.paths.items() if keys[: len(before)] == before}
        self._masters: dict[int, tuple[Tensor, Tensor]] = {}  # of each parameter that has one, with what is read for it
        self._about, self._paths = about, paths
        self._check_kind(about, where)
        goals = {key: self._target(value) for key, value in self._values().items()}
        model = {f"{keys[0]}.{keys[1]}": e for keys, e in paths.items() if keys[0] in (ROOT, "outside")}
        differ = [f"only the step has {key}" for key in goals.keys() - model.keys()]
        differ += [f"only the checkpoint has {key}" for key in model.keys() - goals.keys()]
        for key in goals.keys() & model.keys():
            differ += self._misfits(key, goals[key], contents.tensors.get(model[key]))
        _refuse(differ, where)
        own = {entry: goals[key] for key, entry in model.items()}
        own |= self._states_wanted(contents)
        own[paths["optimizer", "param_groups"]] = None
        return own | self._own_wanted(contents, ranks, where)

    def _check_kind(self, about: Mapping[str, Any], where: str) -> None:
        own, saved = self._kind(), about["step"]
        self._step._scale_config.matching(saved).load_state_dict(saved, self.device)  # raises where it does not fit
        if about["master"] != own["master"]:
            what = (
                f"it was saved with `weights: {{master: {about['master']}}}`, and the step's rules say {own['master']}"
            )
            raise AmpError(what, where=where, hint=_OTHER)
        was, now = about["optimizers"], own["optimizers"]
        kinds = [", ".join(one["type"] for one in some) for some in (was, now)]
        if kinds[0] != kinds[1]:
            raise AmpError(f"it holds the state of {kinds[0]}, and the step has {kinds[1]}", where=where, hint=_OTHER)
        if was == now:
            return
        names = [{name for one in some for group in one["groups"] for name in group} for some in (was, now)]
        differ = [f"only the checkpoint's optimizer has {name}" for name in names[0] - names[1]]
        differ += [f"only the step's optimizer has {name}" for name in names[1] - names[0]]
        _refuse(differ or ["the parameters stand in other groups of the optimizer, or in another order"], where)

    def _target(self, value: Any) -> Any:
        """Where to the value of a weight or buffer is read."""
        if not isinstance(value, Tensor):
            return None
        if id(value) not in self._owners or not (self._has_master(value) or value in self._weights.parts):
            return value.detach()
        if id(value) not in self._masters:
            split = value in self._weights.parts
            master = self._weights.parts.zeros(value) if split else empty_laid_out_like(value, torch.float32)
            self._masters[id(value)] = value, master
        master = self._masters[id(value)][1]
        return self._slice(master, value) if value in self._weights.parts else master

    def _misfits(self, key: str, goal: Any, saved: tuple[torch.Size, torch.dtype] | None) -> Iterable[str]:
        if goal is None or saved is None:
            return [] if goal is None and saved is None else [f"{key} is a tensor in one of them only"]
        part = goal if isinstance(goal, Tensor) else goal.part
        if goal.shape != saved[0]:
            return [f"{key} is of shape {list(saved[0])} there and of {list(goal.shape)} here"]
        widened = self._weights.storage.low and saved[1] in LOW_TYPES and part.dtype is torch.float32
        if part.dtype != saved[1] and not widened:  # before the first call all weights are FP32
            return [f"{key} is {_short(saved[1])} there and {_short(part.dtype)} here"]
        return []

    def _states_wanted(self, contents: Contents) -> dict[str, Any]:
        by_name = {self._names[id(p)]: p for group in self._groups_of() for p in group}
        wanted: dict[str, Any] = {}
        self._loaded: dict[int, dict[str, str]] = {}  # entries of each parameter's state
        self._parts: dict[str, Tensor] = {}  # what of them the ranks share, filled up
        for keys, entry in self._paths.items():
            if keys[:2] != ("optimizer", "state"):
                continue
            parameter = by_name[keys[2]]
            self._loaded.setdefault(id(parameter), {})[keys[3]] = entry
            wanted[entry] = self._state_target(entry, parameter, contents.tensors.get(entry))
        return wanted

    def _state_target(self, entry: str, parameter: Tensor, saved: tuple[torch.Size, torch.dtype] | None) -> Any:
        if saved is None:
            return None
        shape, dtype = saved
        if shape != parameter.shape or not shape:
            return torch.empty(shape, dtype=dtype, device=parameter.device if shape else "cpu")
        if parameter not in self._weights.parts:
            return empty_laid_out_like(parameter, dtype)
        part = self._parts[entry] = self._weights.parts.zeros(parameter).to(dtype)
        return self._slice(part, parameter)

    def _own_wanted(self, contents: Contents, ranks: int, where: str) -> dict[str, Any]:
        """What this rank has of its own: buffers where there are as many ranks, gathered gradients."""
        about, step = self._about, self._step
        if about["gathered"] and (ranks != self._size or about["accumulate"] != step._accumulate):
            raise AmpError(
                f"it was saved behind {about['gathered']} of {about['accumulate']} gathered batches on {ranks} rank(s),"
                f" and this step gathers {step._accumulate} on {self._size}",
                where=where,
                hint="load it as it was saved, or save behind the last of the batches",
            )
        if about["gathered"] and about.get("samples") and self._kept.samples is None:
            raise AmpError(
                f"it was saved behind {about['gathered']} gathered batches that are weighed by their samples",
                where=where,
                hint="make the step with uneven='weight', or save behind the last of the batches",
            )
        own, kinds = {}, ["sums"] if ranks != self._size else ["sums", "buffers"]
        for keys, entry in self._paths.items():
            if keys[:2] == ("ranks", str(self._rank)) and keys[2] in kinds:
                size, dtype = contents.tensors[entry]
                own[entry] = torch.empty(size, dtype=dtype, device=self.device)
        return own

    def place(self, loaded: Mapping[str, Any]) -> None:
        """Take over what was read; all ranks come.

        Args:
            loaded: what `wanted` gave, filled.
        """
        step, parts = self._step, self._weights.parts
        with torch.no_grad():
            for parameter, master in self._masters.values():
                low = master.to(parameter.dtype)
                parameter.copy_(parts.whole(low, parameter) if parameter in parts else low)
            self._place_module(loaded)
        for number, optimizer in enumerate(self._optimizers):
            groups = loaded[self._paths["optimizer", "param_groups"]][0][number]
            optimizer.load_state_dict(self._state_dict(optimizer, groups, loaded))
        step.load_state_dict(self._about["step"])
        self._place_sums(loaded)

    def _place_module(self, loaded: Mapping[str, Any]) -> None:
        values = self._module.state_dict()
        placed = {id(master) for _, master in self._masters.values()}
        own: dict[str, Any] = {}
        for keys, entry in self._paths.items():
            value = loaded.get(entry)
            if keys[:3] == ("ranks", str(self._rank), "buffers") and value is not None:
                own[keys[3]] = value
            elif keys[0] in (ROOT, "outside") and isinstance(value, Tensor) and id(value) not in placed:
                values[".".join(keys)] = value  # which may be read in its place already
            elif keys[0] in (ROOT, "outside") and isinstance(value, tuple):
                values[".".join(keys)] = value[0]
        values.update(own)
        self._module.load_state_dict(values)

    def _state_dict(self, optimizer: torch.optim.Optimizer, groups: Any, loaded: Mapping[str, Any]) -> dict[str, Any]:
        """What `optimizer.load_state_dict` takes; of what the ranks share, their parts."""
        state: dict[int, dict[str, Any]] = {}
        numbered, number = [], 0
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            numbered.append({**saved, "params": list(range(number, number + len(group["params"])))})
            for parameter in group["params"]:
                own = {key: self._read(entry, loaded) for key, entry in self._loaded.get(id(parameter), {}).items()}
                if id(parameter) in self._masters:
                    own[MASTER] = self._masters[id(parameter)][1]
                if own:
                    state[number] = own
                number += 1
        return {"state": state, "param_groups": numbered}

    def _read(self, entry: str, loaded: Mapping[str, Any]) -> Any:
        if entry in self._parts:
            return self._parts[entry]
        return loaded[entry] if isinstance(loaded[entry], Tensor) else loaded[entry][0]

    def _place_sums(self, loaded: Mapping[str, Any]) -> None:
        step, sums, gathered = self._step, self._kept.sums, set()
        for parameter in (p for group in self._groups_of() for p in group):
            entry = self._paths.get(("ranks", str(self._rank), "sums", self._names[id(parameter)]))
            if entry is not None:
                sums.get(parameter).copy_(loaded[entry])
                gathered.add(id(parameter))
            elif parameter in sums:
                sums.get(parameter).zero_()
        step._gathered, sums.gathered = self._about["gathered"], frozenset(gathered)
        if self._kept.samples is not None:  # batches of a step that weighs none count alike
            self._kept.samples.load(self._about.get("samples") or [step._gathered * self._size, 0.0])


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _refuse(differ: list[str], where: str) -> None:
    if differ:
        shown = sorted(differ)[:_SHOWN]
        more = f" and {len(differ) - _SHOWN} more" if len(differ) > _SHOWN else ""
        raise AmpError(f"does not fit the step: {'; '.join(shown)}{more}", where=where, hint=_OTHER)
