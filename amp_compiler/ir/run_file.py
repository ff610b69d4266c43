"""What a training step was at one moment, and the file of a run: one such record a line, as JSON."""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from amp_compiler.errors import AmpError

_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}  # JSON has no numbers for them


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

    step: int
    time: float
    loss: float
    loss_scale: float
    skipped_steps: int
    grad_norm: float
    dtype: str
    zero: float
    subnormal: float
    infinite: float
    milliseconds: float | None = None
    memory: int | None = None
    aux: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> str:
        """One line of JSON, without the end of the line; infinity and NaN are words.

        Example:
            >>> record = StepRecord(1, 0.0, math.inf, 2.0, 0, 1.0, "fp16", 0.0, 0.0, 0.0)
            >>> StepRecord.from_json(record.to_json()).loss
            inf
        """
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        aux = {name: _as_json(value) for name, value in self.aux.items()}
        plain = {name: _as_json(value) for name, value in values.items() if value is not None and name != "aux"}
        return json.dumps(plain | ({"aux": aux} if aux else {}), allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> StepRecord:
        """What `to_json` gave; keys that it does not know are passed over.

        Raises:
            ValueError: the line is none.
        """
        try:
            data = json.loads(line)
        except RecursionError as cause:
            raise ValueError("it is nested too deep") from cause
        if not isinstance(data, dict):
            raise ValueError("no mapping")
        try:
            numbers = {name: _number(data[name]) for name in _NUMBERS}
            times = {name: _number(data[name]) for name in ("milliseconds", "memory") if name in data}
            aux = {str(name): _number(value) for name, value in dict(data.get("aux", {})).items()}
            for name in _WHOLE & (numbers.keys() | times.keys()):
                into = numbers if name in numbers else times
                into[name] = int(into[name])
        except (KeyError, TypeError, OverflowError) as cause:
            raise ValueError(f"{cause!r}") from cause
        return cls(dtype=str(data.get("dtype", "")), aux=aux, **numbers, **times)  # type: ignore[arg-type]


_NUMBERS = ("step", "time", "loss", "loss_scale", "skipped_steps", "grad_norm", "zero", "subnormal", "infinite")
_WHOLE = {"step", "skipped_steps", "memory"}


def _as_json(value: Any) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _number(value: Any) -> float:
    if isinstance(value, str) and value in _WORDS:
        return _WORDS[value]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{value!r} is no number")
    return float(value)


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

    Lines that are no records are passed over, and so are those that a run wrote which was resumed from before them:
    `notes` says so.

    Args:
        path: the file.

    Raises:
        AmpError: it cannot be read, or no line of it is a record.
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
        except ValueError as cause:
            notes.append(f"line {number} is no record and is left out ({cause})")
            continue
        if records and records[-1].step >= record.step:
            kept = bisect.bisect_left(records, record.step, key=lambda one: one.step)
            notes.append(
                f"line {number} goes on from step {record.step}: {len(records) - kept} records from step "
                f"{records[kept].step} to {records[-1].step} before it are left out"
            )
            del records[kept:]
        records.append(record)
    if not records:
        raise AmpError("there is no record of a step in it", where=str(path), hint="name a file of JSONLines")
    return Run(tuple(records), tuple(notes))
