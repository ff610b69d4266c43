"""Tables of tensor addresses on the device, by which one kernel launch reaches every tensor of a group."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from amp_compiler.errors import LoweringError
from amp_compiler.ops.layout import is_dense, same_layout

COLUMNS = 8
_ADDRESSES = 6  # behind the number of elements and the place in the group
_CACHED = 64
_SPARE = 16  # buffers kept per size
_TOGETHER = 16  # bytes that a thread loads at a time, at most, from an aligned tensor

Column = Sequence[Tensor]
Types = tuple[torch.dtype | None, ...]
Buffers = tuple[Tensor, Tensor]  # pinned, and on the device
Size = tuple[torch.device, int]  # of a table: where, and how many words


@dataclass(frozen=True, slots=True)
class Group:
    """The tensors of one launch: those whose columns have the same types, and are aligned alike.

    Args:
        types: element type of each column; `None` for a column that is not used.
        rows: int64 [tensors, 8] on the device: elements, place, six addresses.
        blocks: int64 [programs] on the device: row in the upper 32 bits, block of it in the lower 32.
        aligned: whether every address is a multiple of 16 bytes.
    """

    types: Types
    rows: Tensor
    blocks: Tensor
    aligned: bool


class TableMemory:
    """Where tables lie."""

    def remote(self, device: torch.device) -> bool:
        """Whether a copy from the host to a device goes on beside the host."""
        return device.type == "cuda"

    def capturing(self) -> bool:
        """Whether this thread is capturing a CUDA graph."""
        return torch.cuda.is_current_stream_capturing()

    def pinned(self, words: int) -> Tensor:
        """Memory of the host, int64 [words], that an asynchronous copy may read; not during a capture."""
        return torch.empty(words, dtype=torch.int64, pin_memory=True)

    def on_device(self, words: int, device: torch.device) -> Tensor:
        """Memory of a device, int64 [words]."""
        return torch.empty(words, dtype=torch.int64, device=device)


@dataclass(eq=False)
class GraphTables:
    """The tables that one captured graph reads, which live as long as this object.

    Args:
        kept: what must not go before the graph does.
        unfilled: pinned buffers and the tables that are filled from them behind the capture.
    """

    kept: list[object] = field(default_factory=list)
    unfilled: list[Buffers] = field(default_factory=list)

    def fill(self) -> None:
        """Fill the tables, without waiting; behind the capture and before the first replay, on its stream."""
        for pinned, table in self.unfilled:
            table.copy_(pinned, non_blocking=True)
        self.unfilled.clear()


class TableCache:
    """Makes tables and keeps those that were used last, keyed by the addresses, types and layouts they were made from.

    A table reaches the device by an asynchronous copy from pinned memory, so nothing waits. While a CUDA graph is
    captured nothing is copied, and pinning memory may be forbidden. Every table made outside a capture therefore leaves
    spare buffers of its size for a later capture. Within `of_graph` the tables of a capture are filled once, behind it,
    and go when the graph does. A capture by anyone else gets no new tables, because nobody would fill them.

    Args:
        memory: where tables lie.
    """

    def __init__(self, memory: TableMemory | None = None) -> None:
        self._memory = TableMemory() if memory is None else memory
        self._tables: OrderedDict[object, tuple[list[Group], Size]] = OrderedDict()
        self._spare: dict[Size, list[Buffers]] = {}
        self._graph: GraphTables | None = None

    @contextmanager
    def of_graph(self) -> Iterator[GraphTables]:
        """Around a capture: gives its tables, to be filled behind it and kept with the graph."""
        for size in list(self._spare):
            self._stock(size)
        self._graph, outer = GraphTables(), self._graph
        try:
            yield self._graph
        finally:
            self._graph = outer

    def groups(self, columns: Sequence[Column], device: torch.device, block: int) -> list[Group]:
        """One group per combination of element types and alignment, covering all tensors.

        Args:
            columns: up to six lists of n tensors: gradients, weights, extras, first and second moments, maxima. An
                empty list is a column that is not used. The tensors of one place share shape and strides and are dense.
            device: where the table is needed.
            block: elements per program.
        """
        key = (device, block, tuple(tuple(_identity(tensor) for tensor in column) for column in columns))
        capturing = self._memory.remote(device) and self._memory.capturing()
        if key not in self._tables:
            plans, words = _planned(columns, device, block)
            groups = _cut(plans, self._captured_table(words, device) if capturing else self._upload(words, device))
            if capturing:
                return groups  # not filled yet, so of no use outside the graph
            self._tables[key] = groups, (device, len(words))
            if len(self._tables) > _CACHED:
                _, (_, gone) = self._tables.popitem(last=False)
                self._stock(gone)
            self._stock((device, len(words)))
        self._tables.move_to_end(key)
        groups = self._tables[key][0]
        if capturing and self._graph is not None:
            self._graph.kept.append(groups)
        return groups

    def _stock(self, size: Size) -> None:
        """See that there are as many spare buffers of a size as tables, for a capture that needs them all anew."""
        device, words = size
        if self._memory.remote(device):
            alike = sum(other == size for _, other in self._tables.values())
            spare = self._spare.setdefault(size, [])
            while len(spare) < min(alike, _SPARE):
                spare.append((self._memory.pinned(words), self._memory.on_device(words, device)))
            if not alike:
                del self._spare[size]

    def _upload(self, words: list[int], device: torch.device) -> Tensor:
        values = torch.tensor(words, dtype=torch.int64)
        if not self._memory.remote(device):
            return values
        pinned = self._memory.pinned(len(words)).copy_(values)
        return self._memory.on_device(len(words), device).copy_(pinned, non_blocking=True)

    def _captured_table(self, words: list[int], device: torch.device) -> Tensor:
        """A table of the graph that is captured; only within `of_graph` somebody fills it."""
        spare = self._spare.get((device, len(words)))
        if self._graph is None or not spare:
            raise LoweringError(
                "the first update of these tensors falls into the capture of a CUDA graph",
                hint="run the step once before capturing it, and leave the capture to it",
            )
        pinned, table = spare.pop()
        pinned.copy_(torch.tensor(words, dtype=torch.int64))
        self._graph.unfilled.append((pinned, table))
        self._graph.kept.append(table)
        return table


Plan = tuple[Types, bool, int, int]  # with alignment, number of rows and of blocks


def _planned(columns: Sequence[Column], device: torch.device, block: int) -> tuple[list[Plan], list[int]]:
    """The groups of a table, and its words: for each group the rows, then the blocks."""
    members: dict[tuple[Types, bool], list[list[int]]] = {}
    for place in range(max(map(len, columns))):
        tensors = [column[place] if column else None for column in columns]
        _require_one_layout(tensors, device)
        types = tuple(None if tensor is None else tensor.dtype for tensor in tensors)
        aligned = all(one is None or one.data_ptr() % _TOGETHER == 0 for one in tensors)
        members.setdefault((types, aligned), []).append(_row(columns, place))
    words: list[int] = []
    plans = []
    for (types, aligned), rows in members.items():
        blocks = [(i << 32) | b for i, row in enumerate(rows) for b in range(-(-row[0] // block))]
        plans.append((types, aligned, len(rows), len(blocks)))
        words += [word for row in rows for word in row] + blocks
    return plans, words


def _cut(plans: Sequence[Plan], table: Tensor) -> list[Group]:
    groups, start = [], 0
    for types, aligned, row_count, block_count in plans:
        middle = start + row_count * COLUMNS
        rows = table[start:middle].view(row_count, COLUMNS)
        groups.append(Group(types, rows, table[middle : middle + block_count], aligned))
        start = middle + block_count
    return groups


def _identity(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _row(columns: Sequence[Column], place: int) -> list[int]:
    """One row of the table; the address of a column that is not used is 0."""
    addresses = [column[place].data_ptr() if column else 0 for column in columns]
    tensor = next(column[place] for column in columns if column)
    return [tensor.numel(), place, *addresses, *[0] * (_ADDRESSES - len(addresses))]


def _require_one_layout(tensors: Sequence[Tensor | None], device: torch.device) -> None:
    """Kernels walk over memory, so the same element must stand at the same place in every column."""
    present = [tensor for tensor in tensors if tensor is not None]
    for tensor in present:
        if tensor.device != device:
            raise LoweringError(
                f"a tensor is on {tensor.device}, the others on {device}",
                hint="move the optimizer's state to the device",
            )
        if not same_layout(tensor, present[0]) or not is_dense(tensor):
            raise LoweringError(
                f"tensors of shape {list(tensor.shape)} lie in memory with strides {tensor.stride()} and"
                f" {present[0].stride()}",
                hint="make them dense and of equal strides, for example with torch.empty_like and copy_",
            )
