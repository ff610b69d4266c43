"""`Buffers`: where a captured graph reads the batch, filled before every replay by one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Buffers:
    """Tensors of fixed addresses, laid out like those of a batch; dimensions of stride 0 are stored once.

    Args:
        inputs: of a step.
        places: those of them that come from the batch and are tensors.
    """

    def __init__(self, inputs: Sequence[Any], places: Sequence[int]) -> None:
        likes = {place: inputs[place] for place in places}
        self._shapes = {place: like.shape for place, like in likes.items()}
        self._stored: dict[int, Tensor] = {
            place: torch.empty_strided(_stored_sizes(like), like.stride(), dtype=like.dtype, device=like.device)
            for place, like in likes.items()
        }

    def put_into(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs, with the buffers in the place of the batch."""
        fixed = list(inputs)
        for place, stored in self._stored.items():
            fixed[place] = stored.expand(self._shapes[place])
        return fixed

    def fill(self, inputs: Sequence[Any]) -> None:
        """Copy in a batch of the same form, without waiting."""
        sources = [_seen_as(inputs[place], stored) for place, stored in self._stored.items()]
        if sources:
            torch._foreach_copy_([*self._stored.values()], sources, non_blocking=True)


def _stored_sizes(like: Tensor) -> torch.Size:
    return torch.Size(1 if stride == 0 else size for size, stride in zip(like.shape, like.stride(), strict=True))


def _seen_as(source: Tensor, stored: Tensor) -> Tensor:
    """The elements of a tensor that are stored."""
    same = source.shape == stored.shape
    return source if same else source.as_strided(stored.shape, source.stride(), source.storage_offset())
