"""What was measured so far, in a file of JSON lines beside the output: a run that was killed goes on from it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from amp_compiler.diagnose.tuning.deviation import Measured
from amp_compiler.errors import AmpError
from amp_compiler.ir.files import write_atomically

_VERSION = 3
_HINT = "delete it, or name another output"


class Journal:
    """Measurements, kept in memory and, where there is a path, in a file.

    Args:
        path: the file; `None` for none.
        subject: a digest of model, rules, type and batches.

    Raises:
        AmpError: the file is no journal, or that of another subject.
    """

    def __init__(self, path: Path | None, subject: str) -> None:
        self.path = path
        self._lines: list[str] = [json.dumps({"version": _VERSION, "subject": subject})]
        self._measured: dict[tuple[int, ...], Measured] = {}
        if path is not None and path.exists():
            self._read(path, subject)

    @property
    def resumed(self) -> int:
        """Measurements that stand in it."""
        return len(self._measured)

    def get(self, kept: Sequence[int]) -> Measured | None:
        """What was measured with some nodes kept, by their places; `None` where nothing was."""
        return self._measured.get(tuple(kept))

    def note(self, kept: Sequence[int], measured: Measured) -> None:
        """Keep a measurement."""
        self._measured[tuple(kept)] = measured
        error = measured.error if math.isfinite(measured.error) else str(measured.error)  # JSON has no infinities
        self._lines.append(json.dumps({"kept": list(kept), "error": error, "worst": measured.worst}))
        if self.path is not None:
            write_atomically(self.path, "\n".join([*self._lines, ""]))

    def close(self) -> None:
        """Remove the file: all is done."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _read(self, path: Path, subject: str) -> None:
        where = str(path)
        try:
            lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
            head = lines[0]
            if head["version"] != _VERSION:
                raise AmpError(f"this journal is of version {head['version']}", where=where, hint=_HINT)
            if head["subject"] != subject:
                raise AmpError(
                    "this journal is of another model, other rules or other batches", where=where, hint=_HINT
                )
            for line in lines[1:]:
                self._measured[tuple(line["kept"])] = Measured(float(line["error"]), line["worst"])
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as cause:
            raise AmpError(f"this is no journal of amp.tune: {cause!r}", where=where, hint=_HINT) from cause
        self._lines = [json.dumps(line) for line in lines]
