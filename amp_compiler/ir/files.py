"""Writing files so that a reader never sees half of one: in a folder beside them first, then by one rename.

An output keeps its mode, and one that is a symbolic link stays a link: what it leads to is written. A folder that a
killed run has left behind is removed by the next run beside it, which sees that nobody holds its lock any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from amp_compiler.errors import AmpError

PREFIX = ".amp_compiler-"
"""What the name of every folder that files are made in begins with."""
_PATIENCE = 10.0  # seconds to wait for another run that is putting its files in place


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Write `content` to a file in a folder beside `path`, then rename it over `path`.

    Args:
        path: the file. One that exists keeps its mode; a symbolic link stays, and the file it leads to is written.
        content: a text, written as UTF-8, or bytes.

    Raises:
        AmpError: where the folder does not exist or cannot be written, or `path` is there and no regular file.
    """
    target = output_file(path)
    data = content.encode("utf-8") if isinstance(content, str) else content
    try:
        with workspace(target.parent) as folder:
            draft = folder / "made"
            draft.write_bytes(data)
            publish(draft, target)
    except OSError as cause:
        raise AmpError(
            f"cannot write there: {cause.strerror}",
            where=str(path),
            hint="name a file in a folder that can be written",
        ) from cause


def output_file(path: str | Path, error: type[AmpError] = AmpError) -> Path:
    """The regular file that `path` names, there or not yet, symbolic links followed.

    Args:
        path: a path that the user gave.
        error: what to raise.

    Raises:
        AmpError: it names a folder, a pipe, a device or a socket, or no file that could be; or its folder is missing.
    """
    text = os.fspath(path)
    shown = str(path) or "''"
    if not text or "\0" in text:
        raise error("it is no name of a file", where=repr(text), hint="name a file in a folder that exists")
    try:
        target = Path(os.path.realpath(text))
        mode = target.stat().st_mode
    except FileNotFoundError:
        if not target.parent.is_dir():
            raise error("there is no such folder", where=shown, hint=f"create {target.parent} first") from None
        return target
    except OSError as cause:
        raise error(f"cannot write there: {cause.strerror}", where=shown, hint="name another file") from cause
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe, a device or a socket"
        raise error(f"it is {kind}, and not a file", where=shown, hint="name a file in a folder that exists")
    return target


@contextlib.contextmanager
def workspace(folder: Path) -> Iterator[Path]:
    """A new folder within `folder`, to make files in that are then renamed; it is gone afterwards.

    Args:
        folder: where the files will stand, so that a rename is all that it takes.

    Raises:
        OSError: nothing can be written there.
    """
    sweep(folder)
    created, handle = _locked(folder)
    try:
        yield created
    finally:
        shutil.rmtree(created, ignore_errors=True)
        if handle is not None:
            os.close(handle)


def _locked(folder: Path) -> tuple[Path, int | None]:
    """A new folder and the handle that locks it; another run may have swept it away before it was locked."""
    while True:
        created = Path(tempfile.mkdtemp(dir=folder, prefix=PREFIX))
        handle = os.open(created, os.O_RDONLY)
        locked = _lock(handle)
        with contextlib.suppress(FileNotFoundError):
            if locked and created.stat().st_ino == os.fstat(handle).st_ino:
                return created, handle
        os.close(handle)
        if locked is False and created.exists():  # else a run beside this one takes it for one left behind
            return created, None


def _lock(handle: int) -> bool | None:
    """Whether the lock on a folder is had; `None` where another run has it, false in a file system without locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except OSError:
        return False
    return True


def sweep(folder: Path) -> None:
    """Remove the folders that killed runs have left within a folder. What cannot be removed stays."""
    try:
        folders = [Path(entry.path) for entry in os.scandir(folder) if entry.name.startswith(PREFIX)]
    except OSError:
        return
    for left in folders:
        if left.is_symlink() or not left.is_dir():
            continue
        with contextlib.suppress(OSError):
            handle = os.open(left, os.O_RDONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # whoever works in it holds this lock
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(handle)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[bool]:
    """Whether no other run is putting files in place in a folder, until the end of the block.

    False where the file system knows no locks, or another run takes longer than ten seconds.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        until = time.monotonic() + _PATIENCE
        while (locked := _lock(handle)) is None and time.monotonic() < until:
            time.sleep(0.02)
        yield bool(locked)
    finally:
        os.close(handle)


def publish(draft: Path, target: Path) -> None:
    """Rename a file over another one, whose mode it takes on.

    Args:
        draft: a file of the same file system.
        target: no symbolic link.
    """
    with contextlib.suppress(FileNotFoundError):
        draft.chmod(stat.S_IMODE(target.stat().st_mode))
    draft.replace(target)
