"""Callbacks that write: lines of JSON, lines for a terminal, and TensorBoard's event files."""

from __future__ import annotations

import contextlib
import logging
from abc import abstractmethod
from pathlib import Path
from typing import Any

from amp_compiler.errors import AmpError
from amp_compiler.ir.files import output_file
from amp_compiler.ir.run_file import StepRecord
from amp_compiler.training.reporting.log import Callback

_TAIL = 1 << 16  # bytes at the end of a file, in which its last record is
_MIB = 1 << 20
logger = logging.getLogger("amp_compiler")


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
        self._where, self._missing = where, 0

    @abstractmethod
    def _write(self, record: StepRecord) -> None:
        """Write a record whole.

        Raises:
            OSError, ValueError: it cannot be written.
        """

    def on_step(self, record: StepRecord) -> None:
        """Write a record, or warn."""
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

    The file is opened for each line and closed behind it, so that a run that is killed leaves whole lines. Where a line
    is torn all the same, as by a full disk, the next one begins anew, and readers pass over it.

    Args:
        path: the file. One that exists is appended to: a training that is resumed goes on in it, with the numbers of
            its steps where the step's `state_dict()` is loaded.
        every: after how many updates a line is written.

    Raises:
        AmpError: the file cannot be written, or `every` is no whole number from 1 on.

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
        self._path, self._step = output_file(path), 0
        try:
            with self._path.open("a+b") as file:
                file.seek(max(0, file.tell() - _TAIL))
                tail = file.read()
        except OSError as cause:
            raise AmpError(
                f"it cannot be written: {cause.strerror}", where=str(path), hint="name a file that can be written"
            ) from cause
        self._begins = b"" if not tail or tail.endswith(b"\n") else b"\n"  # behind a line that is torn
        for line in reversed(tail.splitlines()):
            with contextlib.suppress(ValueError):  # torn, or of something else
                self._step = StepRecord.from_json(line.decode()).step
                break

    def _write(self, record: StepRecord) -> None:
        if record.step <= self._step:
            logger.warning(
                "%s has records up to step %d, and goes on from step %d: those from there on are left out by readers;"
                " load step.state_dict() to go on with its numbers, or name another file",
                self._where, self._step, record.step,
            )  # fmt: skip
        self._step = record.step
        begins, self._begins = self._begins, b"\n"
        with self._path.open("ab") as file:
            file.write(begins + record.to_json().encode() + b"\n")
        self._begins = b""


class Terminal(Writer):
    """Prints the numbers of a record on one line of the standard output.

    Args:
        every: after how many updates a line is printed.

    Raises:
        AmpError: `every` is no whole number from 1 on.

    Example:
        >>> import amp_compiler as amp
        >>> record = amp.callbacks.StepRecord(7, 0.0, 0.5, 1024.0, 0, 2.0, "fp16", 0.0, 0.1, 0.0)
        >>> amp.callbacks.Terminal().on_step(record)
        step      7  loss 0.5  grad norm 2  scale 1024  skipped 0  fp16: zero 0.0%  subnormal 10.0%  infinite 0.0%
    """

    def __init__(self, every: int = 1) -> None:
        super().__init__(every, "the terminal")

    def _write(self, record: StepRecord) -> None:
        texts = {
            "loss": f"{record.loss:.4g}",
            **{name: f"{value:.4g}" for name, value in record.aux.items()},
            "grad norm": f"{record.grad_norm:.3g}",
            "scale": f"{record.loss_scale:.10g}",
            "skipped": str(record.skipped_steps),
            f"{record.dtype}: zero": f"{record.zero:.1%}",
            "subnormal": f"{record.subnormal:.1%}",
            "infinite": f"{record.infinite:.1%}",
        }
        if record.milliseconds is not None:
            texts["ms"] = f"{record.milliseconds:.1f}"
        if record.memory is not None:
            texts["MiB"] = f"{record.memory / _MIB:.0f}"
        line = "  ".join(f"{name} {value}" for name, value in texts.items())
        print(f"step {record.step:>6}  {line}", flush=True)


class TensorBoard(Writer):
    """Writes each record as scalars for TensorBoard, by `torch.utils.tensorboard`.

    `loss`, `grad_norm` and what the loss function returned stand by themselves; the loss scale, skipped steps and what
    is lost under `amp/`, milliseconds and memory under `speed/`.

    Args:
        log_dir: the folder, as for `SummaryWriter`. A training that is resumed goes on in it: what stands there behind
            its first step is hidden.
        every: after how many updates it writes.

    Raises:
        AmpError: TensorBoard is not installed, the folder cannot be written, or `every` is no whole number from 1 on.

    Example:
        >>> import tempfile, amp_compiler as amp
        >>> callbacks = [amp.callbacks.TensorBoard(tempfile.mkdtemp(), every=10)]  # for amp.training_step
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
            what = f"it cannot be written: {cause.strerror}"
            raise AmpError(what, where=str(log_dir), hint="name a folder that can be written") from cause

    def _write(self, record: StepRecord) -> None:
        if self._writer is None:
            self._writer = self._make(self._where, purge_step=record.step)
        try:
            for name, value in _scalars(record).items():
                self._writer.add_scalar(name, value, record.step, walltime=record.time)
            self._writer.flush()
        except (OSError, ValueError):
            self.close()  # its file may be torn; the next record begins another
            raise

    def close(self) -> None:
        """Close the file of events; a record that comes later begins another."""
        writer, self._writer = self._writer, None
        with contextlib.suppress(OSError, ValueError):
            if writer is not None:
                writer.close()


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
