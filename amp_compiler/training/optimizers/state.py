"""Types of the optimizer's state: FP32 state of 16-bit parameters stays FP32, also through `load_state_dict`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from amp_compiler.errors import AmpError
from amp_compiler.fx.graph import LOW_TYPES
from amp_compiler.ops.layout import empty_laid_out_like, is_laid_out_like
from amp_compiler.ops.update.rounding import outgrows, saturated

logger = logging.getLogger("amp_compiler")
_KEEPING: WeakSet[torch.optim.Optimizer] = WeakSet()


def send_numbers(target: Tensor, values: Sequence[Any], sent: Sequence[Any]) -> Sequence[Any]:
    """Give a device numbers that schedulers may have changed, without a sync.

    Args:
        target: FP64 vector on the device.
        values: numbers, or tensors of one number.
        sent: what was given last, as this has returned it.

    Returns:
        What to give as `sent` the next time.
    """
    if any(isinstance(value, Tensor) for value in values):
        for place, value in enumerate(values):
            target[place].copy_(torch.as_tensor(value, dtype=torch.float64).squeeze(), non_blocking=True)
        return ()
    if values != sent:
        target.copy_(torch.tensor(values, dtype=torch.float64), non_blocking=True)
    return values


def retyped(state: dict[str, Any], column: str, wanted: torch.dtype, *, wide: bool = False) -> Tensor:
    """A state tensor in the type that the update keeps it in; converted, in the state too, where it is not.

    Args:
        state: the optimizer's state of one parameter.
        column: key in it.
        wanted: the type.
        wide: whether it is FP32 state of a 16-bit weight.

    Raises:
        AmpError: such state is 16-bit. It may have been narrowed when it was loaded.
    """
    value: Tensor = state[column]
    if value.dtype is wanted:
        return value
    if wide and value.dtype in LOW_TYPES:
        raise narrowed(column, value)
    if beyond := told_beyond(column, value, wanted):
        logger.warning("%s; they are stored as the largest that it holds", beyond)
    state[column] = saturated(value, wanted).to(wanted)
    return state[column]  # type: ignore[no-any-return]


def told_beyond(name: str, value: Tensor, low: torch.dtype) -> str:
    """What is said where finite values become infinite in another type; empty where none does.

    Args:
        name: of the tensor.
        value: any type and shape; for one on torch's meta device nothing is said.
        low: the other type.
    """
    if value.is_meta or not outgrows(value, low):
        return ""
    number, kind = int((value.to(low).isinf() & value.isfinite()).sum()), str(low).removeprefix("torch.")
    return f"{number} of the {value.numel()} numbers of '{name}' are beyond what {kind} holds"


def laid_out(state: dict[str, Any], column: str, parameter: Tensor) -> Tensor:
    """A state tensor with the strides of its parameter, as the updates need it; laid out anew, in the state, if not so.

    They part where a checkpoint is loaded into a model of another memory format, or the model is converted.

    Args:
        state: the optimizer's state of the parameter.
        column: key in it.
        parameter: of the same shape.

    Raises:
        AmpError: the shapes differ.
    """
    value: Tensor = state[column]
    if value.shape != parameter.shape:
        raise AmpError(
            f"optimizer.state holds '{column}' of shape {list(value.shape)} for a parameter of {list(parameter.shape)}",
            hint="load the state_dict of an optimizer over the same parameters",
        )
    if not is_laid_out_like(value, parameter):
        state[column] = empty_laid_out_like(parameter, value.dtype).copy_(value)
    return state[column]  # type: ignore[no-any-return]


def narrowed(column: str, value: Tensor) -> AmpError:
    """The error for state that was loaded before there was a step to keep its type."""
    kind = str(value.dtype).removeprefix("torch.")
    return AmpError(
        f"optimizer.state holds '{column}' in {kind}: torch's load_state_dict narrows it to the parameter's type",
        hint="make the training step first and load the optimizer's state after it; or delete the entry to start anew",
    )


def keep_state_types(optimizer: torch.optim.Optimizer) -> None:
    """Let `optimizer.load_state_dict` keep the saved types of the state of 16-bit parameters, bit for bit.

    torch converts every floating-point state tensor to the type of its parameter, which would round FP32 masters and
    moments to 16 bits. State of other parameters is loaded as torch does it.
    """
    if optimizer in _KEEPING:
        return
    _KEEPING.add(optimizer)
    pending: list[Mapping[str, Any]] = []

    def remember(_: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        pending[:] = [saved]

    def restore(loaded: torch.optim.Optimizer) -> None:
        saved = pending.pop()
        names = chain.from_iterable(group["params"] for group in saved["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in loaded.param_groups)
        for name, parameter in zip(names, parameters, strict=True):
            if parameter.dtype in LOW_TYPES:
                _restore_types(loaded.state[parameter], saved["state"].get(name, {}), parameter.device)

    optimizer.register_load_state_dict_pre_hook(remember)
    optimizer.register_load_state_dict_post_hook(restore)


def _restore_types(state: dict[str, Any], saved: Mapping[str, Any], device: torch.device) -> None:
    for key, value in saved.items():
        restored = state.get(key)
        if isinstance(value, Tensor) and isinstance(restored, Tensor) and value.dtype != restored.dtype:
            state[key] = value.detach().to(device, copy=True)
