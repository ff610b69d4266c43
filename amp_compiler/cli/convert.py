"""The command `amp-compiler convert`: convert, verify, report. What is heavy is imported last."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from amp_compiler.cli.options import JsonOption, RulesOption, StoredTypeOption, TargetOption
from amp_compiler.cli.usage import UsageError, check_place


def convert(
    source: Annotated[Path, typer.Argument(metavar="IN.onnx", help="The FP32 model; it is never changed.")],
    output: Annotated[Path, typer.Argument(metavar="OUT.onnx", help="The file to write.")],
    rules: RulesOption = "default",
    dtype: StoredTypeOption = "fp16",
    calibrate: Annotated[
        Path | None,
        typer.Option(
            "--calibrate", metavar="DATA", help="An npz file of inputs, or a folder of them: one batch a file."
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Run both models, with true rounding, on the calibration data or drawn inputs."),
    ] = False,
    verify_memory: Annotated[
        float, typer.Option("--verify-memory", min=0, metavar="GB", help="What a run on drawn inputs may take.")
    ] = 1.0,
    verify_seconds: Annotated[
        float,
        typer.Option("--verify-seconds", min=0, metavar="S", help="What a batch of them may take, by estimate."),
    ] = 10.0,
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance", min=0, help="Largest relative error that passes: 0.01 in fp16, 0.08 in bf16, 0.1 in fp8."
        ),
    ] = None,
    report: Annotated[Path | None, typer.Option("--report", help="Write the plan as a page for the browser.")] = None,
    keep_io_types: Annotated[
        bool, typer.Option("--keep-io-types/--no-keep-io-types", help="Inputs and outputs keep their types.")
    ] = True,
    keep_io_type: Annotated[
        list[str] | None,
        typer.Option(
            "--keep-io-type", metavar="NAME", help="Only this input or output keeps its type. Give it once for each."
        ),
    ] = None,
    raise_opset: Annotated[
        bool,
        typer.Option(
            "--raise-opset/--no-raise-opset",
            help="Raise the opset where only a later one admits the 16-bit type; else such nodes stay FP32.",
        ),
    ] = True,
    opset: Annotated[
        int | None, typer.Option("--opset", min=1, metavar="N", help="Raise the model to this opset, and no further.")
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check/--no-check",
            help="Refuse what ONNX's full checker refuses, and load the result once in ONNX Runtime.",
        ),
    ] = True,
    provider: Annotated[
        list[str] | None,
        typer.Option(
            "--provider",
            metavar="NAME",
            help="Execution provider of ONNX Runtime to calibrate and verify on, such as CUDAExecutionProvider. Give "
            "it once for each, the first choice first.",
        ),
    ] = None,
    custom_ops: Annotated[
        list[Path] | None,
        typer.Option("--custom-ops", metavar="LIBRARY", help="A library of custom ops. Give it once for each."),
    ] = None,
    as_fp32: Annotated[
        list[str] | None,
        typer.Option(
            "--as-fp32",
            metavar="TYPE",
            autocompletion=lambda: ("fp64", "fp16", "bf16"),
            help="fp64, fp16 or bf16: such parts are made FP32 first. Give it once for each.",
        ),
    ] = None,
    fuse: Annotated[
        bool,
        typer.Option(
            "--fuse/--no-fuse",
            help="Write norms and GELUs that stand in parts as the one op that the opset has for each. "
            "By default none. An RMSNorm has an op from opset 23 on.",
        ),
    ] = False,
    target: TargetOption = None,
    json_: JsonOption = False,
) -> None:
    """Convert an ONNX model to mixed precision. Exit codes: 1 no conversion, 2 wrong usage, 3 failed verification."""
    named = {"the input": source, "the output": output, "the data of the output": Path(f"{output}.data")}
    check_place("--report", report, named | {"the rules": Path(rules), "the calibration data": calibrate})
    if tolerance is not None and not verify:
        raise UsageError("it says which --verify passes", where="--tolerance", hint="give --verify as well")
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from amp_compiler.cli.summary import Summary
    from amp_compiler.onnx.check.probes import Probes
    from amp_compiler.onnx.check.run import make_engine, open_to_run, stored_bytes
    from amp_compiler.onnx.check.verify import TOLERANCES
    from amp_compiler.onnx.check.verify import verify as compare
    from amp_compiler.onnx.convert import convert_onnx
    from amp_compiler.onnx.lowering.scale_products import fp8_nodes
    from amp_compiler.onnx.model.external import external_files

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description:<10}"), BarColumn(), MofNCompleteColumn())
    opened = open_to_run(source)
    for file in external_files(opened.proto, source.parent):
        check_place("--report", report, {"a data file of the input": file})
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as progress:
        calibration = None if calibrate is None else _ticking(progress, "calibrate", calibrate, opened)
        task = progress.add_task("convert", total=1)
        done = convert_onnx(
            opened, output, dtype=dtype, calibration=calibration, providers=provider or None,
            custom_ops=custom_ops or None, rules=rules, keep_io_types=keep_io_type or keep_io_types,
            raise_opset=raise_opset, opset=opset, check=check, as_fp32=tuple(as_fp32 or ()), fuse=fuse,
            target=target,  # type: ignore[arg-type]  # one of the tables', or refused there
        )  # fmt: skip
        progress.advance(task)
        written, compared = open_to_run(output), None
        if verify:
            engine = make_engine(provider or None, custom_ops or None)
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
    summary = Summary(
        output, done.plan, len(casts), sum(cast.bytes for cast in casts), stored_bytes(opened), stored_bytes(written),
        compared, calibrate, usual if tolerance is None else tolerance, done.refusal, done.notes,
    )  # fmt: skip
    if json_:
        typer.echo(summary.to_json(), nl=False)
    else:
        summary.print(Console())
    if summary.failed:
        raise typer.Exit(3)


def _ticking(progress: Any, name: str, batches: Path, model: Any) -> Iterator[dict[str, Any]]:
    """The batches, each of which moves a bar on when the next is asked for."""
    from amp_compiler.onnx.check.batches import count_batches, iterate_batches

    task = progress.add_task(name, total=count_batches(batches))
    for batch in iterate_batches(batches, model):
        yield batch
        progress.advance(task)
