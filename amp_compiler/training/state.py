"""What lives from step to step beside parameters, buffers and optimizer states: 16-bit weights, sums, magnitudes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from amp_compiler.backends.cuda_graph import GraphSettings
from amp_compiler.errors import AmpError
from amp_compiler.ops.cpu.arena import ArenaMemory
from amp_compiler.ops.fp8 import no_amaxes
from amp_compiler.ops.layout import as_real, empty_laid_out_like, is_laid_out_like
from amp_compiler.ops.loss_scale.held import HeldScale
from amp_compiler.ops.update.rounding import RoundingState, WeightStorage
from amp_compiler.passes.precision.scale_products import AMAXES
from amp_compiler.passes.step.place_operands import Operands
from amp_compiler.ranks.parts import Parts
from amp_compiler.training.reporting.events import Events
from amp_compiler.training.samples import Samples
from amp_compiler.training.weights import MasterWeights

_SAVED = "give what step.state_dict() has returned"


class LowWeights:
    """The 16-bit copies of the masters: state, written by the update, made again only when a master changed outside.

    Attributes:
        generation: another number where there is a new tensor among them.
        casts: how often a copy was made of a master that others may have written.
    """

    def __init__(self) -> None:
        self.generation = self.casts = 0
        self._copies: dict[int, dict[torch.dtype, Tensor]] = {}  # by id of the master
        self._operands: dict[tuple[int, torch.Size], dict[str, tuple[Operands, torch.dtype | None, list[Tensor]]]] = {}

    def get(self, master: Tensor, dtype: torch.dtype) -> Tensor:
        """The copy of a master as it is now, laid out as it; the same tensor at every step.

        Args:
            master: the weight.
            dtype: of the copy.
        """
        copies = self._copies.setdefault(id(master), {})
        copy = copies.get(dtype)
        if copy is None or not is_laid_out_like(copy, master):
            copy = copies[dtype] = empty_laid_out_like(master, dtype)
            self.generation += 1
        self.casts += 1
        return copy.copy_(master.detach())

    def copies(self, master: Tensor) -> list[Tensor]:
        """The copies of a master that there are."""
        return [one for one in self._copies.get(id(master), {}).values() if one.shape == master.shape]

    def operands(self, master: Tensor, dtype: torch.dtype | None, recipe: Operands) -> list[Tensor]:
        """What FP8 products read of a weight, as it is now; the same tensors at every step.

        Args:
            master: the weight.
            dtype: of its copy that it is made of; `None` where the weight itself has 16 bits.
            recipe: how it is made.
        """
        held, key = self._operands.setdefault((id(master), master.shape), {}), str(recipe.graph)
        new = recipe(master.detach() if dtype is None else self._copies[id(master)][dtype])
        known = held[key][2] if key in held else []
        if not known or not all(map(is_laid_out_like, known, new)):
            known = [empty_laid_out_like(one, one.dtype) for one in new]
            self.generation += 1
        held[key] = recipe, dtype, [one.copy_(value) for one, value in zip(known, new, strict=True)]
        return held[key][2]

    def number(self, master: Tensor, copies: bool) -> int:
        """In how many forms FP8 products are given a master; its copies are one more where they count."""
        return (copies and id(master) in self._copies) + len(self._operands.get((id(master), master.shape), ()))

    def follow(self, master: Tensor) -> None:
        """Make again what is kept of a master."""
        for dtype in self._copies.get(id(master), {}):
            self.get(master, dtype)
        for recipe, of, _ in [*self._operands.get((id(master), master.shape), {}).values()]:
            self.operands(master, of, recipe)


class GradientSums:
    """FP32 sums of the gradients of several batches, one per parameter, zero at first.

    Attributes:
        gathered: ids of the parameters that a batch has a gradient of, since sums were last used up; not all batches
            need have one of the same parameters.
    """

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}
        self.gathered: frozenset[int] = frozenset()

    def clear(self) -> None:
        """Forget what was gathered."""
        self.gathered = frozenset()
        for one in self._sums.values():
            one.zero_()

    def note(self, parameters: frozenset[int]) -> None:
        """Note of which parameters a batch has added gradients.

        Args:
            parameters: their ids.
        """
        if self.gathered is not parameters:  # the same object, where all batches are alike: quickly compared
            self.gathered = parameters | self.gathered if self.gathered else parameters

    def get(self, parameter: Tensor) -> Tensor:
        """The sum of a parameter's gradients; the same tensor at every step; of a complex one as real numbers."""
        gathered, real = self._sums.get(id(parameter)), as_real(parameter.detach())
        if gathered is None or gathered.shape != real.shape or gathered.device != real.device:
            gathered = self._sums[id(parameter)] = empty_laid_out_like(real, torch.float32).zero_()
        elif not is_laid_out_like(gathered, real):
            gathered = self._sums[id(parameter)] = empty_laid_out_like(real, torch.float32).copy_(gathered)
        return gathered


class Amaxes:
    """What delayed scaling of FP8 operands knows of the steps before, a matrix for each product, see `ops.fp8`.

    Args:
        device: where they live.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = device
        self._held: dict[str, Tensor] = {}

    def get(self, key: str, history: int) -> Tensor:
        """Those of a product; the same tensor at every step.

        Args:
            key: its module, and its number there.
            history: number of steps that are remembered.

        Raises:
            AmpError: a saved state has another number.
        """
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = no_amaxes(history).to(self._device)
        if held.shape[1] != history + 1:
            raise AmpError(
                f"the FP8 product '{key}' has a history of {held.shape[1] - 1}, and was given one of {history}",
                hint="use the rules that it was saved with",
            )
        return held

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, for which it waits for the device; empty without delayed scaling."""
        return {AMAXES: {key: held.tolist() for key, held in self._held.items()}} if self._held else {}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take over a saved state; of what it lacks nothing changes.

        Raises:
            AmpError: it is none, or remembers another number of steps.
        """
        amaxes = saved.get(AMAXES, {})
        if not isinstance(amaxes, Mapping):
            raise AmpError(f"the saved magnitudes are {amaxes!r}", hint=_SAVED)
        for key, rows in amaxes.items():
            try:
                loaded = torch.tensor(rows, dtype=torch.float32, device=self._device)
                if loaded.dim() != 2 or loaded.shape[0] != len(no_amaxes(1)):
                    raise ValueError(f"{tuple(loaded.shape)} numbers")
                self.get(key, loaded.shape[1] - 1).copy_(loaded)
            except (TypeError, ValueError, IndexError, RuntimeError) as cause:
                raise AmpError(f"the saved magnitudes of '{key}' are {rows!r}", hint=_SAVED) from cause


@dataclass(frozen=True, kw_only=True)
class StepState:
    """What all programs of a training step share: tensors that live from call to call, and what goes with them.

    Args:
        scale: the loss scale.
        storage: how weights are stored.
        rounding: the random state of stochastic rounding.
        parts: which weights are split over the ranks.
        masters: FP32 masters of 16-bit parameters.
        samples: how much each batch counts; `None` where all count alike.
        amaxes: what delayed scaling of FP8 operands knows of the steps before.
        graphs: what their CUDA graphs share.
        events: takes note of the steps that are skipped.
        low_weights: the 16-bit weights.
        sums: sums of gradients over several batches.
        memory: where a CPU keeps intermediate values.
    """

    scale: HeldScale
    storage: WeightStorage
    rounding: RoundingState
    parts: Parts
    masters: MasterWeights
    samples: Samples | None
    amaxes: Amaxes
    graphs: GraphSettings
    events: Events
    low_weights: LowWeights = field(default_factory=LowWeights)
    sums: GradientSums = field(default_factory=GradientSums)
    memory: ArenaMemory = field(default_factory=ArenaMemory)

    def follow(self, parameter: Tensor, state: dict[str, Any]) -> None:
        """Make again what is kept beside a parameter that was written outside of a step.

        Args:
            parameter: where and as it was.
            state: the optimizer's state of it; empty where it has none.
        """
        self.low_weights.follow(parameter)
        self.masters.follow(parameter, state)
