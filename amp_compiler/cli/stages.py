"""The stages that a model goes through, made on a copy of it, and printed."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.utils._pytree as pytree
from rich.console import Console
from rich.syntax import Syntax
from rich.text import Text

from amp_compiler.cli.usage import ALL, CAPTURED, NODE_BY_NODE, UsageError
from amp_compiler.errors import AmpError, PassError
from amp_compiler.forward import api as forward
from amp_compiler.fx.examples import split_example
from amp_compiler.ir.dtypes import ShortName
from amp_compiler.passes.base import FunctionalPass, PassResult
from amp_compiler.passes.pipeline import DEVICE, ONNX_PLAN, PIPELINES, PLAN, STEP, Pipeline, Stage, Stages
from amp_compiler.training import setup
from amp_compiler.training.step import training_step


@dataclass(frozen=True)
class StageOptions:
    """Which stages to make and which to show.

    Args:
        show: the name of a pass, `capture` for what came in, or `all`.
        stop: run no pass behind this one; empty to run all.
        skip: passes to leave out.
        loss: called as `loss(model, *args)`; `None` for the mean of the first floating-point output in FP32.
        rules: a preset's name or a path.
        dtype: `fp16`, `bf16` or `auto`.
        backend: `eager` or `inductor`, which has more passes and compiles.
    """

    show: str = ALL
    stop: str = ""
    skip: tuple[str, ...] = ()
    loss: Callable[..., Any] | None = None
    rules: str = "default"
    dtype: Literal[ShortName, "auto"] = "auto"
    backend: str = NODE_BY_NODE

    @property
    def of_step(self) -> bool:
        """Whether a training step is needed, or the forward is enough."""
        own, last = {*STEP.names, *DEVICE.names}, self.stop or self.show
        return self.loss is not None or last == ALL or last in own or not own.isdisjoint(self.skip)

    def pipelines(self, run: Sequence[Pipeline]) -> list[Pipeline]:
        """Those of `run` in which something is skipped or stopped at.

        Raises:
            UsageError: a pass cannot be skipped, or stands in none of them.
        """
        changed = {pipeline.name: pipeline for pipeline in run}
        for name in self.skip:
            changed.update(_where(name, "--skip", changed, lambda pipeline, name=name: pipeline.skip(name)))  # type: ignore[misc]
        if self.stop == CAPTURED:
            first = changed["CAPTURE"]
            changed["CAPTURE"] = first.insert_before(first.names[0], _Stop())
        elif self.stop:
            changed.update(
                _where(self.stop, "--stop-after", changed, lambda pipeline: pipeline.insert_after(self.stop, _Stop()))
            )
        return [changed[pipeline.name] for pipeline in run if changed[pipeline.name] is not pipeline]


def _where(
    name: str, option: str, pipelines: dict[str, Pipeline], change: Callable[[Pipeline], Pipeline]
) -> dict[str, Pipeline]:
    """The pipelines that have the pass, changed."""
    found = [pipeline for pipeline in pipelines.values() if name in pipeline.names]
    if not found:
        raise UsageError(f"no pass '{name}' runs here", where=option, hint=_where_it_runs(name))
    try:
        return {pipeline.name: change(pipeline) for pipeline in found}
    except PassError as cause:
        raise UsageError(cause.what, where=option, hint=cause.hint) from cause


def _where_it_runs(name: str) -> str:
    homes = [pipeline.name for pipeline in PIPELINES if name in pipeline.names]
    here = [home for home in homes if not home.startswith("ONNX")]
    hints = {
        "FORWARD": "leave out --eval",
        "INFERENCE": "give --eval",
        "FORWARD INFERENCE": "give --backend inductor",
        "STEP": "leave out --eval",
        "DEVICE": "give --backend inductor, without --eval",
        "PIECE": "give --backend inductor",
        "LATE": "it runs inside of Inductor, and TORCH_LOGS=post_grad_graphs prints what comes out",
        "": "amp.export_onnx runs it, this command does not",
    }
    hint = "name an ONNX file" if ONNX_PLAN.name in homes else hints.get(" ".join(here), "see `amp-compiler passes`")
    return f"it belongs to {' and '.join(homes)}: {hint}" if homes else "no pipeline has it"


class _Reached(PassError):
    """The pass to stop after has run."""


@dataclass(frozen=True)
class _Stop(FunctionalPass[Any]):
    """Ends the run."""

    name: ClassVar[str] = "stop"
    exact: ClassVar[bool] = True

    def run(self, subject: Any) -> PassResult[Any]:
        raise _Reached("stopped as asked for")


def make_stages(model: Any, example: Any, options: StageOptions) -> Stages:
    """The stages that a model goes through.

    Args:
        model: an `nn.Module`, of which a copy is used, or the path of an ONNX file.
        example: its example arguments, as `amp.explain` takes them.
        options: what to make.

    Raises:
        UsageError: options that do not fit the model or one another.
        AmpError: the model cannot be captured, or its loss not be trained. A `PassError` has the stages until then.
    """
    if isinstance(model, str):
        if example is not None:
            raise UsageError("the stages of an ONNX file do not hang on it", where="--args", hint="leave it out")
        return _of_onnx(model, options)
    args, kwargs = split_example(example)
    try:
        if options.of_step and (model.training or options.loss is not None):
            return _of_step(_copied(model), args, kwargs, options)
        return _of_forward(_copied(model), args, kwargs, options)
    except _Reached as reached:
        return reached.stages  # type: ignore[no-any-return]


def _of_forward(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: StageOptions) -> Stages:
    passes = options.pipelines(forward.RUN)
    run = forward.compile(
        model, rules=options.rules, dtype=options.dtype, backend=options.backend, passes=passes or None
    )
    with torch.set_grad_enabled(model.training):
        run(*args, **kwargs)
    return run.stages


def _of_step(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: StageOptions) -> Stages:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise UsageError("the model has no parameter to train", where="--print-after", hint="give --eval")
    names, loss, width = tuple(kwargs), options.loss or mean_of_first, len(args)

    def called(model: Any, *batch: Any) -> Any:
        return loss(model, *batch[:width], **dict(zip(names, batch[width:], strict=True)))

    step = training_step(
        model,
        called,
        torch.optim.AdamW(trained),
        rules=options.rules,
        dtype=options.dtype,
        backend=options.backend,
        passes=options.pipelines(setup.RUN) or None,
    )
    step(*args, *kwargs.values())
    return step.stages


def _of_onnx(path: str, options: StageOptions) -> Stages:
    """The stages of a file: the neutral passes alone, because it is converted and not compiled."""
    from amp_compiler.onnx.plan import explain_onnx

    known = (CAPTURED, *ONNX_PLAN.names, *PLAN.names)
    for option, name in (("--print-after", options.show), ("--stop-after", options.stop)):
        if name not in (ALL, "", *known):
            hint = f"use {', '.join(known)}"
            raise UsageError(f"'{name}' does not run on an ONNX file", where=option, hint=hint)
    if options.skip or options.loss is not None:
        option = "--skip" if options.skip else "--loss"
        raise UsageError("there is nothing of that in the plan of an ONNX file", where=option, hint="leave it out")
    stages, until = Stages(), Stages()
    explain_onnx(path, rules=options.rules, dtype="fp16" if options.dtype == "auto" else options.dtype, stages=stages)
    for stage in stages:
        until.note(*stage)
        if stage.name == options.stop:
            break
    return until


def mean_of_first(model: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
    """The loss where none is given: the mean of the first floating-point output, in FP32.

    Raises:
        UsageError: there is no such output.
    """
    for value in pytree.tree_leaves(model(*args, **kwargs)):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.float().mean()
    raise UsageError("the model returns no floating-point number to train on", where="--loss", hint="give a loss")


def _copied(model: Any) -> Any:
    try:
        return copy.deepcopy(model)
    except Exception as cause:  # whatever a user's module raises
        raise AmpError(
            f"the model cannot be copied: {type(cause).__name__}: {cause}", hint="name a function that makes it"
        ) from cause


def chosen(stages: Stages, options: StageOptions) -> list[Stage]:
    """The stages to show: with a name, those behind that pass (one for each piece of a model in pieces).

    Raises:
        UsageError: the pass did not run.
    """
    found = [stage for stage in stages if options.show in (ALL, stage.name.rpartition("/")[2])]
    if not found:
        hint = _where_it_runs(options.show)
        if options.stop:
            hint = f"it comes behind '{options.stop}', or not at all: leave out --stop-after"
        raise UsageError(f"the pass '{options.show}' did not run", where="--print-after", hint=hint)
    return found


def stages_json(stages: Stages, options: StageOptions) -> str:
    """The chosen stages as JSON: a list of objects with `name` and `text`."""
    rows = [{"name": stage.name, "text": stage.text} for stage in chosen(stages, options)]
    return json.dumps(rows, indent=1, ensure_ascii=False) + "\n"


def stages_text(stages: Stages, options: StageOptions) -> str:
    """What `print_stages` prints, without colours."""
    text = io.StringIO()
    print_stages(stages, options, Console(file=text, color_system=None))
    return text.getvalue()


def print_stages(stages: Stages, options: StageOptions, console: Console) -> None:
    """Print one stage as it is; of all, the first in full and then what each pass changed, coloured on a terminal."""
    if options.show != ALL:
        found = chosen(stages, options)
        for stage in found:
            if len(found) > 1:
                _say(console, Text(f"=== {stage.name}", style="bold"))
            _say(console, Text(stage.text.rstrip("\n")))
        return
    for name, text in stages.diffs():
        title = Text(f"=== {name}", style="bold")
        if not text:
            _say(console, title.append(": nothing changed", style="dim not bold"))
            continue
        _say(console, title)
        is_diff = text.startswith("--- ")
        _say(console, Syntax("", "diff", theme="ansi_dark").highlight(text) if is_diff else Text(text), end="")


def _say(console: Console, text: Text, end: str = "\n") -> None:
    console.print(text, soft_wrap=True, highlight=False, markup=False, end=end)
