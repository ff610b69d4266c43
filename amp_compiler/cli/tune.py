"""What `amp-compiler tune` does: find the model and its batches, tune, report. Torch is imported last."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from amp_compiler.cli.usage import UsageError, check_data_files, check_place
from amp_compiler.ir.dtypes import ShortName


@dataclass(frozen=True)
class TuneOptions:
    """What the command line asked for.

    Args:
        model: names a model as `load_model` takes it.
        output: the rule file to write.
        data: inputs of an ONNX model: an npz file or a folder of them.
        args: one text for each example argument.
        rules: a preset's name or a path.
        dtype: `fp16`, `bf16` or `auto`.
        tolerance: the largest relative error; `None` for that of the type.
        start: `low` or `fp32`.
        budget: seconds after which the search stops.
        max_runs: runs after which it does.
        loss: names the loss of a training step.
        eval_mode: put the model into eval mode.
    """

    model: str
    output: Path
    data: Path | None = None
    args: tuple[str, ...] = ()
    rules: str = "default"
    dtype: Literal[ShortName, "auto"] = "auto"
    tolerance: float | None = None
    start: str = "low"
    budget: float | None = None
    max_runs: int | None = None
    loss: str = ""
    eval_mode: bool = False

    def check(self) -> None:
        """Refuse what cannot be.

        Raises:
            UsageError: a place that is no file, or an option that does not go with the model.
        """
        read = {"the model": Path(self.model), "the rules": Path(self.rules), "the data": self.data}
        check_place("OUT.yaml", self.output, read)
        is_onnx = self.model.endswith(".onnx")
        if is_onnx and self.loss:
            raise UsageError("an ONNX file has no backward", where="--loss", hint="leave it out")
        if not is_onnx and self.data is not None:
            raise UsageError("it is for an ONNX file", where="--data", hint="give --args, or a factory that gives them")


def run_tune(options: TuneOptions) -> Any:
    """Tune, and write the rules.

    Raises:
        UsageError: wrong options.
        AmpError: the model, the rules or the data cannot be read, or the model cannot be tuned.
    """
    options.check()
    from amp_compiler.cli.model_spec import load_loss, load_model
    from amp_compiler.diagnose.tuning.api import tune

    loss: Any = load_loss(options.loss) if options.loss else None
    model, example = load_model(options.model, options.args, eval_mode=options.eval_mode, loss=loss)
    check_data_files(options.model, {"OUT.yaml": options.output})
    asked: dict[str, Any] = {
        "rules": options.rules, "tolerance": options.tolerance, "output": options.output, "start": options.start,
        "budget": options.budget, "max_runs": options.max_runs,
    }  # fmt: skip
    if example is None:
        return tune(model, _data(options, model), dtype=options.dtype, **asked)
    batch = _batch(example, options)
    if loss is None:
        return tune(model, [batch], dtype=options.dtype, **asked)
    if not isinstance(batch, tuple):
        raise UsageError("a loss is called by position", where="--args", hint="leave the names away")
    return tune(_step(model, loss, options), [batch], **asked)


def _data(options: TuneOptions, model: str) -> Any:
    """The inputs of an ONNX file, drawn where there are none."""
    if options.data is not None:
        return options.data
    from amp_compiler.onnx.check.probes import random_batch
    from amp_compiler.onnx.check.run import Runner, open_to_run

    opened = open_to_run(model)
    batch = random_batch(opened)
    Runner(opened.proto, opened.folder, opened.name, limited=True).run(batch)  # refuses one that takes too much memory
    return [batch]


def _batch(example: Any, options: TuneOptions) -> Any:
    from amp_compiler.fx.examples import split_example

    args, named = split_example(example)
    if args and named:
        where = "--args" if options.args else options.model
        raise UsageError("a batch is by position or by name", where=where, hint="name all of the arguments, or none")
    return named or args


def _step(model: Any, loss: Any, options: TuneOptions) -> Any:
    """A training step of it, which is never called."""
    import torch

    from amp_compiler.training.step import training_step

    trained = [one for one in model.parameters() if one.requires_grad]
    if not trained:
        raise UsageError("the model has no parameter to train", where="--loss", hint="leave it out")
    optimizer = torch.optim.SGD(trained, 1e-3)
    return training_step(model, loss, optimizer, rules=options.rules, dtype=options.dtype, backend="eager")
