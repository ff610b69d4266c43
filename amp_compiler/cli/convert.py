"""What `amp-compiler convert` does: convert, verify, report."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from amp_compiler.cli.usage import check_place
from amp_compiler.ir.dtypes import ShortName
from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.onnx.check.batches import count_batches, iterate_batches
from amp_compiler.onnx.check.loads import Refusal
from amp_compiler.onnx.check.memory import MEMORY, SECONDS
from amp_compiler.onnx.check.probes import Probes
from amp_compiler.onnx.check.run import make_engine, open_to_run, stored_bytes
from amp_compiler.onnx.check.verify import TOLERANCES, VerifyReport
from amp_compiler.onnx.check.verify import verify as compare
from amp_compiler.onnx.convert import convert_onnx
from amp_compiler.onnx.lowering.scale_products import fp8_nodes
from amp_compiler.onnx.model.external import external_files
from amp_compiler.onnx.model.model import OnnxFile
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

    @property
    def precisions(self) -> Counter[str]:
        """Number of nodes by precision."""
        return Counter(node.precision for node in self.plan.nodes)

    def to_json(self) -> str:
        """The summary as JSON, for scripts."""
        data: dict[str, Any] = {
            "output": str(self.output),
            "dtype": self.plan.dtype,
            "rules": self.plan.rules,
            "nodes": {name: self.precisions[name] for name in ("low", "fp32", "keep")},
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
        counts = self.precisions
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
        if report is not None and not (self.failed or report.first_bad is not None) and report.untried:
            console.print(f"not tried: {'; '.join(report.untried)}", markup=False, highlight=False)
        if self.verification is not None and (self.failed or self.verification.first_bad is not None):
            console.print(str(self.verification), markup=False, highlight=False, end="")
        if self.failed:
            data = "DATA.npz" if self.calibrate is None else self.calibrate
            hint = f"amp-compiler tune IN.onnx tuned.yaml --data {data} finds the nodes that have to stay in FP32"
            if self.calibrate is None:
                hint = f"verify on data of the model's own kind, --calibrate {data}; if that fails too, {hint}"
            console.print(f"hint: {hint}; convert with --rules tuned.yaml", markup=False, highlight=False)


def run_convert(
    source: Path,
    output: Path,
    *,
    dtype: ShortName = "fp16",
    calibrate: Path | None = None,
    verify: bool = False,
    verify_memory: float = MEMORY / 1e9,
    verify_seconds: float = SECONDS,
    tolerance: float | None = None,
    report: Path | None = None,
    providers: Sequence[str] | None = None,
    custom_ops: Sequence[Path] | None = None,
    **options: Any,
) -> Summary:
    """Convert as the command line asks, with a progress bar on the standard error where that is a terminal.

    Args:
        source: the model.
        output: the file to write.
        dtype: `fp16` or `bf16`.
        calibrate: an npz file or a folder of them.
        verify: run both models and compare.
        verify_memory: GB that a run on drawn inputs may take.
        verify_seconds: seconds that a batch of them may take, by estimate.
        tolerance: largest relative L2 error of an output that passes; `None` for `TOLERANCES` of the type.
        report: write the plan there as a page for the browser.
        providers: execution providers of ONNX Runtime.
        custom_ops: libraries of custom ops for ONNX Runtime.
        options: others of `convert_onnx`.

    Raises:
        AmpError: the model, the rules or the data cannot be read, or the model cannot be converted or written.
    """
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description:<10}"), BarColumn(), MofNCompleteColumn())
    opened = open_to_run(source)
    for file in external_files(opened.proto, source.parent):
        check_place("--report", report, {"a data file of the input": file})
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as progress:
        calibration = None if calibrate is None else _ticking(progress, "calibrate", calibrate, opened)
        task = progress.add_task("convert", total=1)
        done = convert_onnx(
            opened, output, dtype=dtype, calibration=calibration, providers=providers or None,
            custom_ops=custom_ops or None, **options,
        )  # fmt: skip
        progress.advance(task)
        written, compared = open_to_run(output), None
        if verify:
            engine = make_engine(providers or None, custom_ops or None)
            if calibrate is not None:
                compared = compare(opened, written, _ticking(progress, "verify", calibrate, opened), engine=engine)
            else:
                task = progress.add_task("verify", total=None)
                drawn = Probes(opened, verify_memory * 1e9, verify_seconds)
                compared = compare(opened, written, drawn, on_batch=lambda _: progress.advance(task), engine=engine)
    if report is not None:
        done.plan.to_html(report)
    weights = {tensor.name for tensor in opened.proto.graph.initializer}
    casts = [cast for cast in done.plan.casts if cast.src != cast.dst and cast.value not in weights]
    usual = TOLERANCES["fp8" if fp8_nodes(done.plan) else dtype]
    return Summary(
        output, done.plan, len(casts), sum(cast.bytes for cast in casts), stored_bytes(opened), stored_bytes(written),
        compared, calibrate, usual if tolerance is None else tolerance, done.refusal, done.notes,
    )  # fmt: skip


def _ticking(progress: Progress, name: str, batches: Any, model: OnnxFile) -> Iterator[dict[str, Any]]:
    """The batches, each of which moves a bar on when the next is asked for."""
    task = progress.add_task(name, total=count_batches(batches))
    for batch in iterate_batches(batches, model):
        yield batch
        progress.advance(task)
