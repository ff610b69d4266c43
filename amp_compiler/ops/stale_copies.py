"""Noticing that a copy is no longer its tensor rounded: no version counter tells of `weight.data.mul_()`."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from amp_compiler.ops.cpu.build import library
from amp_compiler.ops.cuda.stale_copies import DeviceCopies, kernels
from amp_compiler.ops.layout import is_dense, same_layout

_CODES = {torch.bfloat16: 2, torch.float16: 3}  # as in types.h
_LOOKED_AT = 1024  # elements of a tensor at a look; as in stale.cpp
_POINTER = ctypes.c_void_p
_TAKES = None, _POINTER, ctypes.c_int64, ctypes.c_int64, _POINTER, ctypes.py_object, _POINTER, _POINTER, _POINTER
# Where it asks Python for addresses it keeps Python's lock.
_LOOK, _LOOK_AT_ARGUMENTS = ctypes.CFUNCTYPE(*_TAKES), ctypes.PYFUNCTYPE(*_TAKES)


class CopyWatch:
    """Looks at tensors and copies of them in another type, which are to be equal to these cast.

    A look takes all elements of small tensors and 1,024 of each larger one, others at every look. On a CPU it is one
    call of compiled code, or without a compiler a loop in Python.

    Args:
        pairs: tensors and their copies. What they hold may change, and not where they lie. Sparse ones, and subclasses
            with operators of their own, such as sharded tensors, are passed over.
        takes: places of the pairs in which the copy is what counts, and the tensor takes what it has otherwise.
        whole: places of the pairs of which a look on a CPU takes all elements.
        arguments: for each pair, which argument of a call its tensor is.
        address_of: where C code lies that gives the address of a tensor of Python's.

    Example:
        >>> weight = torch.ones(3)
        >>> watch = CopyWatch([(weight, weight.bfloat16())])
        >>> watch.look()
        []
        >>> _ = weight.data.mul_(2)
        >>> watch.look()
        [0]
    """

    def __init__(
        self,
        pairs: Sequence[tuple[Tensor, Tensor]],
        takes: Collection[int] = (),
        whole: Collection[int] = (),
        arguments: Sequence[int] = (),
        address_of: int = 0,
    ) -> None:
        pairs = [(tensor.detach(), copy) for tensor, copy in pairs]  # keeps the memory that is looked at
        self._pairs, self._whole = pairs, whole
        # Of a tensor that has the type already the copy is itself.
        plain = [at for at, (one, copy) in enumerate(pairs) if _is_plain(one) and one.data_ptr() != copy.data_ptr()]
        here = [place for place in plain if pairs[place][0].is_cpu]
        compiled = library() if here else None
        taken = [place for place in here if compiled is not None and _is_taken(*pairs[place])]
        self._others = sorted({*here} - {*taken})
        self._places = taken
        self._table = np.array([_row(*pairs[place], place in whole) for place in taken], np.int64)
        if compiled is not None:
            kind = _LOOK_AT_ARGUMENTS if arguments else _LOOK
            self._call = kind(ctypes.cast(compiled.amp_stale, _POINTER).value or 0)
            self._at = np.array([arguments[place] for place in taken] if arguments else [], np.int64)
            item = ctypes.cast(ctypes.pythonapi.PyTuple_GetItem, _POINTER)
            self._addresses = self._at.ctypes.data if arguments else None, item, address_of
            self._new_flags = ctypes.c_uint8 * len(taken)
        self._elsewhere: list[_Elsewhere] = []
        for take in (False, True):
            places = [place for place in plain if not pairs[place][0].is_cpu and (place in takes) is take]
            self._elsewhere += [_Elsewhere(pairs, places, take)] if places else []

    def look(self, turn: int = 0, args: tuple[Any, ...] = ()) -> list[int]:
        """The places of the pairs on a CPU that were seen to differ; on other devices they are brought together.

        Args:
            turn: number of the look, which says where in large tensors it looks.
            args: the arguments of a call: of a pair that compiled code looks at, one that lies elsewhere differs.
        """
        stale: list[int] = []
        if self._places:
            flags = self._new_flags()  # of this call: several threads may look
            self._call(self._table.ctypes.data, len(flags), turn, flags, args, *self._addresses)
            marks = bytes(flags)
            if 1 in marks:
                stale = [place for place, mark in zip(self._places, marks, strict=True) if mark]
        for one in self._elsewhere:
            one.follow(turn)
        if self._others:
            turns = [(place, None if place in self._whole else turn) for place in self._others]
            stale += [place for place, one in turns if not _agree(*self._pairs[place], one)]
        return stale


class _Elsewhere:
    """Pairs on a device that nobody waits for. Without Triton all of them are cast anew at every look."""

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]], places: Sequence[int], take: bool) -> None:
        self._take = take
        self._by_device: list[DeviceCopies] = []
        native = [place for place in places if pairs[place][0].is_cuda and _is_taken(*pairs[place])]
        if kernels() is None or (native and torch.cuda.is_current_stream_capturing()):
            native = []
        for device in dict.fromkeys(pairs[place][0].device for place in native):
            own = [pairs[place] for place in native if pairs[place][0].device == device]
            self._by_device.append(DeviceCopies(own, take))
        self._rest = [pairs[place] for place in sorted({*places} - {*native})]

    def follow(self, turn: int) -> None:
        for copies in self._by_device:
            copies.follow(turn)
        with torch.no_grad():
            if self._rest and not self._take:
                torch._foreach_copy_([copy for _, copy in self._rest], [tensor for tensor, _ in self._rest])
            for tensor, copy in self._rest if self._take else ():
                tensor.copy_(torch.where(tensor.to(copy.dtype) == copy, tensor, copy.to(tensor.dtype)))


def compares_all(tensor: Tensor, copy: Tensor) -> bool:
    """Whether compiled code looks at each bit of a pair, so that no write to it goes unseen."""
    small = tensor.is_cpu and tensor.numel() <= _LOOKED_AT
    return small and _is_plain(tensor) and _is_taken(tensor, copy) and library() is not None


def _is_plain(tensor: Tensor) -> bool:
    own = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
    return tensor.layout is torch.strided and not own


def _is_taken(tensor: Tensor, copy: Tensor) -> bool:
    """Whether the compiled code takes a pair: dense tensors that lie alike."""
    types = tensor.dtype is torch.float32 and copy.dtype in _CODES
    return types and is_dense(tensor) and is_dense(copy) and same_layout(tensor, copy)


def _row(tensor: Tensor, copy: Tensor, whole: bool) -> tuple[int, ...]:
    return tensor.numel(), _CODES[copy.dtype], tensor.data_ptr(), copy.data_ptr(), whole


def _agree(tensor: Tensor, copy: Tensor, turn: int | None) -> bool:
    """Whether a tensor and its copy agree in what a look takes: slices of the first dimension, `None` for all."""
    with torch.no_grad():
        if turn is not None and tensor.numel() > _LOOKED_AT:
            slices = max(1, _LOOKED_AT * len(tensor) // tensor.numel())
            step = -(-len(tensor) // slices)
            tensor, copy = tensor[turn % step :: step], copy[turn % step :: step]
        rounded = tensor.to(copy.dtype)
        return bool(((rounded == copy) | (rounded.isnan() & copy.isnan())).all())
