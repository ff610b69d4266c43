"""The command `amp-compiler tune`: find the model and its batches, tune, report. Torch is imported last."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from amp_compiler.cli import options
from amp_compiler.cli.usage import UsageError, check_data_files, check_place


def tune(
    model: options.ModelArgument,
    output: Annotated[Path, typer.Argument(metavar="OUT.yaml", help="The rule file to write.")],
    data: options.DataOption = None,
    args: options.ArgsOption = None,
    rules: options.RulesOption = "default",
    dtype: options.TypeOption = "auto",
    tolerance: Annotated[
        float | None,
        typer.Option("--tolerance", help="Largest relative error of a result: 0.01 in fp16, 0.08 in bf16."),
    ] = None,
    budget: Annotated[float | None, typer.Option("--budget", metavar="SECONDS", help="Stop the search then.")] = None,
    max_runs: Annotated[
        int | None, typer.Option("--max-runs", metavar="N", help="Stop it after so many runs of the model.")
    ] = None,
    loss: options.LossOption = "",
    eval_mode: options.EvalOption = False,
    json_: options.JsonOption = False,
) -> None:
    """Find the few nodes that have to stay in FP32 for a tolerance, and write them as a rule file.

    Exit codes: 1 the tolerance cannot be met, or the model not be tuned; 2 wrong usage; 3 the file is written and meets
    the tolerance, but the search was stopped before each of its nodes was shown to be needed: the same command goes on.
    """
    check_place("OUT.yaml", output, {"the model": Path(model), "the rules": Path(rules), "the data": data})
    from amp_compiler.diagnose.losses import loss_step
    from amp_compiler.diagnose.tuning import api
    from amp_compiler.forward.settings import make_settings

    subject, batches, loss_fn = model_and_batches(model, data, args, eval_mode, loss)
    check_data_files(model, {"OUT.yaml": output})
    if loss_fn is not None:
        if not isinstance(batches[0], tuple):
            raise UsageError("a loss is called by position", where="--args", hint="leave the names out")
        subject = loss_step(subject, make_settings(rules, dtype, "eager"), loss_fn, "rules", by_name=False)
    result = api.tune(
        subject, batches, rules=rules, dtype=dtype, tolerance=tolerance, output=output, budget=budget,
        max_runs=max_runs,
    )  # fmt: skip
    typer.echo(result.to_json() if json_ else str(result), nl=not json_)
    if result.stopped:
        raise typer.Exit(3)


def model_and_batches(
    model: str, data: Path | None, args: list[str] | None, eval_mode: bool, loss: str
) -> tuple[Any, list[Any], Any]:
    """The model that a command line names, its batches, and the loss function, `None` for none.

    Args:
        model: as for `explain`.
        data: `--data`.
        args: `--args`.
        eval_mode: `--eval`.
        loss: `--loss`.

    Raises:
        UsageError: these do not go together.
    """
    from amp_compiler.cli.model_spec import load_loss, load_model

    if model.endswith(".onnx") and loss:
        raise UsageError("an ONNX file has no backward", where="--loss", hint="leave it out")
    loss_fn: Any = load_loss(loss) if loss else None
    if not model.endswith(".onnx") and data is not None:
        raise UsageError("it is for an ONNX file", where="--data", hint="give --args, or a factory that gives them")
    subject, example = load_model(model, args or (), eval_mode=eval_mode, loss=loss_fn)
    if example is not None:
        return subject, [_batch(example, "--args" if args else model)], loss_fn
    if data is None:
        from amp_compiler.onnx.check.probes import random_batch

        return subject, [random_batch(model)], loss_fn
    from amp_compiler.onnx.check.batches import iterate_batches
    from amp_compiler.onnx.model.model import open_model

    return subject, [*iterate_batches(data, open_model(model))], loss_fn


def _batch(example: Any, where: str) -> Any:
    from amp_compiler.fx.examples import split_example

    args, named = split_example(example)
    if args and named:
        raise UsageError("a batch is by position or by name", where=where, hint="name all of the arguments, or none")
    return named or args
