"""What a training step was at one moment, and the file of a run: one such record a line, as JSON."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError

from amp_compiler.errors import AmpError


def _number(value: Any) -> Any:
    """Neither a truth value nor a text of digits is a number, as pydantic has it."""
    if isinstance(value, bool) or (isinstance(value, str) and value not in ("NaN", "Infinity", "-Infinity")):
        raise ValueError(f"{value!r} is no number")
    return value


Whole = Annotated[int, BeforeValidator(_number)]
Number = Annotated[float, BeforeValidator(_number)]


@dataclass(frozen=True)
class StepRecord:
    """The numbers of one step.

    Args:
        step: number of the update of the weights, from 1; skipped ones count.
        time: seconds since 1970.
        loss: of this step; the mean over its batches where several are gathered.
        loss_scale: that the step ran with; 1 where there is none.
        skipped_steps: how many steps were skipped so far.
        grad_norm: L2 norm of the unscaled gradients, before clipping.
        dtype: the low type, `fp16` or `bf16`, of the next three.
        zero: fraction of the elements of all weight gradients that are zero, or would be in the low type. Gradients
            count as they stood in the step, with the loss scale.
        subnormal: fraction that has fewer bits in it than the type has.
        infinite: fraction that is infinite or NaN, or would be.
        milliseconds: of a step from start to start, the mean since the last record; what stands between the steps
            counts, and the first call, which compiles, does not. `None` where only that was made.
        memory: bytes: the most that tensors took on the GPU, and on a CPU the most that the process took; `None` where
            that is not known.
        aux: single numbers that the loss function returned beside the loss in a dict.
    """

    __pydantic_config__ = ConfigDict(ser_json_inf_nan="strings")  # JSON has no numbers for them

    step: Whole
    time: Number
    loss: Number
    loss_scale: Number
    skipped_steps: Whole
    grad_norm: Number
    dtype: str
    zero: Number
    subnormal: Number
    infinite: Number
    milliseconds: Number | None = None
    memory: Whole | None = None
    aux: Mapping[str, Number] = field(default_factory=dict)

    def to_json(self) -> str:
        """One line of JSON, without the end of the line; infinity and NaN are words.

        Example:
            >>> record = StepRecord(1, 0.0, float("inf"), 2.0, 0, 1.0, "fp16", 0.0, 0.0, 0.0)
            >>> StepRecord.from_json(record.to_json()).loss
            inf
        """
        return _RECORDS.dump_json(self, exclude_defaults=True).decode()

    @classmethod
    def from_json(cls, line: str) -> StepRecord:
        """The record of a `line` that `to_json` gave; keys that it does not know are passed over.

        Raises:
            ValueError: the line is none.
        """
        return _RECORDS.validate_json(line)


_RECORDS = TypeAdapter(StepRecord)


@dataclass(frozen=True)
class Run:
    """A run that was read from a file.

    Args:
        records: in the order of their steps.
        notes: what was passed over, in words.
    """

    records: tuple[StepRecord, ...]
    notes: tuple[str, ...] = ()


def read_run(path: str | Path) -> Run:
    """Read a file that `amp.callbacks.JSONLines` wrote.

    Args:
        path: the file.

    Returns:
        The records, without lines that are none, and without those behind the step from which a run was resumed;
        `notes` says so.

    Raises:
        AmpError: it cannot be read, or no line of it is a record.

    Example:
        >>> with open("run.jsonl", "w") as file:
        ...     written = file.write(StepRecord(10, 0.0, 0.5, 1.0, 0, 1.0, "bf16", 0.0, 0.0, 0.0).to_json())
        >>> [record.step for record in read_run("run.jsonl").records]
        [10]
    """
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as cause:
        raise AmpError(
            f"it cannot be read: {cause.strerror}", where=str(path), hint="name a file of amp.callbacks.JSONLines"
        ) from cause
    records: list[StepRecord] = []
    notes = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = StepRecord.from_json(line)
        except ValidationError as cause:
            notes.append(f"line {number} is no record and is left out ({cause.errors()[0]['msg']})")
            continue
        if records and records[-1].step >= record.step:
            kept = bisect.bisect_left(records, record.step, key=lambda one: one.step)
            notes.append(
                f"line {number} goes on from step {record.step}: the records from step "
                f"{records[kept].step} to {records[-1].step} before it are left out"
            )
            del records[kept:]
        records.append(record)
    if not records:
        raise AmpError("there is no record of a step in it", where=str(path), hint="name a file of JSONLines")
    return Run(tuple(records), tuple(notes))
