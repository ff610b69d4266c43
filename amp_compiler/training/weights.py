"""How the optimizer holds the parameters: FP32 masters of 16-bit parameters, or 16-bit weights without a master.

This follows the `weights` section of a rule file. With `{master: fp32}` an FP32 parameter is its own master, and a
parameter that came in as FP16 or BF16 gets one in `optimizer.state[p]["master"]`. With `{master: low}` the weights are
stored in 16 bits alone; `rounding` says how an update is stored, and what Kahan's summation keeps beside a weight is
in `optimizer.state[p]["compensation"]`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from amp_compiler.errors import AmpError
from amp_compiler.fx.graph import LOW_TYPES
from amp_compiler.ops.update.rounding import Storage, WeightStorage, saturated
from amp_compiler.ranks.parts import Parts
from amp_compiler.training.optimizers.state import laid_out, narrowed, told_beyond

logger = logging.getLogger("amp_compiler")
MASTER, COMPENSATION = "master", "compensation"  # keys in the optimizer's state of a parameter
OWN_KEY = "amp_compiler"  # of a step's state_dict: what GradScaler has no key for
_STORED_LOW = "amp_stored_low"  # attribute of a parameter that was FP32 and is stored in 16 bits since


def weight_storage(section: Mapping[str, Any]) -> WeightStorage:
    """Read the `weights` section of a rule set.

    Args:
        section: `RuleSet.weights`.

    Raises:
        AmpError: a rounding, or another way with overflow, is asked for where there are FP32 masters, which it would
            not touch.

    Example:
        >>> weight_storage({"master": "low", "rounding": "kahan"}).rounding.name
        'KAHAN'
    """
    low = section.get("master", "fp32") == "low"
    rounding = Storage[str(section.get("rounding", "nearest")).upper()]
    if not low and rounding is not Storage.NEAREST:
        raise AmpError(
            f"weights.rounding is '{rounding.name.lower()}' and weights.master is 'fp32'",
            hint="write weights: {master: low, rounding: ...}; FP32 masters are never rounded to 16 bits",
        )
    skips = section.get("overflow", "clip") == "skip"
    if not low and skips:
        raise AmpError(
            "weights.overflow is 'skip' and weights.master is 'fp32'",
            hint="write weights: {master: low, overflow: skip}; FP32 masters are never clipped",
        )
    return WeightStorage(low, rounding, skips)


def store_alone(named: Mapping[str, Tensor], low: torch.dtype, storage: WeightStorage) -> None:
    """Convert FP32 parameters in place, as `store_low`, that have no master beside them.

    Args:
        named: the parameters by name.
        low: the 16-bit type.
        storage: whether finite numbers beyond that type are stored as the largest that it holds, which is said.

    Raises:
        AmpError: they are not, and there are some; nothing is converted then.
    """
    overflows = {name: told_beyond(name, parameter.detach(), low) for name, parameter in named.items()}
    for beyond in filter(None, overflows.values()):
        if storage.skips:
            raise AmpError(
                f"{beyond}, and weights.overflow is 'skip'",
                hint="write weights: {master: fp32}, or overflow: clip, or use dtype='bf16'",
            )
        logger.warning("%s; they are stored as the largest that it holds", beyond)
    for name, parameter in named.items():
        if overflows[name]:
            parameter.data = saturated(parameter.data, low)
        store_low(parameter, low)


def store_low(parameter: Tensor, low: torch.dtype) -> None:
    """Convert an FP32 parameter, and its gradient where it has one, in place: the same object in 16 bits.

    The parameter is marked, so that every training step captures the model with it in FP32, as it was written.
    """
    parameter.data = parameter.data.to(low)
    if parameter.grad is not None:
        parameter.grad.data = parameter.grad.data.to(low)
    setattr(parameter, _STORED_LOW, True)


def is_stored_low(parameter: Tensor) -> bool:
    """True for a parameter that `store_low` converted and that is still in 16 bits."""
    return parameter.dtype in LOW_TYPES and hasattr(parameter, _STORED_LOW)


@contextmanager
def widened(parameters: Iterable[Tensor]) -> Iterator[None]:
    """While a model is captured, the parameters that `store_low` converted are FP32 again, with the same values."""
    kept = [(parameter, parameter.data) for parameter in parameters if is_stored_low(parameter)]
    try:
        for parameter, data in kept:
            parameter.data = data.float()
        yield
    finally:
        for parameter, data in kept:
            parameter.data = data


def check_parameters(
    model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer], low: torch.dtype, enabled: bool
) -> None:
    """Refuse parameters of types that a step cannot train.

    Args:
        model: the loss as a module.
        optimizers: checked optimizers; parameters that are not theirs may have any type.
        low: the step's 16-bit type.
        enabled: whether mixed precision is on.

    Raises:
        AmpError: a parameter is neither FP32, complex64 nor 16-bit, is in 16 bits with mixed precision off, or in
            another 16-bit type than the step's.
    """
    owned = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    for path, parameter in model.named_parameters():
        name, kind = path.partition(".")[2], str(parameter.dtype).removeprefix("torch.")
        if id(parameter) not in owned or parameter.dtype in (torch.float32, torch.complex64):
            continue
        if parameter.dtype not in LOW_TYPES:
            what = f"parameter '{name}' is {kind}, and updates are computed in FP32"
            hint = "make it complex64" if parameter.is_complex() else "convert the model with .float()"
            raise AmpError(what, hint=hint)
        if not enabled:
            what = f"enabled=False trains in plain FP32, and parameter '{name}' is {kind}"
            raise AmpError(what, hint="convert the model with .float()")
        if parameter.dtype is not low:
            wanted = "fp16" if parameter.dtype is torch.float16 else "bf16"
            raise AmpError(
                f"parameter '{name}' is {kind} and the low type is {str(low).removeprefix('torch.')}",
                hint=f"pass dtype='{wanted}', or convert the model with .float()",
            )


class MasterWeights:
    """The FP32 masters of parameters that came in as FP16 or BF16, kept in the optimizer's state.

    The update writes master and parameter together. Where a parameter was changed outside of it, the master follows:
    an element that is no longer its master rounded takes the parameter's value. All other elements keep their master,
    so a checkpoint may be loaded into model and optimizer in any order.
    """

    def __init__(self, parts: Parts) -> None:
        self._asked_for: set[int] = set()
        self._parts = parts

    def has(self, parameter: Tensor) -> bool:
        """Whether there is one of this parameter that a step has asked for."""
        return id(parameter) in self._asked_for

    def get(self, parameter: Tensor, state: dict[str, Any]) -> Tensor:
        """The master of a parameter as that is now; made first where the optimizer has none yet.

        Args:
            parameter: fp16 or bf16.
            state: the optimizer's state of it.

        Returns:
            fp32 of the same shape; this rank's part of it, where it is split; the same tensor at every step.

        Raises:
            AmpError: the master in the state is not FP32, because it was loaded before there was a step to keep it so;
                or it is of another shape, as a step leaves it that splits its update over ranks.
        """
        self._asked_for.add(id(parameter))
        is_split = parameter in self._parts
        value = self._parts.of(parameter) if is_split else parameter.detach()
        master: Tensor = state[MASTER] if MASTER in state else state.setdefault(MASTER, value.float())
        if master.dtype is not torch.float32:
            raise narrowed(MASTER, master)
        master = self._parts.held(state, MASTER, parameter) if is_split else laid_out(state, MASTER, parameter)
        _take(master, value)
        return master

    def split(self, parameter: Tensor, state: dict[str, Any], low: torch.dtype) -> None:
        """Convert an FP32 parameter to 16 bits, beside this rank's part of its value, its master.

        Args:
            parameter: split over the ranks.
            state: the optimizer's state of it.
            low: the 16-bit type.
        """
        if MASTER not in state:
            state[MASTER] = self._parts.of(parameter)
        store_low(parameter, low)

    @staticmethod
    def take_in(parameter: Tensor, state: dict[str, Any]) -> None:
        """Give an FP32 parameter what it was rounded from, where that was loaded beside it as its master.

        Args:
            parameter: its own master from here on.
            state: the optimizer's state of it, in which there is a master.
        """
        master = state.pop(MASTER)
        if master.shape == parameter.shape:
            with torch.no_grad():
                same = torch.stack([master.to(low).float() == parameter for low in LOW_TYPES]).any(0)
                parameter.copy_(torch.where(same, master, parameter))

    def follow(self, parameter: Tensor, state: dict[str, Any]) -> None:
        """Bring a master, where there is one, to what was written into its parameter.

        Args:
            parameter: where and as it was.
            state: the optimizer's state of it.
        """
        if MASTER in state and self.has(parameter):
            self.get(parameter, state)


def _take(master: Tensor, parameter: Tensor) -> None:
    """Let a master follow the parameter where it is no longer that one's value before it was rounded."""
    with torch.no_grad():
        same = master.to(parameter.dtype) == parameter
        master.copy_(torch.where(same, master, parameter.float()))
