"""What `amp.tune` found, as values."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from amp_compiler.ir.files import write_atomically
from amp_compiler.ir.plan import Printed, many


@dataclass(frozen=True)
class TunedNode:
    """A node that has to stay in FP32, or an FP8 product that has to stay in 16 bits.

    Args:
        name: in the plan.
        op: canonical op name.
        module: qualified name of the module that called it.
        source: `file:line` of the user's model.
        without: the error where all of these nodes but this one are in FP32; `None` where the search was stopped before
            that was measured.
        estimate: the error that its rounding alone was estimated to make; `None` where nothing was measured.
        detail: what it makes and what the 16-bit type makes of that, in words.
    """

    name: str
    op: str
    module: str
    source: str
    without: float | None
    estimate: float | None
    detail: str

    @property
    def reason(self) -> str:
        """Why it is kept, in words."""
        lead = "not shown to be needed" if self.without is None else f"error {_shown(self.without)} without it"
        return f"{lead}; {self.detail}" if self.detail else lead


@dataclass(frozen=True, repr=False)
class TuneResult(Printed):
    """What a tuning found.

    Args:
        nodes: those that stay in FP32, in execution order; of FP8 products those that stay in 16 bits.
        what: what was compared with FP32: `outputs` or `loss and gradients`.
        before: the largest relative error under the rules that were given.
        worst_before: the result that has it.
        error: the same under the rules that were found, read back from their file.
        worst: the result that has it.
        tolerance: what was asked for.
        dtype: the 16-bit type.
        searched: nodes that round, among which was searched.
        fp32: nodes of the plan that is made with these rules which run in FP32.
        low: nodes of it that run in the 16-bit type.
        runs: how often the batches went through the model, in FP32 and in 16 bits.
        limit: the most that this could have been: 4 log2(searched), at least 8, and one for each node that is kept.
        batches: how many batches there are.
        stopped: why the search ended before each node was shown to be needed; empty where it did not.
        rules: the rule file.
        path: where it was written; `None` where it was not.
        in_fp8: whether the rules that were given have FP8 products, among which was searched.
    """

    nodes: tuple[TunedNode, ...]
    what: str
    before: float
    worst_before: str
    error: float
    worst: str
    tolerance: float
    dtype: str
    searched: int
    fp32: int
    low: int
    runs: int
    limit: int
    batches: int
    stopped: str
    rules: str
    path: Path | None = None
    in_fp8: bool = False

    def summary(self) -> str:
        """In a few lines, without the nodes."""
        place = f" ({self.worst_before})" if self.worst_before else ""
        what, where = ("FP8 products", "16 bits") if self.in_fp8 else ("nodes that round", "FP32")
        lines = [
            f"{self.what} against FP32: error {_shown(self.before)}{place} before, {_shown(self.error)} with these"
            f" rules; tolerance {self.tolerance:g} in {self.dtype}",
            f"{len(self.nodes)} of {self.searched} {what} stay{'s' * (len(self.nodes) == 1)} in {where};"
            f" {many(self.runs, 'run')} of {many(self.batches, 'batch')} (at most {self.limit})",
        ]
        return "\n".join([*lines, f"not searched to the end: {self.stopped}"] if self.stopped else lines)

    def table(self) -> str:
        """The nodes that stay in FP32, one a line, with the reason."""
        rows = [("node", "op", "module", "error without", "why")]
        for node in self.nodes:
            without = "-" if node.without is None else _shown(node.without)
            rows.append((node.name, node.op, node.module or "-", without, node.detail))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        )

    def __str__(self) -> str:
        parts = [self.summary(), *([self.table()] if self.nodes else [])]
        return "\n".join([*parts, f"written to {self.path}"] if self.path is not None else parts)

    def to_dict(self) -> dict[str, Any]:
        """As plain data, ready for JSON: what is infinite stands there as text."""
        data: dict[str, Any] = _finite(asdict(self))
        return {**data, "path": None if self.path is None else str(self.path)}

    def to_json(self, path: str | Path | None = None) -> str:
        """As JSON text, written to `path` (atomically) where one is given.

        Raises:
            AmpError: the file cannot be written.
        """
        text = json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n"
        if path is not None:
            write_atomically(path, text)
        return text


def _shown(error: float) -> str:
    return f"{error:.3g}" if math.isfinite(error) else "infinite"


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(one) for one in data]
    return str(data) if isinstance(data, float) and not math.isfinite(data) else data
