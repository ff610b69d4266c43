"""Tables of tensor addresses on the device, by which one kernel launch reaches every tensor of a group."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from amp_compiler.errors import LoweringError
from amp_compiler.ops.layout import is_dense, same_layout

COLUMNS = 8
_FIRST_ADDRESS = 2  # before it: number of elements, place in the group
_CACHED = 64
_SPARE = 16  # pinned buffers kept per size

Column = Sequence[Tensor]
Types = tuple[torch.dtype | None, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """The tensors of one launch: those whose columns have the same types.

    Args:
        types: element type of each column; `None` for a column that is not used.
        rows: int64 [tensors, 8] on the device: elements, place, addresses.
        blocks: int64 [programs] on the device: row in the upper 32 bits, block of it in the lower 32.
        aligned: whether every address is a multiple of 16 bytes.
    """

    types: Types
    rows: Tensor
    blocks: Tensor
    aligned: bool


class TableCache:
    """Makes tables and keeps those that were used last, keyed by the addresses, types and layouts they were made from.

    A table reaches the device by an asynchronous copy from pinned memory, so nothing waits. While a CUDA graph is
    captured, pinning memory may be forbidden: every table made outside a capture therefore leaves a spare pinned buffer
    of its size for a later capture, whose copy becomes a node of the graph. Tables and buffers that a capture used live
    as long as the cache, because every replay reads them.
    """

    def __init__(self) -> None:
        self._tables: OrderedDict[object, list[Group]] = OrderedDict()
        self._spare: dict[int, list[Tensor]] = {}
        self._captured: list[object] = []

    def groups(self, columns: Sequence[Column], device: torch.device, block: int) -> list[Group]:
        """One group per combination of element types, covering all tensors.

        Args:
            columns: up to six lists of n tensors: gradients, weights, extras, first and second moments, maxima. An
                empty list is a column that is not used. The tensors of one place share shape and strides and are dense.
            device: where the table is needed.
            block: elements per program.
        """
        key = (device, block, tuple(tuple(_identity(tensor) for tensor in column) for column in columns))
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        found = self._tables.get(key)
        if found is None:
            found = self._build(columns, device, block, capturing)
            if capturing:
                return found  # filled by the replays only, so of no use outside the graph
            self._tables[key] = found
            while len(self._tables) > _CACHED:
                self._tables.popitem(last=False)
        self._tables.move_to_end(key)
        if capturing:
            self._captured.append(found)
        return found

    def _build(self, columns: Sequence[Column], device: torch.device, block: int, capturing: bool) -> list[Group]:
        members: dict[Types, list[int]] = {}
        for place in range(max(map(len, columns))):
            tensors = [column[place] if column else None for column in columns]
            _require_one_layout(tensors, device)
            types = tuple(None if tensor is None else tensor.dtype for tensor in tensors)
            members.setdefault(types, []).append(place)
        words: list[int] = []
        plans = []
        for types, places in members.items():
            rows = [_row(columns, place) for place in places]
            blocks = [(i << 32) | b for i, row in enumerate(rows) for b in range(-(-row[0] // block))]
            aligned = all(address % 16 == 0 for row in rows for address in row[_FIRST_ADDRESS:])
            plans.append((types, len(rows), len(blocks), aligned))
            words += [word for row in rows for word in row] + blocks
        table = self._upload(words, device, capturing)
        groups, start = [], 0
        for types, row_count, block_count, aligned in plans:
            middle = start + row_count * COLUMNS
            rows_view = table[start:middle].view(row_count, COLUMNS)
            groups.append(Group(types, rows_view, table[middle : middle + block_count], aligned))
            start = middle + block_count
        return groups

    def _upload(self, words: list[int], device: torch.device, capturing: bool) -> Tensor:
        values = torch.tensor(words, dtype=torch.int64)
        if device.type != "cuda":
            return values
        spare = self._spare.setdefault(len(words), [])
        if not capturing:
            if len(spare) < _SPARE:
                spare.append(torch.empty_like(values, pin_memory=True))
            return values.pin_memory().to(device, non_blocking=True)
        try:
            buffer = spare.pop() if spare else torch.empty_like(values, pin_memory=True)
        except RuntimeError as cause:
            raise LoweringError(
                "the first update of these tensors falls into the capture of a CUDA graph",
                mend="run the step once before capturing it",
            ) from cause
        buffer.copy_(values)
        self._captured.append(buffer)
        return buffer.to(device, non_blocking=True)


def _identity(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _row(columns: Sequence[Column], place: int) -> list[int]:
    """One row of the table; the address of a column that is not used is 0."""
    addresses = [column[place].data_ptr() if column else 0 for column in columns]
    count = next(column[place].numel() for column in columns if column)
    return [count, place, *addresses, *[0] * (COLUMNS - _FIRST_ADDRESS - len(addresses))]


def _require_one_layout(tensors: Sequence[Tensor | None], device: torch.device) -> None:
    """Kernels walk over memory, so the same element must stand at the same place in every column."""
    present = [tensor for tensor in tensors if tensor is not None]
    for tensor in present:
        if tensor.device != device:
            raise LoweringError(
                f"a tensor is on {tensor.device}, the others on {device}",
                mend="move the optimizer's state to the device",
            )
        if not same_layout(tensor, present[0]) or not is_dense(tensor):
            raise LoweringError(
                f"tensors of shape {list(tensor.shape)} lie in memory with strides {tensor.stride()} and"
                f" {present[0].stride()}",
                mend="make them dense and of equal strides, for example with torch.empty_like and copy_",
            )
