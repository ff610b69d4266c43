"""What `amp-compiler explain` does: check the options, plan or make the stages, print. Torch is imported last."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from amp_compiler.cli.usage import (
    ALL,
    CAPTURED,
    NODE_BY_NODE,
    UsageError,
    check_data_files,
    check_pass,
    check_place,
    emit,
)
from amp_compiler.errors import AmpError
from amp_compiler.ir.dtypes import ShortName


@dataclass(frozen=True)
class ExplainOptions:
    """What the command line asked for.

    Args:
        model: names a model as `load_model` takes it.
        args: one text for each example argument.
        rules: a preset's name or a path.
        dtype: `fp16`, `bf16` or `auto`.
        eval_mode: plan for inference.
        format: `table`, `text` or `json`.
        output: write there instead of to the terminal.
        html: write the plan there as a page for the browser.
        svg: write the plan there as a picture.
        print_after: print stages instead of the plan: the one behind this pass, or `all`.
        stop_after: run no pass behind this one.
        skip: passes to leave out.
        loss: names the loss of a training step.
        backend: what the stages are made for.
        device: the device that is planned for: `cpu`, `cuda`, or `auto` for that of the model.
        fuse: of an ONNX model: as for `convert`.
        opset: of an ONNX model: raise it to this opset first.
    """

    model: str
    args: tuple[str, ...] = ()
    rules: str = "default"
    dtype: Literal[ShortName, "auto"] = "auto"
    eval_mode: bool = False
    format: str = "table"
    output: Path | None = None
    html: Path | None = None
    svg: Path | None = None
    print_after: str = ""
    stop_after: str = ""
    skip: tuple[str, ...] = ()
    loss: str = ""
    backend: str = NODE_BY_NODE
    device: str = "auto"
    fuse: bool = False
    opset: int | None = None

    @property
    def stages(self) -> bool:
        """Whether stages are asked for, and not the plan."""
        return bool(self.print_after or self.stop_after)

    def check(self) -> None:
        """Refuse what cannot be.

        Raises:
            UsageError: a name that no pass has, an option that goes with another one, a place that is no file.
        """
        read = {"the model": Path(self.model), "the rules": Path(self.rules)}
        check_place("--output", self.output, read)
        check_place("--html", self.html, {**read, "--output": self.output})
        check_place("--svg", self.svg, {**read, "--output": self.output, "--html": self.html})
        for option, name in (("--print-after", self.print_after), ("--stop-after", self.stop_after)):
            if name not in ("", CAPTURED, *([ALL] if option == "--print-after" else [])):
                check_pass(name, option)
        for name in self.skip:
            check_pass(name, "--skip")
        for option, page in (("--html", self.html), ("--svg", self.svg)):
            if self.stages and page is not None:
                raise UsageError("stages are not written as a page", where=option, hint="use --output")
        for option, plans in (("--fuse", self.fuse), ("--opset", self.opset is not None)):
            if self.stages and plans:
                raise UsageError("it is for the plan, not for the stages", where=option, hint="leave it out")
        if self.stages and self.device != "auto":
            raise UsageError("stages are of where the model is", where="--device", hint="leave it out")
        for option, given in (
            ("--skip", self.skip),
            ("--loss", self.loss),
            ("--backend", self.backend != NODE_BY_NODE),
        ):
            if given and not self.stages:
                raise UsageError("it is for the stages of a graph", where=option, hint="give --print-after as well")


def run_explain(options: ExplainOptions) -> None:
    """Print or write what was asked for.

    Raises:
        UsageError: wrong options.
        AmpError: the model or the rules cannot be read, or the model cannot be planned or trained.
    """
    options.check()
    from amp_compiler.cli.model_spec import load_loss, load_model

    loss: Any = load_loss(options.loss) if options.loss else None
    model, example = load_model(options.model, options.args, eval_mode=options.eval_mode, loss=loss)
    places = {"--output": options.output, "--html": options.html, "--svg": options.svg}
    check_data_files(options.model, places)
    if options.stages:
        _explain_stages(model, example, loss, options)
    else:
        _explain_plan(model, example, options)


def _explain_plan(model: Any, example: Any, options: ExplainOptions) -> None:
    from amp_compiler.forward.api import explain
    from amp_compiler.report.table import plan_text, print_plan

    device = None if options.device == "auto" else options.device
    plan = explain(
        model, example,
        rules=options.rules, dtype=options.dtype, device=device, fuse=options.fuse, opset=options.opset,
    )  # fmt: skip
    if options.html is not None:
        plan.to_html(options.html)
    if options.svg is not None:
        plan.to_svg(options.svg)
    if options.format == "json":
        emit(plan.to_json(), options.output)
    elif options.format == "text":
        emit(plan.to_text(), options.output)
    elif options.output is not None:
        emit(plan_text(plan), options.output)
    else:
        print_plan(plan)


def _explain_stages(model: Any, example: Any, loss: Any, options: ExplainOptions) -> None:
    from rich.console import Console

    from amp_compiler.cli.stages import StageOptions, make_stages, print_stages, stages_json, stages_text

    wanted = StageOptions(
        show=options.print_after or options.stop_after,
        stop=options.stop_after,
        skip=options.skip,
        loss=loss,
        rules=options.rules,
        dtype=options.dtype,
        backend=options.backend,
    )
    stages = make_stages(model, example, wanted)
    if options.format == "json":
        emit(stages_json(stages, wanted), options.output)
    elif options.output is not None or options.format == "text":
        emit(stages_text(stages, wanted), options.output)
    else:
        print_stages(stages, wanted, Console())


def run_diff(before: Path, after: Path, output: Path | None, html: Path | None = None) -> bool:
    """Print or write what differs between two plans; says whether anything does.

    Args:
        before: a plan.
        after: another one.
        output: write there instead of to the terminal.
        html: write a page with both there.

    Raises:
        UsageError: a file is not there, or is no plan; the output is one of them.
        AmpError: a plan is of another version.
    """
    read = {"the first plan": before, "the second plan": after}
    check_place("--output", output, read)
    check_place("--html", html, {**read, "--output": output})
    one, other = _read_plan(before), _read_plan(after)
    found = one.diff(other, str(before), str(after))
    if html is not None:
        one.to_html(html, other=other, names=(str(before), str(after)))
    emit(found, output)
    return bool(found)


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
