"""The commands `amp-compiler explain` and `diff`. Torch is imported last."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated, Any

import typer

from amp_compiler.cli import options
from amp_compiler.cli.options import Backend, Device
from amp_compiler.cli.usage import ALL, CAPTURED, UsageError, check_data_files, check_pass, check_place, emit
from amp_compiler.errors import AmpError
from amp_compiler.passes import PASSES

PlanFormat = enum.StrEnum("PlanFormat", "TABLE TEXT JSON")


def explain(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="`package.module:name`, `path/to/file.py:name` (a model, or a function or class that makes one, or a "
            "function that gives (model, example_args)), or an ONNX file.",
        ),
    ],
    args: options.ArgsOption = None,
    rules: options.RulesOption = "default",
    dtype: options.TypeOption = "auto",
    eval_mode: options.EvalOption = False,
    format_: Annotated[
        PlanFormat,
        typer.Option("--format", help="What to print; a table shows reasons where a line has room."),
    ] = PlanFormat.TABLE,
    output: options.OutputOption = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a page for the browser as well.")] = None,
    svg: Annotated[Path | None, typer.Option("--svg", help="Write a picture of the graph as well.")] = None,
    print_after: Annotated[
        str,
        typer.Option(
            "--print-after",
            metavar="PASS",
            autocompletion=lambda: (ALL, CAPTURED, *PASSES),
            help="Print the graph behind this pass instead of the plan, or behind each with `all`: the first in full, "
            "then what each pass changed. `amp-compiler passes` lists them. For the passes of a training step a copy "
            "of the model is trained by AdamW for one step, on the --loss.",
        ),
    ] = "",
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
        Backend, typer.Option("--backend", help="For --print-after: `inductor` runs more passes, and compiles.")
    ] = Backend.EAGER,
    device: Annotated[
        Device, typer.Option("--device", help="Plan for this device, which need not be there.")
    ] = Device.AUTO,
    fuse: Annotated[
        bool, typer.Option("--fuse/--no-fuse", help="Of an ONNX file: as `convert` plans it with this.")
    ] = False,
    opset: Annotated[
        int | None, typer.Option("--opset", metavar="N", help="Of an ONNX file: as `convert --opset` plans it.")
    ] = None,
    target: options.TargetOption = None,
) -> None:
    """Show the precision of every node, the rule that decided it, and every cast with its bytes.

    With --print-after, show the graph from pass to pass.
    """
    places = {"--output": output, "--html": html, "--svg": svg}
    read: dict[str, Path | None] = {"the model": Path(model), "the rules": Path(rules)}
    for option, path in places.items():
        check_place(option, path, read)
        read[option] = path
    if print_after not in ("", CAPTURED, ALL):
        check_pass(print_after, "--print-after")
    of_stages = {"--loss": loss, "--backend": backend != Backend.EAGER}
    of_plan = {
        "--html": html, "--svg": svg, "--fuse": fuse, "--opset": opset is not None, "--device": device != Device.AUTO,
        "--target": target is not None,
    }  # fmt: skip
    for option, value in (of_plan if print_after else of_stages).items():
        if value and print_after:
            raise UsageError("it is for the plan, not for the stages", where=option, hint="leave it out")
        if value:
            raise UsageError("it is for the stages of a graph", where=option, hint="give --print-after as well")
    from amp_compiler.cli.model_spec import load_loss, load_model

    loss_fn: Any = load_loss(loss) if loss else None
    loaded, example = load_model(model, args or (), eval_mode=eval_mode, loss=loss_fn)
    check_data_files(model, places)
    if print_after:
        from amp_compiler.cli.stages import make_stages, print_stages, stages_json, stages_text

        stages = make_stages(
            loaded, example, print_after, loss=loss_fn, rules=rules, dtype=dtype, backend=backend.value,
        )  # fmt: skip
        if format_ == PlanFormat.JSON:
            emit(stages_json(stages, print_after), output)
        elif output is not None or format_ == PlanFormat.TEXT:
            emit(stages_text(stages, print_after), output)
        else:
            print_stages(stages, print_after)
        return
    from amp_compiler.forward import api
    from amp_compiler.report.table import print_plan

    planned_for = None if device == Device.AUTO else device.value
    plan = api.explain(
        loaded, example, rules=rules, dtype=dtype, device=planned_for, fuse=fuse, opset=opset,
        target=target,  # type: ignore[arg-type]  # one of the tables', or refused there
    )  # fmt: skip
    if html is not None:
        plan.to_html(html)
    if svg is not None:
        plan.to_svg(svg)
    if format_ == PlanFormat.JSON:
        emit(plan.to_json(), output)
    elif format_ == PlanFormat.TEXT or output is not None:
        emit(plan.to_text(), output)
    else:
        print_plan(plan)


def diff(
    before: Annotated[Path, typer.Argument(metavar="A.json", help="A plan, as `explain --format json` writes it.")],
    after: Annotated[Path, typer.Argument(metavar="B.json", help="Another one.")],
    output: options.OutputOption = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write a page for the browser as well, with both side by side.")
    ] = None,
) -> None:
    """Show what differs between two plans. Ends with 1 where anything does, and with 0 where nothing does."""
    read = {"the first plan": before, "the second plan": after}
    check_place("--output", output, read)
    check_place("--html", html, {**read, "--output": output})
    one, other = _read_plan(before), _read_plan(after)
    differences = one.diff(other, str(before), str(after))
    if html is not None:
        one.to_html(html, other=other, names=(str(before), str(after)))
    emit(differences, output)
    raise typer.Exit(int(bool(differences)))


def _read_plan(path: Path) -> Any:
    import json

    from amp_compiler.ir.plan import PrecisionPlan

    hint = "name a file that `amp-compiler explain --format json --output` wrote"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise UsageError(f"it cannot be read: {cause}", where=str(path), hint=hint) from cause
    if not isinstance(data, dict):
        raise UsageError("it is no plan", where=str(path), hint=hint)
    try:
        return PrecisionPlan.from_dict(data)
    except AmpError as wrong:
        raise AmpError(wrong.what, where=str(path), hint=wrong.hint) from wrong
