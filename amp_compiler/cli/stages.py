"""The stages that a model goes through, made on a copy of it, and printed."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.utils._pytree as pytree
from rich.console import Console
from rich.syntax import Syntax
from rich.text import Text

from amp_compiler.cli.usage import ALL, CAPTURED, UsageError
from amp_compiler.errors import AmpError
from amp_compiler.forward import api as forward
from amp_compiler.fx.examples import split_example
from amp_compiler.ir.dtypes import ShortName
from amp_compiler.passes.pipeline import DEVICE, ONNX_PLAN, PIPELINES, PLAN, STEP, Stage, Stages
from amp_compiler.training.api import training_step


def _where_it_runs(name: str) -> str:
    homes = [f"{pipeline.name}: {pipeline.about}" for pipeline in PIPELINES if name in pipeline.names]
    return " ".join(["give or leave out --eval, or give --backend inductor; it belongs to", *homes])


def make_stages(
    model: Any,
    example: Any,
    show: str = ALL,
    *,
    loss: Callable[..., Any] | None = None,
    rules: str = "default",
    dtype: Literal[ShortName, "auto"] = "auto",
    backend: str = "eager",
) -> Stages:
    """The stages that a model goes through.

    Args:
        model: an `nn.Module`, of which a copy is used, or the path of an ONNX file.
        example: its example arguments, as `amp.explain` takes them.
        show: the name of a pass, `capture` for what came in, or `all`.
        loss: called as `loss(model, *args)`; `None` for the mean of the first floating-point output in FP32.
        rules: a preset's name or a path.
        dtype: `fp16`, `bf16` or `auto`.
        backend: `eager` or `inductor`, which has more passes and compiles.

    Raises:
        UsageError: options that do not fit the model or one another, or the pass to show did not run.
        AmpError: the model cannot be captured, or its loss not be trained. A `PassError` has the stages until then.
    """
    if isinstance(model, str):
        for option, value in (("--args", example), ("--loss", loss)):
            if value is not None:
                raise UsageError("the stages of an ONNX file do not hang on it", where=option, hint="leave it out")
        stages = _of_onnx(model, show, rules, dtype)
    else:
        args, kwargs = split_example(example)
        needs_step = loss is not None or show in (ALL, *STEP.names, *DEVICE.names)
        model = _copied(model)
        options: dict[str, Any] = {"rules": rules, "dtype": dtype, "backend": backend}
        if needs_step and (model.training or loss is not None):
            stages = _of_step(model, args, kwargs, loss or mean_of_first, options)
        else:
            run = forward.compile(model, **options)
            with torch.set_grad_enabled(model.training):
                run(*args, **kwargs)
            stages = run.stages
    if not chosen(stages, show):
        raise UsageError(f"the pass '{show}' did not run", where="--print-after", hint=_where_it_runs(show))
    return stages


def _of_step(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Callable[..., Any], options: dict[str, Any]
) -> Stages:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise UsageError("the model has no parameter to train", where="--print-after", hint="give --eval")
    names, width = tuple(kwargs), len(args)

    def called(model: Any, *batch: Any) -> Any:
        return loss(model, *batch[:width], **dict(zip(names, batch[width:], strict=True)))

    step = training_step(model, called, torch.optim.AdamW(trained), **options)
    step(*args, *kwargs.values())
    return step.stages


def _of_onnx(path: str, show: str, rules: str, dtype: Literal[ShortName, "auto"]) -> Stages:
    """The stages of a file: the neutral passes alone, because it is converted and not compiled."""
    from amp_compiler.onnx.plan import explain_onnx

    known = (CAPTURED, *ONNX_PLAN.names, *PLAN.names)
    if show not in (ALL, *known):
        hint = f"use {', '.join(known)}"
        raise UsageError(f"'{show}' does not run on an ONNX file", where="--print-after", hint=hint)
    stages = Stages()
    explain_onnx(path, rules=rules, dtype="fp16" if dtype == "auto" else dtype, stages=stages)
    return stages


def mean_of_first(model: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
    """The loss where none is given: the mean of the first floating-point output, in FP32.

    Raises:
        UsageError: there is no such output.
    """
    tensors = [value for value in pytree.tree_leaves(model(*args, **kwargs)) if isinstance(value, torch.Tensor)]
    floating = [value for value in tensors if value.is_floating_point()]
    if not floating:
        _refuse_outputs()
    return floating[0].float().mean()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch 2.11 traces no error of ours
def _refuse_outputs() -> None:
    raise UsageError("the model returns no floating-point number to train on", where="--loss", hint="give a loss")


def _copied(model: Any) -> Any:
    try:
        return copy.deepcopy(model)
    except Exception as cause:  # whatever a user's module raises
        raise AmpError(
            f"the model cannot be copied: {type(cause).__name__}: {cause}", hint="name a function that makes it"
        ) from cause


def chosen(stages: Stages, show: str) -> list[Stage]:
    """The stages to show: with a name, those behind that pass (one for each subgraph of a model with graph breaks)."""
    return [stage for stage in stages if show in (ALL, stage.name.rpartition("/")[2])]


def stages_json(stages: Stages, show: str) -> str:
    """The chosen stages as JSON: a list of objects with `name` and `text`."""
    rows = [{"name": stage.name, "text": stage.text} for stage in chosen(stages, show)]
    return json.dumps(rows, indent=1, ensure_ascii=False) + "\n"


def stages_text(stages: Stages, show: str = ALL) -> str:
    """What `print_stages` prints, without colours."""
    text = io.StringIO()
    print_stages(stages, show, Console(file=text, color_system=None))
    return text.getvalue()


def print_stages(stages: Stages, show: str = ALL, console: Console | None = None) -> None:
    """Print one stage as it is; of all, the first in full and then what each pass changed, coloured on a terminal."""
    console = console or Console()
    if show != ALL:
        shown = chosen(stages, show)
        for stage in shown:
            if len(shown) > 1:
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
