"""Sequences, which are tuples of tensors here, and optionals, which are the value or `None`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amp_compiler.onnx.importing.ops.registry import op
from amp_compiler.onnx.importing.ops.values import Host, as_host, number, numbers


@op("SequenceConstruct")
def _construct(*values: Tensor) -> tuple[Tensor, ...]:
    return values


@op("SequenceEmpty", pure=False)
def _empty(*, dtype: int = 1) -> tuple[Tensor, ...]:
    return ()


@op("SequenceAt", host=(1,))
def _at(values: Any, place: Any) -> Tensor:
    return values[number(place)]  # type: ignore[no-any-return]


@op("SequenceInsert", host=(2,))
def _insert(values: Any, value: Tensor, place: Any = None) -> tuple[Tensor, ...]:
    items = list(values)
    items.insert(len(items) if place is None else number(place), value)
    return tuple(items)


@op("SequenceErase", host=(1,))
def _erase(values: Any, place: Any = None) -> tuple[Tensor, ...]:
    items = list(values)
    del items[-1 if place is None else number(place)]
    return tuple(items)


@op("SequenceLength")
def sequence_length(values: Any) -> Host:
    """The number of tensors of a sequence as a host value."""
    return as_host(len(values))


@op("ConcatFromSequence")
def _concat(values: Any, *, axis: int, new_axis: int = 0) -> Tensor:
    return torch.stack(list(values), axis) if new_axis else torch.cat(list(values), axis)


@op("SplitToSequence", host=(1,))
def _split(x: Tensor, split: Any = None, *, axis: int = 0, keepdims: int = 1) -> tuple[Tensor, ...]:
    if split is None:
        parts = torch.split(x, 1, axis)
        return parts if keepdims else tuple(part.squeeze(axis) for part in parts)
    return torch.split(x, number(split) if split.ndim == 0 else numbers(split), axis)


@op("Optional", pure=False)
def _optional(value: Any = None, *, type: Any = None) -> Any:
    return value


@op("OptionalHasElement", pure=False)
def _optional_has(value: Any = None) -> Tensor:
    return torch.tensor(value is not None)
