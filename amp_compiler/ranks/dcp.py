"""torch.distributed.checkpoint (DCP), taught one thing more: tensors of which each rank holds consecutive elements.

DCP cuts tensors into boxes. Consecutive elements of a tensor in row-major order are a few of them: the end of a row,
whole rows, the beginning of a row, and so for each dimension. So a checkpoint holds tensors of the shapes that they
have in one process, whoever holds which part of them, and DCP reads any other part from it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from amp_compiler.errors import AmpError, first_line
from amp_compiler.ranks.ranks import Ranks

Box = tuple[tuple[int, ...], tuple[int, ...]]
_DELETE = "delete the folder, and the checkpoint before it is the newest"


@dataclass(frozen=True, eq=False)
class Slice:
    """What one rank holds of a tensor.

    Args:
        part: [n], the elements in row-major order; DCP reads them from here, and writes what it loads here.
        shape: of the whole tensor.
        start: number of the first of them.
    """

    part: Tensor
    shape: torch.Size
    start: int

    def boxes(self) -> Iterator[Box]:
        """What of the whole tensor this is."""
        return boxes(tuple(self.shape), self.start, self.start + self.part.numel())

    def box(self, offsets: Sequence[int]) -> Tensor:
        """The elements of one of the boxes, a view.

        Args:
            offsets: where in the whole tensor it begins.
        """
        sizes = dict(self.boxes())[tuple(offsets)]
        first = sum(at * prod(self.shape[axis + 1 :]) for axis, at in enumerate(offsets)) - self.start
        return self.part[first : first + prod(sizes)].view(sizes)

    def chunks(self) -> list[ChunkStorageMetadata]:
        """The boxes as DCP has them."""
        return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in self.boxes()]


def boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[Box]:
    """Cut consecutive elements of a tensor into boxes, in their order; each has its elements behind one another.

    Args:
        shape: of the tensor, of at least one dimension.
        begin: number of the first element in row-major order.
        end: number behind the last one.

    Returns:
        For each box the place of its first element, and its size in each dimension.

    Example:
        >>> list(boxes((3, 4), 2, 9))
        [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if begin >= end:
        return
    if len(shape) == 1:
        yield (begin,), (end - begin,)
        return
    row = prod(shape[1:])
    first, last = -(-begin // row), end // row  # the whole rows
    if first > last:
        yield from _within(shape, last, begin - last * row, end - last * row)
        return
    yield from _within(shape, first - 1, begin - (first - 1) * row, row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _within(shape, last, 0, end - last * row)


def _within(shape: tuple[int, ...], row: int, begin: int, end: int) -> Iterator[Box]:
    for offsets, sizes in boxes(shape[1:], begin, end):
        yield (row, *offsets), (1, *sizes)


class _Saving(DefaultSavePlanner):
    """As DCP does it, and slices as boxes."""

    def create_local_plan(self) -> SavePlan:
        self._slices = {name: one for name, one in self.state_dict.items() if isinstance(one, Slice)}
        self.state_dict = {name: one for name, one in self.state_dict.items() if name not in self._slices}
        plan = super().create_local_plan()
        own = [item for name, one in self._slices.items() for item in _written(name, one)]
        self.plan = replace(plan, items=[*plan.items, *own])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        if index.fqn in self._slices:
            return self._slices[index.fqn].box(index.offset or ())
        return super().lookup_object(index)


def _written(name: str, one: Slice) -> Iterator[WriteItem]:
    properties = TensorProperties.create_from_tensor(one.part)
    for chunk in one.chunks():
        data = TensorWriteData(chunk, properties, one.shape)
        yield WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


class _Loading(DefaultLoadPlanner):
    """As DCP does it, and slices as boxes.

    Args:
        slices: by the names of the checkpoint; DCP itself would drop them.
    """

    def __init__(self, slices: Mapping[str, Slice]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._slices = slices

    def create_local_plan(self) -> LoadPlan:
        saved = cast("Metadata", self.metadata)
        items = list(create_default_local_load_plan(self.state_dict, saved).items)
        for name, one in self._slices.items():
            held = cast("TensorStorageMetadata", saved.state_dict_metadata[name])
            items += create_read_items_for_chunk_list(name, held, one.chunks())
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        if index.fqn in self._slices:
            return self._slices[index.fqn].box(index.offset or ())
        return super().lookup_tensor(index)  # type: ignore[no-any-return]


def save(state: Mapping[str, Any], folder: Path, ranks: Ranks | None) -> None:
    """Write a state into a new folder; all ranks come.

    Args:
        state: nested dicts of tensors, slices and values that can be pickled. What several ranks have under one name
            is written by one of them.
        folder: all ranks see it.
        ranks: the processes; `None` for one.

    Raises:
        AmpError: a file cannot be written.
        RankError: a rank did not come.
    """

    def run() -> None:
        writer = FileSystemWriter(folder)
        dcp_save(dict(state), storage_writer=writer, planner=_Saving(), **_group(ranks))

    _run(run, folder, ranks, "see that there is room and that all ranks may write there")


def load(state: dict[str, Any], folder: Path, ranks: Ranks | None) -> None:
    """Read what a state names from a folder, into its tensors and slices in place; all ranks come.

    Args:
        state: by the names of the checkpoint: where to a tensor goes; any other value is replaced by the one saved.
        folder: where `save` wrote, on any number of ranks.
        ranks: the processes; `None` for one.

    Raises:
        AmpError: a file cannot be read.
        RankError: a rank did not come.
    """

    slices = {name: one for name, one in state.items() if isinstance(one, Slice)}
    rest = {name: one for name, one in state.items() if name not in slices}

    def run() -> None:
        dcp_load(rest, storage_reader=FileSystemReader(folder), planner=_Loading(slices), **_group(ranks))

    _run(run, folder, ranks, _DELETE)
    state.update(rest)


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds.

    Args:
        tensors: shape and type of each, by its name.
        paths: the keys that lead to each entry, by its name.
    """

    tensors: Mapping[str, tuple[torch.Size, torch.dtype]]
    paths: Mapping[str, tuple[str, ...]]


def contents(folder: Path) -> Contents:
    """Read what a checkpoint holds.

    Raises:
        AmpError: it cannot be read.
    """
    try:
        metadata = FileSystemReader(folder).read_metadata()
    except Exception as cause:  # unpickling raises whatever it likes
        raise AmpError(f"cannot be read: {first_line(cause)}", where=str(folder / ".metadata"), hint=_DELETE) from cause
    tensors = {
        name: (one.size, one.properties.dtype)
        for name, one in metadata.state_dict_metadata.items()
        if isinstance(one, TensorStorageMetadata)
    }
    return Contents(tensors, {name: tuple(map(str, path)) for name, path in metadata.planner_data.items()})


def _group(ranks: Ranks | None) -> dict[str, Any]:
    return {"no_dist": True} if ranks is None else {"process_group": ranks.host}


def _run(run: Callable[[], None], folder: Path, ranks: Ranks | None, hint: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # of one process
            run() if ranks is None else ranks.guarded(run)
    except CheckpointException as cause:  # no subclass of Exception; the same on all ranks
        rank, (error, _) = min(cause.failures.items(), key=lambda one: one[0])
        if "pickle" in f"{type(error).__name__} {error}":
            hint = "pass as `extra`, and have as extra state of modules, what can be pickled"
        raise AmpError(
            f"rank {rank}: {type(error).__name__}: {first_line(error)}", where=str(folder), hint=hint
        ) from cause
    except OSError as cause:
        raise AmpError(f"{type(cause).__name__}: {first_line(cause)}", where=str(folder), hint=hint) from cause
