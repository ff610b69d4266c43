"""What `amp-compiler convert` tells of a conversion."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.onnx.check.loads import Refusal
from amp_compiler.onnx.check.verify import VerifyReport
from amp_compiler.report.table import human_bytes


@dataclass(frozen=True)
class Summary:
    """What came of it.

    Args:
        output: the file that was written.
        plan: the plan.
        run_time_casts: casts of values that are made when the model runs; stored weights are cast once, here.
        cast_bytes: bytes that those casts move in one run.
        input_bytes: size of the input with its external data.
        output_bytes: size of the output with its external data.
        verification: the comparison, where it was asked for.
        calibrate: the data that it was compared on; `None` for random inputs.
        tolerance: the error that passes.
        refusal: why the installed ONNX Runtime does not load the output.
        notes: what else there is to know.
    """

    output: Path
    plan: PrecisionPlan
    run_time_casts: int
    cast_bytes: int
    input_bytes: int
    output_bytes: int
    verification: VerifyReport | None
    calibrate: Path | None
    tolerance: float
    refusal: Refusal | None = None
    notes: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether there was a verification and it failed."""
        return self.verification is not None and not self.verification.ok(self.tolerance)

    def to_json(self) -> str:
        """The summary as JSON, for scripts."""
        counts = Counter(self.plan.labels.values())
        data: dict[str, Any] = {
            "output": str(self.output),
            "dtype": self.plan.dtype,
            "rules": self.plan.rules,
            "nodes": {name: counts[name] for name in ("low", "fp32", "keep")},
            "casts": self.run_time_casts,
            "cast_bytes": self.cast_bytes,
            "input_bytes": self.input_bytes,
            "output_bytes": self.output_bytes,
            "size_ratio": self.output_bytes / self.input_bytes,
            "verification": None,
            "refusal": None if self.refusal is None else asdict(self.refusal),
            "notes": list(self.notes),
        }
        if self.verification is not None:
            data["verification"] = {
                **self.verification.to_dict(),
                "tolerance": self.tolerance,
                "passed": not self.failed,
                "random_inputs": self.calibrate is None,
            }
        return json.dumps(data, indent=1, ensure_ascii=False) + "\n"

    def print(self, console: Console) -> None:
        """The summary as a table, for people."""
        table = Table(show_header=False, box=box.SIMPLE, pad_edge=False)
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        counts = Counter(self.plan.labels.values())
        nodes = f"{counts['low']} {self.plan.dtype}, {counts['fp32']} fp32, {counts['keep']} kept as they were"
        table.add_row("nodes", nodes)
        table.add_row("casts", f"{self.run_time_casts}, {human_bytes(self.cast_bytes)} a run")
        sizes = f"{human_bytes(self.input_bytes)} → {human_bytes(self.output_bytes)}"
        table.add_row("size", f"{sizes} (ratio {self.output_bytes / self.input_bytes:.2f})")
        if self.verification is not None:
            source = "random inputs" if self.calibrate is None else str(self.calibrate)
            verdict = "FAILED" if self.failed else "passed"
            error = f"{self.verification.largest_error:.3g} (at most {self.tolerance:g}): {verdict}, on {source}"
            table.add_row("largest error", error)
        table.add_row("written", str(self.output))
        console.print(table, markup=False)
        for note in (*self.notes, *([str(self.refusal)] if self.refusal is not None else [])):
            console.print(f"note: {note}", markup=False, highlight=False)
        report = self.verification
        if report is not None and (self.failed or report.first_bad is not None):
            console.print(str(report), markup=False, highlight=False, end="")
        elif report is not None and report.untried:
            console.print(f"not tried: {'; '.join(report.untried)}", markup=False, highlight=False)
        if self.failed:
            data = "DATA.npz" if self.calibrate is None else self.calibrate
            hint = f"amp-compiler tune IN.onnx tuned.yaml --data {data} finds the nodes that have to stay in FP32"
            if self.calibrate is None:
                hint = f"verify on data of the model's own kind, --calibrate {data}; if that fails too, {hint}"
            console.print(f"hint: {hint}; convert with --rules tuned.yaml", markup=False, highlight=False)
