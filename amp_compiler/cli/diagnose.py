"""The commands `profile` and `find-nonfinite`: what 16 bits lose, and where an inf or a NaN came from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from amp_compiler.cli import options
from amp_compiler.cli.tune import model_and_batches
from amp_compiler.cli.usage import check_place, emit


def _opened(
    model: str, data: Path | None, args: list[str] | None, rules: str, dtype: Any, loss: str, eval_mode: bool,
    output: Path | None,
) -> tuple[Any, Any, dict[str, Any]]:  # fmt: skip
    """What is looked into, its batches and the options."""
    check_place("--output", output, {"the model": Path(model), "the rules": Path(rules), "the data": data})
    subject, batches, loss_fn = model_and_batches(model, data, args, eval_mode, loss)
    return subject, batches, {"rules": rules, "dtype": dtype, "loss_fn": loss_fn}


def profile(
    model: options.ModelArgument, data: options.DataOption = None, args: options.ArgsOption = None,
    rules: options.RulesOption = "default", dtype: options.TypeOption = "auto", loss: options.LossOption = "",
    eval_mode: options.EvalOption = False, output: options.OutputOption = None,
    fp8: Annotated[bool, typer.Option("--fp8", help="Print a rule for each product instead: how it fits FP8.")] = False,
) -> None:  # fmt: skip
    """Count the exponents of all that a model computes: what becomes zero, subnormal or infinite in 16 bits."""
    subject, batches, keywords = _opened(model, data, args, rules, dtype, loss, eval_mode, output)
    from amp_compiler.diagnose import run

    result = run.profile(subject, batches, **keywords)
    matches = "".join(f"{one}\n" for one in result.fp8()) or "[]  # no product may compute of FP8 operands\n"
    emit(f"version: 1\nrules:\n{matches}" if fp8 else f"{result}\n", output)


def find_nonfinite(
    model: options.ModelArgument, data: options.DataOption = None, args: options.ArgsOption = None,
    rules: options.RulesOption = "default", dtype: options.TypeOption = "auto", loss: options.LossOption = "",
    eval_mode: options.EvalOption = False, output: options.OutputOption = None,
) -> None:  # fmt: skip
    """Name the first nodes that make an inf or a NaN, with a rule that fixes it. Exit code 3 where there is one."""
    subject, batches, keywords = _opened(model, data, args, rules, dtype, loss, eval_mode, output)
    from amp_compiler.diagnose import find

    report = next(filter(None, (find.find_nonfinite(subject, one, **keywords) for one in batches)), None)
    emit("all was finite\n" if report is None else f"{str(report).rstrip()}\n", output)
    if report is not None:
        raise typer.Exit(3)
