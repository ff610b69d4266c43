"""The command line: its commands and their options. Each command imports what it needs when it runs."""

from __future__ import annotations

import enum
import io
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from amp_compiler.cli.rules import rules_app
from amp_compiler.cli.usage import (
    NODE_BY_NODE,
    UsageError,
    check_pass,
    check_place,
    print_error,
    read_stored_type,
    read_type,
)
from amp_compiler.errors import AmpError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
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
) -> None:
    """Automatic mixed precision as a compiler pass: plan it, read it, run it."""


class PlanFormat(enum.StrEnum):
    """How `explain` writes a plan."""

    TABLE = "table"
    TEXT = "text"
    JSON = "json"


class Device(enum.StrEnum):
    """What `--device` takes."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Start(enum.StrEnum):
    """What `tune --start` takes."""

    LOW = "low"
    FP32 = "fp32"


RulesOption = Annotated[str, typer.Option("--rules", help="A preset's name or a path to a rule file.")]
TypeOption = Annotated[
    Any, typer.Option("--dtype", parser=read_type, metavar="[auto|fp16|bf16]", help="The 16-bit type.")
]
EvalOption = Annotated[bool, typer.Option("--eval", help="For inference: `model.eval()` first.")]
ArgsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--args",
        metavar="SPEC",
        help="An example argument, such as `fp32[8,64]`, or `labels=i64[8]` for a keyword. Give it once for each.",
    ),
]
OutputOption = Annotated[Path | None, typer.Option("--output", help="Write there instead of to the terminal.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@app.command()
def explain(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="`package.module:name`, `path/to/file.py:name` (a model, or a function or class that makes one, or a "
            "function that gives (model, example_args)), or an ONNX file.",
        ),
    ],
    args: ArgsOption = None,
    rules: RulesOption = "default",
    dtype: TypeOption = "auto",
    eval_mode: EvalOption = False,
    format_: Annotated[PlanFormat, typer.Option("--format", help="What to print.")] = PlanFormat.TABLE,
    output: OutputOption = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a page for the browser as well.")] = None,
    svg: Annotated[Path | None, typer.Option("--svg", help="Write a picture of the graph as well.")] = None,
    print_after: Annotated[
        str,
        typer.Option(
            "--print-after",
            metavar="PASS",
            help="Print the graph behind this pass instead of the plan, or behind each with `all`: the first in full, "
            "then what each pass changed. `amp-compiler passes` lists them. For the passes of a training step a copy "
            "of the model is trained by AdamW for one step, on the --loss.",
        ),
    ] = "",
    stop_after: Annotated[
        str, typer.Option("--stop-after", metavar="PASS", help="Run no pass behind this one; prints what it leaves.")
    ] = "",
    skip: Annotated[
        list[str] | None,
        typer.Option("--skip", metavar="PASS", help="Leave this pass out. Give it once for each."),
    ] = None,
    loss: Annotated[
        str,
        typer.Option(
            "--loss",
            metavar="FUNCTION",
            help="Called as loss(model, *args) by a training step, named as MODEL is. Without it the loss is the mean "
            "of the first floating-point output in FP32.",
        ),
    ] = "",
    backend: Annotated[
        str, typer.Option("--backend", help="For --print-after: `inductor` runs more passes, and compiles.")
    ] = NODE_BY_NODE,
    device: Annotated[
        Device, typer.Option("--device", help="Plan for this device, which need not be there.")
    ] = Device.AUTO,
    fuse: Annotated[
        bool, typer.Option("--fuse/--no-fuse", help="Of an ONNX file: as `convert` plans it with this.")
    ] = False,
    opset: Annotated[
        int | None, typer.Option("--opset", metavar="N", help="Of an ONNX file: as `convert --opset` plans it.")
    ] = None,
) -> None:
    """Show the precision of every node, the rule that decided it, and every cast with its bytes.

    With --print-after, show the graph from pass to pass.
    """
    from amp_compiler.cli.explain import ExplainOptions, run_explain

    run_explain(
        ExplainOptions(
            model=model,
            args=tuple(args or ()),
            rules=rules,
            dtype=dtype,
            eval_mode=eval_mode,
            format=format_.value,
            output=output,
            html=html,
            svg=svg,
            print_after=print_after,
            stop_after=stop_after,
            skip=tuple(skip or ()),
            loss=loss,
            backend=backend,
            device=device.value,
            fuse=fuse,
            opset=opset,
        )
    )


@app.command()
def diff(
    before: Annotated[Path, typer.Argument(metavar="A.json", help="A plan, as `explain --format json` writes it.")],
    after: Annotated[Path, typer.Argument(metavar="B.json", help="Another one.")],
    output: OutputOption = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write a page for the browser as well, with both side by side.")
    ] = None,
) -> None:
    """Show what differs between two plans. Ends with 1 where anything does, and with 0 where nothing does."""
    from amp_compiler.cli.explain import run_diff

    raise typer.Exit(int(run_diff(before, after, output, html)))


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
    tolerance: Annotated[
        float | None,
        typer.Option("--tolerance", min=0, help="Largest relative error that passes: 0.01 in fp16, 0.08 in bf16."),
    ] = None,
    report: Annotated[Path | None, typer.Option("--report", help="Write the plan as a page for the browser.")] = None,
    keep_io_types: Annotated[
        bool, typer.Option("--keep-io-types/--no-keep-io-types", help="Inputs and outputs keep their types.")
    ] = True,
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
    json_: JsonOption = False,
) -> None:
    """Convert an ONNX model to mixed precision. Exit codes: 1 no conversion, 2 wrong usage, 3 failed verification."""
    from rich.console import Console

    from amp_compiler.cli.convert import ConvertOptions, run_convert

    named = {"the input": source, "the output": output, "the data of the output": Path(f"{output}.data")}
    check_place("--report", report, named | {"the rules": Path(rules), "the calibration data": calibrate})
    if tolerance is not None and not verify:
        raise UsageError("it says which --verify passes", where="--tolerance", hint="give --verify as well")
    options = ConvertOptions(
        source,
        output,
        rules,
        dtype,
        calibrate,
        verify,
        tolerance,
        report,
        keep_io_types=keep_io_types,
        raise_opset=raise_opset,
        opset=opset,
        check=check,
        providers=tuple(provider or ()),
        custom_ops=tuple(custom_ops or ()),
        as_fp32=tuple(as_fp32 or ()),
        fuse=fuse,
    )
    summary = run_convert(options)
    if json_:
        typer.echo(summary.to_json(), nl=False)
    else:
        summary.print(Console())
    if summary.failed:
        raise typer.Exit(3)


@app.command()
def tune(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="As for `explain`: a model, a factory of one, or an ONNX file.")
    ],
    output: Annotated[Path, typer.Argument(metavar="OUT.yaml", help="The rule file to write.")],
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="DATA",
            help="Of an ONNX file: an npz file of inputs, or a folder of them, one batch a file. Without it inputs are "
            "drawn, which says little of a trained model.",
        ),
    ] = None,
    args: ArgsOption = None,
    rules: RulesOption = "default",
    dtype: TypeOption = "auto",
    tolerance: Annotated[
        float | None,
        typer.Option("--tolerance", help="Largest relative error of a result: 0.01 in fp16, 0.08 in bf16."),
    ] = None,
    start: Annotated[
        Start, typer.Option("--start", help="Keep nodes in FP32, or from all in FP32 put nodes low.")
    ] = Start.LOW,
    budget: Annotated[float | None, typer.Option("--budget", metavar="SECONDS", help="Stop the search then.")] = None,
    max_runs: Annotated[
        int | None, typer.Option("--max-runs", metavar="N", help="Stop it after so many runs of the model.")
    ] = None,
    loss: Annotated[
        str,
        typer.Option(
            "--loss",
            metavar="FUNCTION",
            help="Called as loss(model, *args), named as MODEL is: loss and gradients are compared, not outputs.",
        ),
    ] = "",
    eval_mode: EvalOption = False,
    json_: JsonOption = False,
) -> None:
    """Find the few nodes that have to stay in FP32 for a tolerance, and write them as a rule file.

    Exit codes: 1 the tolerance cannot be met, or the model not be tuned; 2 wrong usage; 3 the file is written and meets
    the tolerance, but the search was stopped before each of its nodes was shown to be needed: the same command goes on.
    """
    from amp_compiler.cli.tune import TuneOptions, run_tune

    options = TuneOptions(
        model=model,
        output=output,
        data=data,
        args=tuple(args or ()),
        rules=rules,
        dtype=dtype,
        tolerance=tolerance,
        start=start.value,
        budget=budget,
        max_runs=max_runs,
        loss=loss,
        eval_mode=eval_mode,
    )
    found = run_tune(options)
    typer.echo(found.to_json() if json_ else str(found), nl=not json_)
    if found.stopped:
        raise typer.Exit(3)


@app.command()
def passes(
    name: Annotated[
        str, typer.Argument(metavar="[PASS]", help="Print all that this pass says of itself.", show_default=False)
    ] = "",
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print it as Markdown; without PASS, the text of passes/README.md.")
    ] = False,
) -> None:
    """List the passes, pipeline by pipeline in the order in which they run, or tell all about one."""
    if name:
        check_pass(name, "PASS")
    from amp_compiler.cli.passes import run_passes

    run_passes(name, markdown=markdown)


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


def main() -> None:
    """Run the command line; an `AmpError` is told on the standard error, with exit code 1, or 2 for a wrong option."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without our signs shows `?` rather than failing
            stream.reconfigure(errors="replace")
    try:
        app(prog_name="amp-compiler")
    except AmpError as error:
        print_error(error)
        sys.exit(2 if isinstance(error, UsageError) else 1)
