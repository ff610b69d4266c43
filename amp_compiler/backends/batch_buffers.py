"""`Buffers`: where a captured graph reads the batch, filled before every replay with as few copies as can be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NARROW = 1 << 20  # bytes of a tensor up to which it is copied in words of less than 4 bytes, which is slower


class Buffers:
    """Tensors of fixed addresses, laid out like those of a batch; dimensions of stride 0 are stored once.

    Tensors whose bytes can be seen as words of one size are copied together, in one launch on a GPU.

    Args:
        inputs: of a step.
        places: those of them that come from the batch and are tensors.
    """

    def __init__(self, inputs: Sequence[Any], places: Sequence[int]) -> None:
        self._places = list(places)
        likes = [inputs[place] for place in places]
        sizes = [_stored_sizes(like) for like in likes]
        self._stored = [
            torch.empty_strided(size, like.stride(), dtype=like.dtype, device=like.device)
            for size, like in zip(sizes, likes, strict=True)
        ]
        self._shapes = [like.shape for like in likes]
        together = _together(self._stored)
        self._copied = [
            (place, None if size == shape else size, self._stored[number], together.get(number))
            for number, (place, size, shape) in enumerate(zip(places, sizes, self._shapes, strict=True))
        ]
        self._joint = [_seen_as(self._stored[number], word) for number, word in together.items()]

    def put_into(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs, with the buffers in the place of the batch."""
        fixed = list(inputs)
        for place, stored, shape in zip(self._places, self._stored, self._shapes, strict=True):
            fixed[place] = stored.expand(shape)
        return fixed

    def fill(self, inputs: Sequence[Any]) -> None:
        """Copy in a batch of the same form, without waiting."""
        joint = []
        for place, sizes, stored, word in self._copied:
            source = inputs[place]
            if sizes is not None:
                source = source.as_strided(sizes, source.stride(), source.storage_offset())
            if word is None:
                stored.copy_(source, non_blocking=True)
            else:
                joint.append(_seen_as(source, word))
        if joint:
            torch._foreach_copy_(self._joint, joint, non_blocking=True)


def _stored_sizes(like: Tensor) -> torch.Size:
    return torch.Size(1 if stride == 0 else size for size, stride in zip(like.shape, like.stride(), strict=True))


def _seen_as(tensor: Tensor, word: torch.dtype) -> Tensor:
    return tensor if tensor.dtype is word else tensor.view(word)


def _together(tensors: Sequence[Tensor]) -> dict[int, torch.dtype]:
    """Which tensors are copied in one call, by their numbers, and as what: all of one type."""
    if len(tensors) < 2:
        return {}
    if len({tensor.dtype for tensor in tensors}) == 1:
        return dict.fromkeys(range(len(tensors)), tensors[0].dtype)
    fit = {n: t for n, t in enumerate(tensors) if t.dim() and t.stride(-1) == 1 and not t.is_complex()}
    wide = {n: t for n, t in fit.items() if t.element_size() >= 4}
    if any(t.nbytes > _NARROW for t in fit.values()) or len(wide) == len(fit):
        fit = wide
    if len(fit) < 2:
        return {}
    return dict.fromkeys(fit, _WORDS[min(t.element_size() for t in fit.values())])
