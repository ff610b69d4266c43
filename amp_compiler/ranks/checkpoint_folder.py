"""A folder of checkpoints, of which each is whole or is not there.

A checkpoint is written into `<number>.partial` and gets its name, `<number>`, by one rename when all of it is on the
disk. What a killed run leaves under the other name is never read, and goes when the next checkpoint is written. Each
rank writes one file by `torch.save`. The file `checkpoint.json` beside them has the length and the checksum of every
other one, which are compared before any is read.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.utils._pytree as pytree

from amp_compiler.errors import AmpError, first_line
from amp_compiler.ranks.ranks import Ranks, check_equal

Made = TypeVar("Made")
ABOUT = "checkpoint.json"
PARTIAL = ".partial"
VERSION = 2
_CHUNK = 2**24  # bytes that are read at once
_DAMAGED = "copy it anew from where it is whole, or delete the folder: the checkpoint before it is then the newest"
_ROOM = "see that there is room, and that all ranks may write there"
_PLAIN = "pass as `extra`, and keep as extra state of modules, what pickle takes"
_SEEN = "give all ranks one folder that all of them see, such as on a network's file system"


def each(ranks: Ranks | None, run: Callable[[], Made]) -> list[Made]:
    """`Ranks.each`, of one process too."""
    return [run()] if ranks is None else ranks.each(run)


def numbers(folder: Path) -> list[int]:
    """The checkpoints of a folder that are whole, the oldest first; none where there is no folder."""
    return sorted(int(one.name) for one in folder.iterdir() if one.name.isdigit()) if folder.exists() else []


def write(
    folder: Path,
    number: int,
    about: Mapping[str, Any],
    own: Any,
    keep: int | None,
    ranks: Ranks | None,
) -> Path:
    """Write a checkpoint; all ranks come.

    Args:
        folder: of checkpoints.
        number: of the new one.
        about: plain values to be kept with it.
        own: what this rank writes.
        keep: how many stay, of those up to this number; `None` for all.
        ranks: the processes; `None` for one.

    Returns:
        The checkpoint's folder.

    Raises:
        AmpError: there is one with the number, the ranks do not see one folder, or a file cannot be written.
        RankError: another rank failed, or did not come.
    """
    path, partial = folder / str(number), folder / f"{number}{PARTIAL}"
    rank, size = place(ranks)

    def begin() -> None:
        with _named(folder):
            if path.exists():
                raise AmpError(
                    "there is a checkpoint already", where=str(path), hint="delete it, or pass another number"
                )
            if rank == 0:
                for left in folder.glob(f"[0-9]*{PARTIAL}"):
                    shutil.rmtree(left)
                partial.mkdir(parents=True)

    each(ranks, begin)
    files = dict(each(ranks, lambda: _saved(partial / f"rank-{rank}.pt", own)))

    def end() -> None:
        if rank == 0:
            with _named(partial):
                _finish(partial, path, {"version": VERSION, "ranks": size, **about, "files": files})
                for old in [] if keep is None else [one for one in numbers(folder) if one <= number][:-keep]:
                    shutil.rmtree((folder / str(old)).rename(folder / f"{old}{PARTIAL}"))

    each(ranks, end)
    return path


def _finish(partial: Path, path: Path, contents: Mapping[str, Any]) -> None:
    """Give what was written its name, once all of it is on the disk."""
    missing = sorted(contents["files"].keys() - {one.name for one in partial.iterdir()})
    if missing:
        raise AmpError(f"rank 0 does not see {missing[0]}, which another rank wrote", where=str(partial), hint=_SEEN)
    with (partial / ABOUT).open("w", encoding="utf-8") as file:
        json.dump({"told": contents, "checksum": _checksum(contents)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync(partial)
    partial.rename(path)
    _sync(path.parent)


def _saved(file: Path, own: Any) -> tuple[str, list[int]]:
    """Write what a rank has into a file; gives its name, length and checksum."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)  # of a rank that does not see what the first one made
        with file.open("wb") as opened:
            torch.save(pytree.tree_map_only(torch.Tensor, _alone, own), opened)
            opened.flush()
            os.fsync(opened.fileno())
        return file.name, list(_sum(file))
    except (OSError, RuntimeError) as cause:  # the latter of torch's writer
        raise AmpError(f"it cannot be written: {first_line(cause)}", where=str(file), hint=_ROOM) from cause
    except Exception as cause:  # pickling raises whatever it likes
        raise AmpError(f"it cannot be pickled: {first_line(cause)}", where=str(file), hint=_PLAIN) from cause


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without what else lies in its memory, all of which would be written."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def read(folder: Path, ranks: int) -> list[Any]:
    """What each rank wrote into a checkpoint; tensors are read from the disk when they are used.

    Args:
        folder: of the checkpoint.
        ranks: how many wrote it.

    Raises:
        AmpError: a file cannot be read.
    """
    files = [folder / f"rank-{rank}.pt" for rank in range(ranks)]
    try:
        return [torch.load(file, map_location="cpu", mmap=True, weights_only=False) for file in files]
    except Exception as cause:  # unpickling raises whatever it likes
        raise AmpError(f"cannot be read: {first_line(cause)}", where=str(folder), hint=_DAMAGED) from cause


def choose(folder: Path, number: int | None, ranks: Ranks | None) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint to load, with its `about`, after its files were compared with what was written; all ranks come.

    Args:
        folder: of checkpoints.
        number: which one; `None` for the newest.
        ranks: the processes; `None` for one.

    Returns:
        `None` where there is none, and no number was asked for.

    Raises:
        AmpError: there is none of the number, or a file was damaged.
        RankError: the ranks do not find the same one, or another one failed.
    """

    def find() -> str:
        with _named(folder):
            known = numbers(folder)
            if number is not None and number not in known:
                there = ", ".join(map(str, known)) or "none"
                raise AmpError(f"there is no checkpoint {number}", where=str(folder), hint=f"pass one of: {there}")
            if not known:
                return "none"
        path = folder / str(known[-1] if number is None else number) / ABOUT
        with _named(path, _DAMAGED):
            return f"{path.parent.name} (checksum {_sum(path)[1]:08x})"

    places = each(ranks, find)
    check_equal([{"the checkpoint that they find": one} for one in places], _SEEN)
    if places[0] == "none":
        return None
    path = folder / places[0].partition(" ")[0]
    rank, size = place(ranks)
    return path, each(ranks, lambda: _checked(path, rank, size))[rank]


def place(ranks: Ranks | None) -> tuple[int, int]:
    """The rank of this process, and how many there are."""
    return (0, 1) if ranks is None else (ranks.rank, ranks.size)


def _checked(path: Path, rank: int, size: int) -> dict[str, Any]:
    """The `about` of a checkpoint, once this rank's share of its files is as it was written."""
    file = path / ABOUT
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
        about: dict[str, Any] = read["told"]
        if read["checksum"] != _checksum(about):
            raise ValueError("it is not what was written")
        files, version = about["files"], about["version"]
    except (OSError, ValueError, TypeError, KeyError) as cause:
        raise AmpError(f"cannot be read: {first_line(cause)}", where=str(file), hint=_DAMAGED) from cause
    if version != VERSION:
        hint = "load it with the version of amp_compiler that wrote it"
        raise AmpError(f"is of version {version}, and this one reads {VERSION}", where=str(file), hint=hint)
    for name in sorted(files)[rank::size]:
        with _named(path / name, _DAMAGED):
            length, checksum = _sum(path / name)
        if [length, checksum] != files[name]:
            were = f"{files[name][0]} bytes with the checksum {files[name][1]:08x}"
            what = f"has {length} bytes with the checksum {checksum:08x}, and {were} were written"
            raise AmpError(what, where=str(path / name), hint=_DAMAGED)
    return about


def _checksum(contents: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(contents, sort_keys=True).encode())


def _sum(path: Path) -> tuple[int, int]:
    length = checksum = 0
    with path.open("rb") as file:
        while read := file.read(_CHUNK):
            length, checksum = length + len(read), zlib.crc32(read, checksum)
    return length, checksum


def _sync(folder: Path) -> None:
    """See to it that the names in a folder are on the disk."""
    if hasattr(os, "O_DIRECTORY"):  # Windows has no handle of a folder
        handle = os.open(folder, os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def _named(path: Path, hint: str = "see that it is there, and that all ranks may read and write it") -> Iterator[None]:
    try:
        yield
    except OSError as cause:
        raise AmpError(
            f"it cannot be read or written: {cause.strerror}", where=str(cause.filename or path), hint=hint
        ) from cause
