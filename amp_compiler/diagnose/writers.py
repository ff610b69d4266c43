"""Callbacks that write: lines of JSON, and TensorBoard's event files."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import weakref
from abc import abstractmethod
from pathlib import Path
from typing import Any

from amp_compiler.errors import AmpError
from amp_compiler.ir.files import output_file
from amp_compiler.ir.run_file import StepRecord
from amp_compiler.training.reporting.log import Callback

logger = logging.getLogger("amp_compiler")
_BLOCK = 1 << 16


class Writer(Callback):
    """A callback that writes somewhere.

    Where it cannot write, a warning says so once, the training goes on, and each further record is tried anew; another
    warning says when it can write again, and how many records are missing.

    Args:
        every: as for `Callback`.
        where: what warnings name.
    """

    def __init__(self, every: int, where: str) -> None:
        super().__init__(every)
        self._where, self._missing, self._last = where, 0, 0

    @abstractmethod
    def _write(self, record: StepRecord) -> None:
        """Write a record whole.

        Raises:
            OSError, ValueError: it cannot be written.
        """

    def on_step(self, record: StepRecord) -> None:
        """Write a record, or warn."""
        if record.step <= self._last:
            logger.warning(
                "%s has records up to step %d, and the training goes on with step %d: those from there on no longer "
                "count. A training that is resumed goes on counting where the step's state_dict() is loaded; another "
                "one needs a place of its own",
                self._where, self._last, record.step,
            )  # fmt: skip
        self._last = record.step
        try:
            self._write(record)
        except (OSError, ValueError) as cause:
            self._missing += 1
            if self._missing == 1:
                reason = getattr(cause, "strerror", None) or cause
                logger.warning(
                    "%s cannot be written: %s; the training goes on without it, and records are missing until it can",
                    self._where, reason,
                )  # fmt: skip
            return
        if self._missing:
            logger.warning("%s is written again; %d records are missing", self._where, self._missing)
            self._missing = 0


class JSONLines(Writer):
    """Appends one line of JSON for each record to a file; `amp-compiler plot` draws it, `read_run` reads it.

    A line is written by one call and never buffered, so that a run that is killed leaves whole lines. A line that is
    torn all the same, as by a full disk, is taken out again: at once, or when the next run appends to the file.

    Args:
        path: the file. One that exists is appended to: a training that is resumed goes on in it, with the numbers of
            its steps where the step's `state_dict()` is loaded.
        every: after how many updates a line is written.

    Raises:
        AmpError: the file cannot be written.

    Example:
        >>> import tempfile, torch, amp_compiler as amp
        >>> path = tempfile.mkdtemp() + "/run.jsonl"
        >>> model = torch.nn.Linear(4, 1)
        >>> step = amp.training_step(model, lambda m, x: m(x).mean(), torch.optim.SGD(model.parameters(), 0.1),
        ...                          dtype="bf16", backend="eager", callbacks=[amp.callbacks.JSONLines(path, every=2)])
        >>> losses = [step(torch.ones(2, 4)) for _ in range(4)]
        >>> [record.step for record in amp.callbacks.read_run(path).records]
        [2, 4]
    """

    def __init__(self, path: str | Path, every: int = 1) -> None:
        super().__init__(every, str(path))
        self._path, self._file = output_file(path), -1
        try:
            self._open()
        except OSError as cause:
            raise AmpError(
                f"it cannot be written: {cause.strerror}", where=str(path), hint="name a file that can be written"
            ) from cause
        self._last = _last_step(self._file)

    def _open(self) -> None:
        self._file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
        self._finalizer = weakref.finalize(self, _close, self._file)
        torn = _torn(self._file)
        if torn:
            os.ftruncate(self._file, os.fstat(self._file).st_size - torn)
            logger.warning("the last line of %s was torn, and is taken out: %d bytes", self._where, torn)

    def _write(self, record: StepRecord) -> None:
        if self._file < 0:
            self._open()
        line, written, begin = (record.to_json() + "\n").encode(), 0, 0
        try:
            begin = os.fstat(self._file).st_size
            while written < len(line):
                now = os.write(self._file, line[written:])
                if now == 0:
                    raise OSError(errno.EIO, "nothing was written")
                written += now
        except OSError:
            # Half of a line must not stay; but what another run has appended behind it must.
            if written and os.fstat(self._file).st_size == begin + written:
                os.ftruncate(self._file, begin)
            self.close()  # what is wrong may be the open file, and not the place
            raise

    def close(self) -> None:
        """Close the file; a record that comes later opens it again."""
        if self._file >= 0:
            self._finalizer()
            self._file = -1


def _close(file: int) -> None:
    with contextlib.suppress(OSError):  # such as one that stands for a disk that has gone
        os.close(file)


def _torn(file: int) -> int:
    """How many bytes stand behind the last end of a line."""
    size = end = os.fstat(file).st_size
    while end > 0:
        begin = max(0, end - _BLOCK)
        os.lseek(file, begin, os.SEEK_SET)
        place = os.read(file, end - begin).rfind(b"\n")
        if place >= 0:
            return size - (begin + place + 1)
        end = begin
    return size


def _last_step(file: int) -> int:
    """The number of the step in the last line of a file of whole lines; 0 where there is none."""
    size = os.fstat(file).st_size
    os.lseek(file, max(0, size - _BLOCK), os.SEEK_SET)
    text = os.read(file, _BLOCK).decode("utf-8", "replace").rstrip("\n")
    try:
        return StepRecord.from_json(text.rpartition("\n")[2]).step
    except ValueError:
        return 0


class TensorBoard(Writer):
    """Writes each record as scalars for TensorBoard, by `torch.utils.tensorboard`.

    `loss`, `grad_norm` and what the loss function returned stand by themselves; the loss scale, skipped steps and what
    is lost under `amp/`, milliseconds and memory under `speed/`.

    Args:
        log_dir: the folder, as for `SummaryWriter`. A training that is resumed goes on in it: what stands there behind
            its first step is hidden.
        every: after how many updates it writes.

    Raises:
        AmpError: TensorBoard is not installed, or the folder cannot be written.
    """

    def __init__(self, log_dir: str | Path, every: int = 1) -> None:
        super().__init__(every, str(log_dir))
        try:
            from torch.utils import tensorboard
        except ImportError as cause:
            raise AmpError("TensorBoard is not installed", hint="pip install tensorboard") from cause
        self._make: Any = tensorboard.SummaryWriter
        self._writer: Any = None
        if "://" in str(log_dir):  # of a store that TensorBoard knows how to write to
            return
        try:
            Path(log_dir).mkdir(parents=True, exist_ok=True)
        except OSError as cause:
            reason = "it is a file" if isinstance(cause, FileExistsError) else f"it cannot be written: {cause.strerror}"
            raise AmpError(reason, where=str(log_dir), hint="name a folder that can be written") from cause
        if not os.access(log_dir, os.W_OK):
            raise AmpError("it cannot be written", where=str(log_dir), hint="name a folder that can be written")

    def _write(self, record: StepRecord) -> None:
        if self._writer is None:
            self._writer = self._make(self._where, purge_step=record.step)
        try:
            for name, value in _scalars(record).items():
                self._writer.add_scalar(name, value, record.step, walltime=record.time)
            self._writer.flush()
        except (OSError, ValueError):
            self._abandon()
            raise

    def _abandon(self) -> None:
        """Let go of a file that may be torn; the next record begins another."""
        writer, self._writer = self._writer, None
        with contextlib.suppress(OSError, ValueError):
            writer.close()

    def close(self) -> None:
        """Close the file of events; a record that comes later begins another."""
        if self._writer is not None:
            self._abandon()


def _scalars(record: StepRecord) -> dict[str, float]:
    scalars = {
        "loss": record.loss,
        "grad_norm": record.grad_norm,
        "amp/loss_scale": record.loss_scale,
        "amp/skipped_steps": record.skipped_steps,
        f"amp/zero_in_{record.dtype}": record.zero,
        f"amp/subnormal_in_{record.dtype}": record.subnormal,
        f"amp/infinite_in_{record.dtype}": record.infinite,
        **{f"aux/{name}": value for name, value in record.aux.items()},
    }
    if record.milliseconds is not None:
        scalars["speed/milliseconds"] = record.milliseconds
    if record.memory is not None:
        scalars["speed/memory_bytes"] = record.memory
    return scalars
