"""`StepContents`: what a checkpoint holds of one training step, and how a step takes it over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from amp_compiler.errors import AmpError
from amp_compiler.fx.graph import LOW_TYPES
from amp_compiler.ops.layout import empty_laid_out_like
from amp_compiler.training.loss_module import ROOT
from amp_compiler.training.weights import MASTER, MasterWeights

if TYPE_CHECKING:
    from amp_compiler.training.step import TrainingStep

_OTHER = "give the step the model, optimizer, dtype and rules that it was saved with"
_SHOWN = 3  # of what differs


class StepContents:
    """One step, as a checkpoint has it.

    Each rank writes nested dicts: `model` (with `outside`, see `training.outside`), `state` and `param_groups` of the
    optimizers, by name, and what it has of its own, `buffers`. What all ranks have alike the first one
    writes; of a weight that is split each writes its part.

    Args:
        step: the step.
        others: `id` of parameters that other steps of the same checkpoint train, and so have there.
    """

    def __init__(self, step: TrainingStep, others: set[int]) -> None:
        self._step, self._others = step, others
        self._module, self._optimizers = step._module, step._optimizers
        self._state = step._state
        ranks = step._setup.ranks
        self._rank, self._size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
        self._module.adopt(self._optimizers)
        self._names = {id(p): key.removeprefix(f"{ROOT}.") for key, p in self._module.named_parameters()}
        self._owners = {id(p): o for o in self._optimizers for group in o.param_groups for p in group["params"]}
        self.device = step._setup.device

    # What is saved

    def about(self) -> dict[str, Any]:
        """What is compared before a checkpoint is read, and the step's own `state_dict`, as plain values."""
        split = {key: value for key, value in self._values().items() if value in self._state.parts}
        return {
            **self._kind(),
            "step": self._step.state_dict(),
            "split": {key.removeprefix(f"{ROOT}."): list(value.shape) for key, value in split.items()},
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
            "master": "low" if self._state.storage.low else "fp32",
            "optimizers": optimizers,
        }

    def entries(self) -> Iterator[str]:
        """Names of what all ranks must have alike."""
        yield from self._values()
        for parameter, state in self._states():
            yield from (f"{self._names[id(parameter)]} {key}" for key in state)

    def saved(self) -> dict[str, Any]:
        """What this rank writes.

        Raises:
            AmpError: batches were gathered that no update has used.
        """
        step, parts = self._step, self._state.parts
        if step._gathered:
            what = f"{step._gathered} of {step._accumulate} batches were gathered, whose gradients no checkpoint has"
            raise AmpError(what, hint="save behind the last of them, or behind step.flush()")
        values = {key: value for key, value in self._values().items() if not self._rank or value in parts}
        seen = {id(value) for value in values.values()}
        states = {
            self._names[id(parameter)]: {
                key: self._shared(value, parameter, state, key) if isinstance(value, Tensor) else value
                for key, value in state.items()
                if key != MASTER or id(parameter) not in seen
            }
            for parameter, state in self._states()
            if not self._rank or parameter in parts
        }
        return {
            "model": {key: self._value(one) if isinstance(one, Tensor) else one for key, one in values.items()},
            "state": states,
            "param_groups": self._groups(),
            "buffers": self._own_buffers(),
        }

    def _values(self) -> dict[str, Any]:
        """Parameters, buffers and extra state of the models, but what other steps have; the tensors themselves."""
        every = self._module.state_dict(keep_vars=True)
        return {key: value for key, value in every.items() if id(value) not in self._others}

    def _states(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """The optimizers' state of each parameter that has any."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                yield from ((p, optimizer.state[p]) for p in group["params"] if optimizer.state.get(p))

    def _value(self, tensor: Tensor) -> Tensor:
        """What a weight or buffer goes on from: its master where it has one."""
        owner = self._owners.get(id(tensor))
        if owner is None:
            return tensor.detach()
        state = owner.state.get(tensor, {})
        if MASTER in state and tensor.dtype is torch.float32:
            MasterWeights.take_in(tensor, state)
        self._state.masters.follow(tensor, state)
        if MASTER in state:
            return self._shared(state[MASTER], tensor, state, MASTER)
        return tensor.detach().float() if self._has_master(tensor) else tensor.detach()

    def _has_master(self, parameter: Tensor) -> bool:
        return parameter.dtype in LOW_TYPES and not self._state.storage.low

    def _shared(self, value: Tensor, parameter: Tensor, state: dict[str, Any], column: str) -> Tensor:
        """A state; where the ranks share it, this one's part."""
        if parameter not in self._state.parts or not value.dim():
            return value.detach()
        return self._state.parts.held(state, column, parameter).detach()

    def _groups(self) -> list[list[dict[str, Any]]]:
        return [
            [{key: value for key, value in group.items() if key != "params"} for group in one.param_groups]
            for one in self._optimizers
        ]

    def _own_buffers(self) -> dict[str, Any]:
        """Buffers, where each rank has its own."""
        reduction = self._step._setup.reduction
        if reduction is None or reduction.broadcast_buffers:
            return {}
        names = {id(buffer) for buffer in self._module.buffers()}
        return {key: value for key, value in self._values().items() if id(value) in names}

    # What is loaded

    def check(self, files: Sequence[Mapping[str, Any]], about: Mapping[str, Any], where: str) -> None:
        """Take what a checkpoint has of this step, to be placed; nothing is changed.

        Args:
            files: what each rank wrote.
            about: as `about` gave it.
            where: its folder, for errors.

        Raises:
            AmpError: it is another model, another optimizer or another kind of weights.
        """
        self._files, self._about = files, about
        self._step._scale_config.matching(about["step"]).load_state_dict(about["step"], self.device)  # it may not fit
        there, here, saved = _owners_of(about), _owners_of(self._kind()), files[0]["model"]
        for key, value in saved.items():
            there[key] = _form(value, about["split"].get(key.removeprefix(f"{ROOT}.")))
        for key, own in self._values().items():
            dtype = torch.float32 if self._is_made_of_master(own) else None
            was = saved.get(key)
            if self._state.storage.low and isinstance(was, Tensor) and was.dtype in LOW_TYPES:
                dtype = was.dtype if torch.float32 in (dtype, own.dtype) else dtype  # FP32 before the first call
            here[key] = _form(own, dtype=dtype)
        pairs = {key: (there.get(key, "missing"), here.get(key, "missing")) for key in sorted({*there, *here})}
        differ = [f"{key} is {was} there and {now} here" for key, (was, now) in pairs.items() if was != now]
        if differ:
            more = f" and {len(differ) - _SHOWN} more" if len(differ) > _SHOWN else ""
            raise AmpError(f"does not fit the step: {'; '.join(differ[:_SHOWN])}{more}", where=where, hint=_OTHER)

    def _is_made_of_master(self, value: Tensor) -> bool:
        return id(value) in self._owners and (self._has_master(value) or value in self._state.parts)

    def place(self) -> None:
        """Take over what `check` was given."""
        step = self._step
        masters: dict[int, Tensor] = {}  # of each parameter that has one
        values = self._module.state_dict()
        own: Mapping[str, Any] = {}
        if len(self._files) == self._size:
            own = self._files[self._rank]["buffers"]
        with torch.no_grad():
            for key, value in self._values().items():
                saved = self._joined(key.removeprefix(f"{ROOT}."), [one["model"].get(key) for one in self._files])
                if isinstance(value, Tensor) and self._is_made_of_master(value):
                    if id(value) not in masters:
                        masters[id(value)] = self._laid_out(saved, value)
                        value.copy_(saved.to(value.dtype))
                else:
                    values[key] = own.get(key, saved)
            self._module.load_state_dict(values)
        for optimizer, groups in zip(self._optimizers, self._files[0]["param_groups"], strict=True):
            optimizer.load_state_dict(self._state_dict(optimizer, groups, masters))
        step.load_state_dict(self._about["step"])
        step._gathered = 0
        self._state.sums.clear()

    def _joined(self, name: str, saved: Sequence[Any]) -> Any:
        """What the ranks saved of one thing of a parameter: the first one's, or all parts of what they share."""
        if name not in self._about["split"] or not isinstance(saved[0], Tensor) or not saved[0].dim():
            return saved[0]
        shape = self._about["split"][name]
        return torch.cat(list(saved))[: prod(shape)].view(shape)

    def _laid_out(self, saved: Tensor, parameter: Tensor) -> Tensor:
        """A master or state as the step keeps it, in memory of its own; of what the ranks share, this one's part."""
        if saved.shape != parameter.shape or not saved.dim():
            return saved.to(parameter.device if saved.dim() else "cpu", copy=True)
        if parameter in self._state.parts:
            return self._state.parts.of(saved).to(parameter.device)
        return empty_laid_out_like(parameter, saved.dtype).copy_(saved)

    def _state_dict(
        self, optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]], masters: Mapping[int, Tensor]
    ) -> dict[str, Any]:
        """What `optimizer.load_state_dict` takes; of what the ranks share, their parts."""
        numbers = [group["params"] for group in optimizer.state_dict()["param_groups"]]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        state = {number: self._state_of(parameter) for number, parameter in enumerate(parameters)}
        for number, parameter in enumerate(parameters):
            if id(parameter) in masters:
                state[number][MASTER] = masters[id(parameter)]
        named = [{**saved, "params": own} for saved, own in zip(groups, numbers, strict=True)]
        return {"state": {number: own for number, own in state.items() if own}, "param_groups": named}

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        name = self._names[id(parameter)]
        state: dict[str, Any] = {}
        saved = dict(self._files[0]["state"].get(name, {}))
        # As checkpoints had it once of a momentum that waits for its first update.
        if "momentum_buffer" in saved and not saved.pop("begun", True):
            return {}
        for key in saved:
            value = self._joined(name, [one["state"].get(name, {}).get(key) for one in self._files])
            state[key] = self._laid_out(value, parameter) if isinstance(value, Tensor) else value
        return state


def _owners_of(kind: Mapping[str, Any]) -> dict[str, str]:
    """How weights are held, and where each stands in the optimizers, in words."""
    return {"weights.master": kind["master"]} | {
        f"the optimizer of {name}": f"{one['type']} {number}, group {group}, place {place}"
        for number, one in enumerate(kind["optimizers"])
        for group, names in enumerate(one["groups"])
        for place, name in enumerate(names)
    }


def _form(value: Any, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None) -> str:
    """Type and shape of a tensor, its own where no other is given, in words."""
    if not isinstance(value, Tensor):
        return "no tensor"
    return f"{str(dtype or value.dtype).removeprefix('torch.')} {list(value.shape if shape is None else shape)}"
