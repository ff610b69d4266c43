"""Noticing that a 16-bit copy is no longer its FP32 tensor rounded: no version counter tells of `weight.data.mul_()`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from amp_compiler.ops.cpu.build import library
from amp_compiler.ops.layout import is_dense, is_turned, same_layout

_CODES = {torch.bfloat16: 2, torch.float16: 3}  # as in types.h
_LOOKED_AT = 1024  # elements of a tensor at a look; as in stale.cpp


class CopyWatch:
    """Looks at tensors and copies of them in another type, which are to be equal to these cast.

    A look takes all elements of small tensors and 1,024 of each larger one, others at every look. On a CPU it is one
    call of compiled code, or without a compiler a loop in Python.

    Args:
        pairs: tensors and their copies, on a CPU. What they hold may change, and not where they lie.

    Example:
        >>> weight = torch.ones(3)
        >>> watch = CopyWatch([(weight, weight.bfloat16())])
        >>> watch.look()
        []
        >>> _ = weight.data.mul_(2)
        >>> watch.look()
        [0]
    """

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._pairs, self._turn = list(pairs), -1
        compiled = library() if pairs else None
        taken = [place for place, pair in enumerate(pairs) if compiled is not None and _is_taken(*pair)]
        self._others = sorted({*range(len(pairs))} - {*taken})
        self._places = np.array(taken, np.int64)
        self._table = np.array([_row(*self._pairs[place]) for place in taken], np.int64)
        self._flags = np.zeros(len(taken), np.uint8)
        if compiled is not None:
            self._call = compiled.amp_stale
            self._call.restype = ctypes.c_int64
            self._arguments = ctypes.c_void_p(self._table.ctypes.data), ctypes.c_int64(len(taken))
            self._found = ctypes.c_void_p(self._flags.ctypes.data)

    def look(self) -> list[int]:
        """The places of the pairs that were seen to differ."""
        self._turn += 1
        found = []
        if len(self._places):
            if self._call(*self._arguments, ctypes.c_int64(self._turn), self._found):
                found = self._places[self._flags.nonzero()].tolist()
        return found + [place for place in self._others if not _agree(*self._pairs[place], self._turn)]


def _is_taken(tensor: Tensor, copy: Tensor) -> bool:
    """Whether the compiled code takes a pair: plain tensors that lie alike, or one with its channels last."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.dtype is torch.float32 and copy.dtype in _CODES
    return plain and is_dense(tensor) and (is_turned(copy, tensor) or (same_layout(tensor, copy) and is_dense(copy)))


def _row(tensor: Tensor, copy: Tensor) -> tuple[int, ...]:
    sizes = (tensor.shape[1], tensor.shape[2:].numel()) if is_turned(copy, tensor) else (1, 1)
    return tensor.numel(), _CODES[copy.dtype], tensor.data_ptr(), copy.data_ptr(), *sizes


def _agree(tensor: Tensor, copy: Tensor, turn: int) -> bool:
    """Whether a tensor and its copy agree, as far as one look goes: in some of the slices of the first dimension."""
    with torch.no_grad():
        if tensor.numel() > _LOOKED_AT:
            slices = max(1, _LOOKED_AT * len(tensor) // tensor.numel())
            step = -(-len(tensor) // slices)
            tensor, copy = tensor[turn % step :: step], copy[turn % step :: step]
        made = tensor.to(copy.dtype)
        return bool(((made == copy) | (made.isnan() & copy.isnan())).all())
