"""The command line: its commands and their options. Each command imports what it needs when it runs."""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated

import typer

from amp_compiler.cli.convert import convert
from amp_compiler.cli.diagnose import find_nonfinite, profile
from amp_compiler.cli.env import env
from amp_compiler.cli.explain import diff, explain
from amp_compiler.cli.options import Backend, Device
from amp_compiler.cli.plot import plot
from amp_compiler.cli.rules import rules_app
from amp_compiler.cli.tune import tune
from amp_compiler.cli.usage import UsageError, check_pass, print_error
from amp_compiler.errors import AmpError
from amp_compiler.onnx import needs_onnx
from amp_compiler.passes import PASSES

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
app.command()(convert)
app.command()(tune)
app.command()(profile)
app.command(name="find-nonfinite")(find_nonfinite)


@app.command()
def passes(
    name: Annotated[
        str,
        typer.Argument(metavar="[PASS]", autocompletion=lambda: PASSES, show_default=False, help="Tell all about it."),
    ] = "",
) -> None:
    """List the passes, pipeline by pipeline in the order in which they run, or tell all about one."""
    if name:
        check_pass(name, "PASS")
    from amp_compiler.cli.passes import catalogue, entry

    for line in entry(name) if name else catalogue():
        typer.echo(line)


app.command()(plot)


@app.command()
def demo(
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="Passes over the training images.")] = 10,
    device: Annotated[
        Device, typer.Option("--device", help="Where to train; `auto` is a GPU where there is one.")
    ] = Device.AUTO,
    backend: Annotated[Backend, typer.Option("--backend", help="What runs the compiled model.")] = Backend.INDUCTOR,
) -> None:
    """Train two small CNNs on handwritten digits in FP32, with torch.autocast and with amp.compile."""
    from amp_compiler.cli.demo import run_demo

    run_demo(epochs=epochs, device=device.value, backend=backend.value)


app.command()(env)


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
