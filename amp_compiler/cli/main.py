"""The command line: its commands and their options. Each command imports what it needs when it runs."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from amp_compiler.cli.diagnose import find_nonfinite, profile
from amp_compiler.cli.explain import diff, explain
from amp_compiler.cli.options import Device, JsonOption, RulesOption, TargetOption
from amp_compiler.cli.rules import rules_app
from amp_compiler.cli.tune import tune
from amp_compiler.cli.usage import UsageError, check_pass, check_place, print_error, read_stored_type
from amp_compiler.errors import AmpError
from amp_compiler.onnx import needs_onnx

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"]},  # of every command below it
)
app.add_typer(rules_app, name="rules")


def _print_version(wanted: bool) -> None:
    if wanted:
        from amp_compiler import __version__

        typer.echo(f"amp-compiler {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Tell errors alone.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Tell every capture and compilation.")] = False,
) -> None:
    """Automatic mixed precision as a compiler pass: plan it, read it, run it."""
    if quiet and verbose:
        raise UsageError("they say the opposite", where="--quiet, --verbose", hint="give one of them")
    if quiet or verbose:
        os.environ["AMP_LOG"] = (
            "error" if quiet else "info"
        )  # read when torch is imported, which help does not wait for


app.command()(explain)
app.command()(diff)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="IN.onnx", help="The FP32 model; it is never changed.")],
    output: Annotated[Path, typer.Argument(metavar="OUT.onnx", help="The file to write.")],
    rules: RulesOption = "default",
    dtype: Annotated[
        Any, typer.Option("--dtype", parser=read_stored_type, metavar="[fp16|bf16]", help="The 16-bit type.")
    ] = "fp16",
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
    from rich.console import Console

    from amp_compiler.cli.convert import run_convert

    named = {"the input": source, "the output": output, "the data of the output": Path(f"{output}.data")}
    check_place("--report", report, named | {"the rules": Path(rules), "the calibration data": calibrate})
    if tolerance is not None and not verify:
        raise UsageError("it says which --verify passes", where="--tolerance", hint="give --verify as well")
    summary = run_convert(
        source, output, dtype=dtype, calibrate=calibrate, verify=verify, verify_memory=verify_memory,
        verify_seconds=verify_seconds, tolerance=tolerance, report=report, providers=provider, custom_ops=custom_ops,
        rules=rules, keep_io_types=keep_io_type or keep_io_types, raise_opset=raise_opset, opset=opset, check=check,
        as_fp32=tuple(as_fp32 or ()), fuse=fuse, target=target,
    )  # fmt: skip
    if json_:
        typer.echo(summary.to_json(), nl=False)
    else:
        summary.print(Console())
    if summary.failed:
        raise typer.Exit(3)


app.command()(tune)
app.command()(profile)
app.command(name="find-nonfinite")(find_nonfinite)


@app.command()
def passes(
    name: Annotated[
        str, typer.Argument(metavar="[PASS]", help="Print all that this pass says of itself.", show_default=False)
    ] = "",
) -> None:
    """List the passes, pipeline by pipeline in the order in which they run, or tell all about one."""
    if name:
        check_pass(name, "PASS")
    from amp_compiler.cli.passes import catalogue, entry

    for line in entry(name) if name else catalogue():
        typer.echo(line)


@app.command()
def plot(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN.jsonl...", help="Files of amp.callbacks.JSONLines, drawn over each other."),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The picture, .png, .svg or .pdf; by default the first RUN with .png."),
    ] = None,
) -> None:
    """Draw recorded runs: loss, gradient norm, loss scale, what is lost in 16 bits, milliseconds and memory."""
    from amp_compiler.cli.plot import run_plot

    run_plot(runs, output)


@app.command()
def demo(
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="Passes over the training images.")] = 10,
    device: Annotated[
        Device, typer.Option("--device", help="Where to train; `auto` is a GPU where there is one.")
    ] = Device.AUTO,
    backend: Annotated[str, typer.Option("--backend", help="What runs the compiled model.")] = "inductor",
) -> None:
    """Train two small CNNs on handwritten digits in FP32, with torch.autocast and with amp.compile."""
    from amp_compiler.cli.demo import run_demo

    run_demo(epochs=epochs, device=device.value, backend=backend)


@app.command()
def env() -> None:
    """Print versions, devices, the compiler, caches and variables: what to paste into a report of a bug."""
    from amp_compiler.cli.env import environment

    for line in environment():
        typer.echo(line)


for _command in (*app.registered_commands, *rules_app.registered_commands):
    _sentence = " ".join((_command.callback.__doc__ or "").split()).partition(". ")[0]
    _command.short_help = f"{_sentence.rstrip('.')}."  # else the list of commands cuts what is longer than a line


def main() -> None:
    """Run the command line; an `AmpError` is told on the standard error, with exit code 1, or 2 for a wrong option."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without our signs shows `?` rather than failing
            stream.reconfigure(errors="replace")
    try:
        with needs_onnx():
            app(prog_name="amp-compiler")
    except AmpError as error:
        print_error(error)
        sys.exit(2 if isinstance(error, UsageError) else 1)
